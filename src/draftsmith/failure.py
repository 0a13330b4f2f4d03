"""What went wrong with a worker process, in words: its exit code's meaning, its last lines, how to go on."""

import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draftsmith.run import EXIT_FAILED, EXIT_PEER, EXIT_TERMINATED, EXIT_USER, attempt_of
from draftsmith.topology import Place, Topology

LAST_LINES = 20
OOM_COUNTS = Path("/sys/fs/cgroup/memory.events")

SIGNALS = {
    signal.SIGKILL: "killed: by hand, by the scheduler, or by the kernel for want of memory (`dmesg` tells)",
    signal.SIGBUS: "bus error: a file that it had mapped became shorter, or its disk or shared memory is full",
    signal.SIGSEGV: "segmentation fault in native code: the stack is in its log",
    signal.SIGABRT: "aborted by native code, such as NCCL's watchdog: the reason is in its log",
    signal.SIGTERM: "terminated from outside",
    signal.SIGINT: "interrupted from outside",
}


class Failure(NamedTuple):
    """A worker process that failed, by its number on this host; what is used of torch's ProcessFailure."""

    exitcode: int
    local_rank: int
    pid: int


class Restarts(logging.Handler):
    """Torch's agent starts the workers of several hosts again by itself; of the failure before it there is but a log
    record, which is told here."""

    LOGGER, BEGINNING = (
        "torch.distributed.elastic.multiprocessing.api",
        "failed (exitcode: %s) local_rank: %s (pid: %s)",
    )

    def __init__(self, tell: Callable[[Failure], None]):
        super().__init__()
        self._tell, self.told = tell, 0

    def listen(self) -> None:
        logger = logging.getLogger(self.LOGGER)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith(self.BEGINNING):
            failure = Failure(*record.args[:3])
            self._tell(failure)
            self.told = failure.pid

    def close(self) -> None:
        super().close()
        logging.getLogger(self.LOGGER).removeHandler(self)


def first_failure(failures):
    """The worker whose end was the cause: not one that was ended for it, nor one that missed it."""
    consequence = {EXIT_TERMINATED: 2, -signal.SIGTERM: 2, EXIT_PEER: 1}
    return min(failures, key=lambda f: (consequence.get(f.exitcode, 0), f.timestamp))


def explain(failure, topology: Topology, path: Path, out_of_memory: int) -> list[str]:
    """The first worker that failed, why, and its last lines. `failure`: torch's ProcessFailure."""
    from draftsmith.host import log_name

    place = Place(topology, failure.local_rank)
    places = [Place(topology, i) for i in range(topology.workers)] if topology.threads else [place]
    who = f"{place.role} {place.index}" if len(places) == 1 else "the process of all workers"
    attempt = attempt_of(path)
    lines = [f"{who} (process {failure.pid}, attempt {attempt}) failed: {meaning(failure.exitcode, out_of_memory)}"]
    log = newest_log(path, attempt, log_name(places))
    if log is None:
        return lines
    lines.append(f"its last lines, {log}:")
    lines += [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]]
    if (path / "checkpoints").is_dir() and any((path / "checkpoints").glob("step_*")):
        lines.append(f"complete checkpoints are untouched; go on with --run {path} --resume")
    return lines


def newest_log(path: Path, attempt: int, name: str) -> Path | None:
    """This host's log of a worker; with several hosts its number is not known here, so that the newest one is taken."""
    exact = path / "logs" / f"attempt_{attempt}" / name
    if exact.is_file():
        return exact
    others = list(exact.parent.glob(re.sub(r"\d+\.log$", "*.log", name)))
    return max(others, key=lambda p: p.stat().st_mtime, default=None)


def meaning(code: int, out_of_memory: int = 0) -> str:
    """What an exit code says."""
    if code == -signal.SIGKILL and out_of_memory:
        return "killed by the kernel: this container's memory limit was reached"
    if code < 0:
        known = [number for number in SIGNALS if number == -code]
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"{name}, {SIGNALS[known[0]]}" if known else name
    known_codes = {
        EXIT_FAILED: "an error", EXIT_USER: "a mistake in the recipe or its files", EXIT_TERMINATED: "told to end",
        EXIT_PEER: "another worker, perhaps of another host, is gone or silent",
    }  # fmt: skip
    return f"{known_codes.get(code, 'an error')} (exit code {code})"


def out_of_memory_kills() -> int:
    """How many processes of this container the kernel has killed for memory; 0 where it does not say."""
    try:
        counts = dict(line.split() for line in OOM_COUNTS.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))
