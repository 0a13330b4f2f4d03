"""What a worker writes about itself: RUN/events/HOST.ROLEn.jsonl, one JSON object a line. Imports no torch.

Contract: a line is one os.write to a file opened for appending, so a killed worker loses at most its last line and what
it had buffered since the last log step. Spans are buffered as tuples (a few microseconds each) and written in columns at
log steps. Times are seconds since the epoch, read from the monotonic clock and anchored once when the log is opened.
docs/metrics.md describes every field; history.py reads the files back.
"""

import json
import math
import os
import platform
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.errors import UserError

FORMAT = 1

# A span whose name starts so is time spent waiting; every other span is work.
WAIT_PREFIX = "wait"
# The role in the name of a device's own event file, behind its worker's (device_spans.py).
DEVICE_SUFFIX = "-gpu"


@dataclass(frozen=True)
class StepRecord:
    """One log step. Rates and shares are over the steps since the previous record, `loss` to `slot_accuracy` and
    `gradient_norm` are the last step's; None is not written."""

    step: int
    """Optimizer steps done, 1 after the first."""
    loss: float
    """Weighted cross-entropy of the step's units in nats, by the sum law."""
    block_acceptance: float | None = None
    """Right drafts in a row + 1, mean over training blocks. Biased against decoding: EvaluationRecord's walk is not."""
    slot_accuracy: list[float] | None = None
    """[B-1] share of right argmax tokens in slots 1..B-1."""
    lr: float | None = None
    gradient_norm: float | None = None
    """Global norm before clipping."""
    skipped_updates: int | None = None
    """Updates skipped since this attempt began (non-finite gradients, or no supervised slot)."""
    steps: int | None = None
    """Optimizer steps in this interval."""
    seconds: float | None = None
    """Wall-clock seconds of this interval."""
    tokens_per_second: float | None = None
    """Context tokens, all trainers together, padding not counted."""
    block_tokens_per_second: float | None = None
    """Drafter positions (anchors x block size), all trainers together."""
    useful_tflops: float | None = None
    """10^12 operations a second that the drafter's maths needs, one trainer; no recompute, no padding."""
    ceiling_tflops: float | None = None
    """The same device's rate in one large matrix product, measured when the run started."""
    tokens_used_share: float | None = None
    """Tokens / (units x T)."""
    anchors_used_share: float | None = None
    """Weighted anchors / (units x A)."""
    memory_bytes: int | None = None
    """Device memory in use (CPU: resident memory of the process)."""
    memory_total_bytes: int | None = None
    gpu_utilisation_percent: float | None = None
    power_watts: float | None = None
    recompiles: int | None = None
    """Compilations after set-up in this attempt, of the process that wrote the record: parts of a target met late."""
    replays: int | None = None
    """CUDA graph replays of the step since this attempt began: one a unit, one an update. Of the first trainer."""
    busy_seconds: float | None = None
    """Seconds of the interval inside spans of work; filled from the log's own spans when None."""
    wait_seconds: float | None = None
    """Seconds of the interval inside spans named wait_*; filled likewise."""
    trainers_wait_share: float | None = None
    """Share of the interval that trainers had nothing to work on (no unit, no taps), mean over all of them."""
    targets_wait_share: float | None = None
    """Share of the interval that target workers waited for a free slot, mean over all of them; None if colocated."""
    bound_by: str | None = None
    """What the run's speed hangs on: targets, trainers, input, or colocated work."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Teacher-forced walk on held-out units after a step (walk.py). Acceptance lengths include the bonus token."""

    step: int
    acceptance_length: float
    """Mean over responses of the mean over their cycles."""
    acceptance_length_micro: float
    """Tokens / cycles over everything."""
    acceptance_per_position: list[float]
    """[B-1] share of cycles that accept at least k = 1..B-1 drafts."""
    responses: int
    cycles: int
    loss: float | None = None
    """Weighted cross-entropy on the held-out units in nats, by the sum law, as StepRecord's."""


