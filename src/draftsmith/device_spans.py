"""Spans on a GPU's own clock: what the device did, not when the host asked for it.

Host spans of asynchronous work cover the launch only. Here CUDA events are recorded around the work and read at log steps,
when the device has just been waited for anyway. They go into an event file of their own, HOST.ROLE-gpuN.jsonl, so that the
live view, the report and the trace show host and device side by side: gaps in the device's row are time it stood idle.
`open_log` gives a worker its log: on a CPU the host's alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftsmith.events import DEVICE_SUFFIX, EventLog
from draftsmith.run import RunDirectory
from draftsmith.topology import Place


def open_log(run: RunDirectory, place: Place) -> EventLog:
    """A worker's event log, with its device's if that has a clock. Raises OSError if a file cannot be opened."""
    log = DeviceEventLog if torch.device(place.device).type == "cuda" else EventLog
    return log(run.path, place.role, run.attempt, place.number)


class DeviceEventLog(EventLog):
    """The event log of a worker on the current CUDA device: `work` is timed on the host's and on the device's clock."""

    def __init__(self, run: Path, role: str, attempt: int, index: int):
        super().__init__(run, role, attempt, index)
        device = torch.device("cuda", torch.cuda.current_device())
        self._device_log = EventLog(run, role + DEVICE_SUFFIX, attempt, index)
        self._device_spans = DeviceSpans(self._device_log, device)

    @contextmanager
    def work(self, name: str, **attributes: Any) -> Iterator[None]:
        with self.span(name, **attributes), self._device_spans.span(name, **attributes):
            yield

    def flush(self) -> tuple[float, float]:
        """As EventLog.flush. Waits for the device's current stream."""
        self._device_spans.collect()
        return super().flush()

    def close(self, error: str | None = None) -> None:
        if error is not None:
            self._device_spans.drop()  # a device that failed, or waits for one that did, cannot be waited for
        super().close(error)
        self._device_log.close(error)


class DeviceSpans:
    """Spans of one CUDA device, recorded on the stream that is current when a span begins and ends.

    `log` is the device's own (role "trainer-gpu", say); its owner closes it. Recording costs two events a span and never
    waits. Call `collect` at log steps.
    """

    def __init__(self, log: EventLog, device: torch.device):
        self._log, self._device = log, device
        self._free: list[torch.cuda.Event] = []
        self._taken: list[tuple[str, torch.cuda.Event, torch.cuda.Event, dict[str, Any]]] = []

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """`with spans.span("step", unit=u):` as EventLog.span."""
        begin, end = self._event(), self._event()
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._taken.append((name, begin, end, attributes))

    def collect(self) -> None:
        """Put finished spans into the log and flush it. Waits for the device's current stream if there are any."""
        if not self._taken:
            return
        now = self._event()
        now.record(torch.cuda.current_stream(self._device))
        now.synchronize()
        now_ns = time.monotonic_ns()  # anchors the two clocks anew each time, so that they do not drift apart
        unfinished = []
        for taken in self._taken:
            name, begin, end, attributes = taken
            if not end.query():  # on another stream, still under way
                unfinished.append(taken)
                continue
            start_ns = now_ns - round(begin.elapsed_time(now) * 1e6)
            self._log.add_span(name, start_ns, start_ns + round(begin.elapsed_time(end) * 1e6), **attributes)
            self._free += [begin, end]
        self._taken = unfinished
        self._free.append(now)
        self._log.flush()

    def drop(self) -> None:
        """Forget the spans that were not collected."""
        self._taken = []

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
