"""`train --profile FIRST:LAST`: torch's profiler over a few steps, written where `draftsmith trace` finds it."""

from pathlib import Path

from draftsmith.errors import UserError


class StepProfiler:
    """Profiles the steps `first`..`last` (both included, 1 = the first step) of one worker; nothing if `steps` is None.
    A run that begins between them profiles the rest.

    Writes RUN/profiles/WORKER.json.gz, a Chrome trace on the wall clock. Raises UserError for a malformed `steps`.
    """

    def __init__(self, run: Path, worker: str, steps: str | None):
        self._path = run / "profiles" / f"{worker}.json.gz"
        self._first, self._last = profiled_steps(steps) if steps else (1, 0)
        self._profiler, self._done = None, 0

    def before(self, step: int) -> None:
        """Call before step `step` begins, and once more with the number after the last step to end a profile there."""
        if self._first <= step <= self._last:
            self._done += 1
            if self._profiler is None:
                from torch.profiler import profile

                self._profiler = profile(record_shapes=False, with_stack=False)
                self._profiler.start()
        elif step > self._last and self._profiler is not None:
            self.close()

    def close(self) -> None:
        """End a profile that is under way and write it."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None

    def missed(self) -> str | None:
        """At the end: a sentence if fewer steps were profiled than asked for."""
        asked = self._last - self._first + 1
        if self._done == asked:
            return None
        return f"--profile {self._first}:{self._last}: {self._done} of {asked} steps were profiled, no more were trained now"


def profiled_steps(steps: str) -> tuple[int, int]:
    """ "20:25" -> (20, 25); "20" -> (20, 20). UserError for anything else."""
    first, _, last = steps.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or int(first) < 1 or int(last or first) < int(first):
        raise UserError(f"--profile {steps!r}: give FIRST:LAST, steps counted from 1, e.g. 20:25")
    return int(first), int(last or first)


def check_in_run(steps: str, done: int, last: int) -> None:
    """UserError where none of them would come up: `done` steps are behind the run, `last` is its last one."""
    first, end = profiled_steps(steps)
    if first > last:
        raise UserError(f"--profile {steps}: the run's last step is {last}, so that nothing would be profiled")
    if end <= done:
        raise UserError(f"--profile {steps}: the run goes on with step {done + 1}, so that nothing would be profiled")