class EventLog:
    """One worker's event file. Use as a context manager: leaving it writes how the worker ended.

    `role` and `index` name the file and the worker (both0, target1, trainer0). Only one worker of a run, trainer 0,
    writes step and evaluation records; the others call `flush` at log steps. `total_steps` lets readers give an ETA;
    `about` holds facts about the worker (device name, ceiling_tflops ...). UserError if the file cannot be opened.
    """

    def __init__(
        self,
        run: Path,
        role: str = "both",
        attempt: int = 0,
        index: int = 0,
        total_steps: int | None = None,
        about: dict[str, Any] | None = None,
        host: str | None = None,
    ):
        self.host = host or platform.node().split(".")[0] or "localhost"
        self.worker = f"{self.host}.{role}{index}"
        self.path = run / "events" / f"{self.worker}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: the events cannot be written: {error.strerror}; move it away") from None
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._spans: deque[tuple[str, int, int, dict[str, Any] | None]] = deque()
        self._interval_start_ns: int | None = None
        self._cut, self._warned = self._ends_cut(), False
        self._write(
            kind="open",
            format=FORMAT,
            t=self.seconds(time.monotonic_ns()),
            clock_offset_seconds=self._clock_ns / 1e9,
            host=self.host,
            role=role,
            index=index,
            attempt=attempt,
            pid=os.getpid(),
            total_steps=total_steps,
            about=about or {},
        )

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    def close(self, error: str | None = None) -> None:
        """Flush, say that the worker left (with `error` if it failed), close the file. A second call does nothing."""
        if self._file < 0:
            return
        self.flush()
        self._write(kind="end", t=self.seconds(time.monotonic_ns()), error=error)
        os.close(self._file)
        self._file = -1

    def seconds(self, monotonic_ns: int) -> float:
        """time.monotonic_ns() -> seconds since the epoch on this log's clock."""
        return (monotonic_ns + self._clock_ns) / 1e9

    def span(self, name: str, **attributes: Any) -> "Span":
        """`with log.span("prefill", unit=u):` names what this worker does; names starting with wait_ count as waiting.

        Host clock: on a GPU it covers the launch, unless the block waits; `work` has the device's times, too.
        """
        return Span(self._spans.append, name, attributes or None)

    def work(self, name: str, **attributes: Any) -> AbstractContextManager[None]:
        """A span of work that a device does; device_spans.py times it on the device's clock as well."""
        return self.span(name, **attributes)

    def add_span(self, name: str, start_ns: int, end_ns: int, **attributes: Any) -> None:
        """A span measured elsewhere, both ends on the time.monotonic_ns() clock."""
        self._spans.append((name, start_ns, end_ns, attributes or None))

    def step(self, record: StepRecord) -> None:
        """Write a log step, its interval's spans first."""
        busy, wait = self.flush()
        values = _known(record)
        if busy or wait:
            values.setdefault("busy_seconds", busy)
            values.setdefault("wait_seconds", wait)
        self._write(kind="step", t=self.seconds(time.monotonic_ns()), **values)

    def plan(self, total_steps: int, about: dict[str, Any] | None = None) -> None:
        """What is known only after the log was opened: the run's length, and more facts about the worker."""
        self._write(kind="plan", t=self.seconds(time.monotonic_ns()), total_steps=total_steps, about=about or {})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(kind="evaluation", t=self.seconds(time.monotonic_ns()), **_known(record))

    def note(self, text: str) -> None:
        """A line for people: what happened, in words."""
        self._write(kind="note", t=self.seconds(time.monotonic_ns()), text=text)

    def flush(self) -> tuple[float, float]:
        """Write the spans buffered so far, one line a name, and their sums; returns (busy, waiting) seconds."""
        now = time.monotonic_ns()
        by_name: dict[str, list[tuple[int, int, dict[str, Any] | None]]] = {}
        for _ in range(len(self._spans)):  # threads may append meanwhile: theirs go with the next flush
            name, start, end, attributes = self._spans.popleft()
            by_name.setdefault(name, []).append((start, end, attributes))
        sums = own_seconds([(name, start, end) for name, spans in by_name.items() for start, end, _ in spans])
        for name, spans in by_name.items():
            self._write(kind="spans", name=name, **self._columns(spans))
        if sums:
            begin = min(start for spans in by_name.values() for start, _, _ in spans)  # the first begins after loading
            seconds = (now - (self._interval_start_ns or begin)) / 1e9
            counts = {name: len(spans) for name, spans in by_name.items()}
            self._write(kind="busy", t=self.seconds(now), seconds=seconds, span_seconds=sums, span_counts=counts)
            self._interval_start_ns = now
        waiting = sum(value for name, value in sums.items() if name.startswith(WAIT_PREFIX))
        return sum(sums.values()) - waiting, waiting

    def _columns(self, spans: list[tuple[int, int, dict[str, Any] | None]]) -> dict[str, Any]:
        first = min(start for start, _, _ in spans)
        columns: dict[str, Any] = {
            "start": (first + self._clock_ns) / 1e9,
            "start_us": [(start - first) // 1000 for start, _, _ in spans],
            "us": [(end - start) // 1000 for start, end, _ in spans],
        }
        names = dict.fromkeys(key for _, _, attributes in spans for key in attributes or ())
        for key in names:
            columns[key] = [(attributes or {}).get(key) for _, _, attributes in spans]
        return columns

    def _write(self, kind: str, **values: Any) -> None:
        """One line, one os.write. A full disk must not end a run: it is said once; lines are lost until there is room."""
        short = {key: _short(value) for key, value in values.items()}
        line = json.dumps({"kind": kind, **short}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if self._cut:  # half a line, of a killed worker or a full disk: the next line must not be glued to it
            line = b"\n" + line
        try:
            self._cut = os.write(self._file, line) != len(line)
        except OSError as error:
            if not self._warned:
                warnings.warn(f"{self.path}: events cannot be written and are lost: {error}")
            self._warned = True

    def _ends_cut(self) -> bool:
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


class Span:
    """Context manager of EventLog.span."""

    __slots__ = ("_append", "_attributes", "_name", "_start")

    def __init__(self, append: Callable[[Any], None], name: str, attributes: dict[str, Any] | None):
        self._append, self._name, self._attributes = append, name, attributes

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._append((self._name, self._start, time.monotonic_ns(), self._attributes))


def own_seconds(spans: list[tuple[str, int, int]]) -> dict[str, float]:
    """Seconds by name from (name, start ns, end ns). Time that several spans share counts once, for the last to begin: the
    inner of two that lie within each other, a copy beside a step."""
    sums: dict[str, int] = dict.fromkeys((name for name, _, _ in spans), 0)
    around: list[tuple[str, int]] = []
    for name, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        around = [(other, until) for other, until in around if until > start]
        sums[name] += end - start
        shared = start
        for other, until in reversed(around):
            if shared < min(end, until):
                sums[other] -= min(end, until) - shared
                shared = min(end, until)
        around.append((name, end))
    return {name: nanoseconds / 1e9 for name, nanoseconds in sums.items()}


def _known(record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Fields that are not None."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value is not None}


def _short(value: Any) -> Any:
    """Floats to what is worth reading: microseconds of epoch times, else six digits; NaN and infinity become null."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 6) if abs(value) > 1e6 else float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value
