"""What the training loop leans on: units built ahead, a polite stop, and the counts of a log interval."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

from draftsmith.unit import Unit, UnitSequence


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


class Loader:
    """Builds units ahead of the step in one background thread, in order."""

    AHEAD = 4

    def __init__(self, units: UnitSequence, plan: Plan):
        self._units, self._plan, self._numbers = units, plan, plan.all_units()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: deque[Future[Unit]] = deque()

    def __enter__(self) -> "Loader":
        for _ in range(self.AHEAD):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def step(self, step: int) -> Iterator[Unit]:
        """This trainer's units of one optimizer step."""
        for number in self._plan.units(step):
            unit = self._ahead.popleft().result()
            assert unit.number == number, f"the loader holds unit {unit.number}, step {step} wants {number}"
            self._submit()
            yield unit

    def _submit(self) -> None:
        number = next(self._numbers, None)
        if number is not None:
            self._ahead.append(self._pool.submit(self._units.unit, number))


class StopRequest:
    """SIGTERM or SIGINT asks for a checkpoint and an end; a second one ends at once (KeyboardInterrupt)."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python runs handlers there only
            self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Interval:
    """Counts of one log interval. The first interval's rates leave out the first step, which compiles."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.since = time.monotonic()
        self.steps = self.units = self.tokens = self.anchors = 0

    def count(self, unit: Unit) -> None:
        self.units += 1
        self.tokens += unit.tokens_used
        self.anchors += unit.anchors_used

    def seconds(self) -> float:
        return time.monotonic() - self.since
