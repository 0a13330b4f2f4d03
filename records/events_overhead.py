"""What the event log costs: a run whose every other log interval goes without it. See events_overhead.md.

    python records/events_overhead.py RECIPE RUN [--key value ...]

Within one run, intervals alternate between the real log (spans, step record, flush) and one that does nothing, so both see
the same machine, data and weights. Times cover the whole interval, the writing of the record included. Processor time of
the training thread (with run.threads = 1 the whole step) is measured beside the wall clock, which other programs disturb.
"""

import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import draftsmith.train
from draftsmith.__main__ import parse_recipe
from draftsmith.device_spans import DeviceEventLog
from draftsmith.events import EventLog, StepRecord
from draftsmith.options import TrainOptions
from draftsmith.run import RunDirectory
from draftsmith.topology import Place

SKIP = 2  # intervals that warm up


class Switched(DeviceEventLog if torch.cuda.is_available() else EventLog):
    """An event log that is off in every second interval and notes how long each interval took."""

    intervals: list[tuple[bool, float, float]] = []
    spans = 0

    def __init__(self, *arguments: Any, **keywords: Any):
        self._on = True
        super().__init__(*arguments, **keywords)
        self._begin()

    def _begin(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.thread_time()

    def span(self, name: str, **attributes: Any) -> Any:
        if not self._on:
            return nullcontext()
        Switched.spans += 1
        return super().span(name, **attributes)

    def work(self, name: str, **attributes: Any) -> Any:
        return super().work(name, **attributes) if self._on else nullcontext()

    def step(self, record: StepRecord) -> None:
        if self._on:
            super().step(record)
        self.intervals.append((self._on, time.perf_counter() - self._wall, time.thread_time() - self._processor))
        self._on = not self._on
        self._begin()


def main() -> None:
    options, config = parse_recipe(TrainOptions, [sys.argv[1], "--run", *sys.argv[2:]], "overhead", "")
    with patch.object(draftsmith.train, "open_log", open_switched):
        draftsmith.train.train(config, Path(options.run))
    print(f"{len(Switched.intervals)} intervals of {config.run.log_every} steps; {Switched.spans} spans")
    for clock, place in (("wall clock", 1), ("processor", 2)):
        compare(clock, [(one[0], one[place] / config.run.log_every) for one in Switched.intervals[SKIP:]])
    alone(Path(options.run) / "alone")


def open_switched(run: RunDirectory, place: Place) -> Switched:
    return Switched(run.path, place.role, run.attempt, place.number)


def compare(clock: str, intervals: list[tuple[bool, float]]) -> None:
    """Milliseconds a step with and without the log, and the ratio of neighbours."""
    on, off = ([1e3 * seconds for was_on, seconds in intervals if was_on is which] for which in (True, False))
    for name, values in (("with", on), ("without", off)):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{clock}, {name:>7}: median {median:.3f} ms a step, quartiles {low:.3f} .. {high:.3f}")
    ratios = [a / b - 1 for a, b in zip(on, off, strict=False)]
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"{clock}: median ratio of neighbours {100 * statistics.median(ratios):+.2f} % (standard error {100 * error:.2f} %)"
    )


def alone(folder: Path, spans: int = 100_000) -> None:
    """The log by itself: a span, its share of a flush, and a log step."""
    log = EventLog(folder)
    begin = time.perf_counter()
    for unit in range(spans):
        with log.span("step", unit=unit):
            pass
    middle = time.perf_counter()
    log.flush()
    end = time.perf_counter()
    record = StepRecord(step=1, loss=1.0, slot_accuracy=[0.5] * 15, lr=1e-3, gradient_norm=1.0, tokens_per_second=1e4)
    for _ in range(1000):
        with log.span("step", unit=1):
            pass
        log.step(record)
    last = time.perf_counter()
    log.close()
    print(
        f"alone: a span {1e6 * (middle - begin) / spans:.2f} us, its part of a flush {1e6 * (end - middle) / spans:.2f} us, ",
        end="",
    )
    print(f"a log step {1e6 * (last - end) / 1000:.0f} us")


if __name__ == "__main__":
    main()
