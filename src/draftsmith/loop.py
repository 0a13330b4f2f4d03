"""What the training loop leans on: units built ahead, a polite stop, and the counts of a log interval."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Generic, Self, TypeVar

from draftsmith.unit import Unit

Key = TypeVar("Key")


@dataclass(frozen=True)
class Plan:
    """The whole numbers a run is made of: optimizer steps start..total-1 of G units; trainer r of R takes u mod R = r."""

    start: int
    total: int
    per_step: int
    trainer: int = 0
    trainers: int = 1
    evaluate_every: int = 0
    rows: int = 0
    """Held-out rows; row e is evaluated by trainer e mod R."""

    def evaluates(self, done: int) -> bool:
        """The held-out rows come after this many finished steps."""
        return done == self.total or (self.evaluate_every > 0 and done % self.evaluate_every == 0)

    def held_out(self) -> list[int]:
        """This trainer's held-out rows."""
        return [row for row in range(self.rows) if row % self.trainers == self.trainer]

    def units(self, step: int) -> list[int]:
        """This trainer's unit numbers of one optimizer step."""
        numbers = range(step * self.per_step, (step + 1) * self.per_step)
        return [u for u in numbers if u % self.trainers == self.trainer]

    def all_units(self) -> Iterator[int]:
        for step in range(self.start, self.total):
            yield from self.units(step)


class Loader(Generic[Key]):
    """Builds what is needed next ahead of time in one background thread, in order of `keys`."""

    AHEAD = 4

    def __init__(self, build: Callable[[Key], Unit], keys: Iterable[Key]):
        self._build, self._keys = build, iter(keys)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: deque[tuple[Key, Future[Unit]]] = deque()

    def __enter__(self) -> Self:
        for _ in range(self.AHEAD):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, key: Key) -> Unit:
        """The unit of `key`, which must be the next of the keys."""
        due, unit = self._ahead.popleft()
        assert due == key, f"the loader holds {due}, wanted is {key}"
        self._submit()
        return unit.result()

    def _submit(self) -> None:
        key = next(self._keys, None)
        if key is not None:
            self._ahead.append((key, self._pool.submit(self._build, key)))


class StopRequest:
    """Asks the run to checkpoint and end: by `ask`, by the file that `draftsmith stop` writes, or when the time is up.

    `watch` is called between steps. As a context manager in a process's main thread it also takes SIGTERM and SIGINT, and
    answers with `say`; a second signal ends the process (KeyboardInterrupt, or SystemExit with the signal's own code).
    """

    def __init__(self, file: Path | None = None, minutes: float = 0.0, say: Callable[[str], None] = lambda text: None):
        self.requested, self._say = False, say
        self._file, self._looked = file, 0.0
        self._end = time.monotonic() + minutes * 60 if minutes else None
        self._old: dict[int, object] = {}

    def ask(self) -> None:
        self.requested = True

    def watch(self) -> bool:
        """Whether a stop was asked for; looks at the file at most twice a second (it may lie on a network)."""
        now = time.monotonic()
        if self._end is not None and now > self._end:
            self.requested = True
        if self._file is not None and now > self._looked + 0.5:
            self._looked = now
            self.requested |= self._file.exists()
        return self.requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers there only
            self._old = {s: signal.signal(s, self._signal) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.requested = True
        self._say("stopping after this step; once more ends at once")


class Interval:
    """One trainer's counts of one log interval. The first one begins after set-up and compilation."""

    def __init__(self) -> None:
        self.skipped, self.bad = 0, -1  # updates skipped up to the last log step, and the bad unit that was told then
        self.begin()

    def begin(self) -> None:
        self.since = time.monotonic()
        self.steps = self.units = self.tokens = self.anchors = 0
        self.waited_units = 0.0

    def count(self, unit: Unit, waited: float) -> None:
        """A unit that the loader made us wait `waited` seconds for."""
        self.units += 1
        self.tokens += unit.tokens_used
        self.anchors += unit.anchors_used
        self.waited_units += waited

    def seconds(self) -> float:
        return time.monotonic() - self.since


@dataclass(frozen=True)
class Waits:
    """Shares of an interval that a role waited, mean over its workers, and the role the others waited for."""

    trainers: float
    """For taps or units."""
    targets: float | None
    """For free slots; None when colocated."""
    bound_by: str

    @classmethod
    def of(cls, seconds: float, units: float, taps: float, targets: float | None) -> Self:
        """From seconds that the trainers waited for units and for taps, and the targets for slots, each a mean."""
        trainer = "trainers" if targets is not None else "colocated work"
        bound = "input" if units > max(0.05 * seconds, taps) else trainer
        if targets is not None and bound != "input" and taps > targets:
            bound = "targets"
        share = None if targets is None else targets / seconds
        return cls((units + taps) / seconds, share, bound)
