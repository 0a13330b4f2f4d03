"""Where a trainer gets the taps of its next unit from: its own target, or the mailbox of its cell.

`fill` puts them into the step's static buffer; `ahead` fetches what comes next while the device is busy.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.events import EventLog
from draftsmith.mailbox import Item, Kind, MailError, TrainerEnd, name


class Taps(Protocol):
    """A source of taps. Items are asked for in the order of mailbox.cell_items."""

    def fill(self, kind: Kind, number: int) -> None:
        """The taps of the item that is loaded into the step's static unit, into its static buffer."""

    def ahead(self, step: int) -> None:
        """Fetch the next item if it belongs to an optimizer step up to `step`; call it when the device has work queued."""

    def settle(self) -> None:
        """The first optimizer step is done."""

    def waited(self) -> float:
        """Seconds since the last call that the device had nothing to do for want of taps. Call it at log steps."""

    def targets_waited(self) -> float | None:
        """Seconds since the last call that the cell's targets waited for free slots, mean over them; None if colocated."""

    def slot(self) -> Tensor | None:
        """A slot of another worker's, as this one reads it; None where there is none."""

    def close(self) -> None:
        """Nothing more is needed."""


def attribute(kind: Kind, number: int) -> dict[str, int]:
    """How a span names an item."""
    return {"unit" if kind == "unit" else "row": number}


class OwnTaps:
    """Colocated: the worker's own target prefills in place."""

    def __init__(self, prefill: Callable[[], None], events: EventLog):
        self._prefill, self._events = prefill, events

    def fill(self, kind: Kind, number: int) -> None:
        with self._events.work("prefill", **attribute(kind, number)):
            self._prefill()

    def ahead(self, step: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def waited(self) -> float:
        return 0.0

    def targets_waited(self) -> float | None:
        return None

    def slot(self) -> None:
        return None

    def close(self) -> None:
        pass


class MailedTaps:
    """From other workers. On a GPU the trainer pulls one item ahead, on a stream of its own, into a staging buffer, and
    copies it into the static buffer at the boundary; on a CPU it copies from the slot when the item is due."""

    def __init__(self, end: TrainerEnd, items: Iterator[Item], static: Tensor, events: EventLog):
        self._end, self._items, self._static, self._events = end, items, static, events
        self._next = next(items, None)
        self._pulled = False
        self._waited = self._targets_waited = 0.0  # seconds
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # on a GPU: out of work, at work again
        self._stream = torch.cuda.Stream(static.device) if static.device.type == "cuda" else None
        if self._stream is not None:
            self._staging = torch.empty_like(static)
            self._source_streams: dict[torch.device, torch.cuda.Stream] = {}
            self._arrived = torch.cuda.Event(blocking=True)
            self._copied_out = torch.cuda.Event()

    def fill(self, kind: Kind, number: int) -> None:
        item = self._next
        if item is None or (item.kind, item.number) != (kind, number):
            raise MailError(f"{self._end.me} wants {kind} {number}, but next in its cell is {item and name(item)}")
        if self._stream is None:
            begin = time.monotonic()
            slot = self._take(item)
            self._waited += time.monotonic() - begin
            with self._events.work("pull", **attribute(kind, number)):
                self._static.copy_(slot)
            self._end.give_back(item)
        else:
            if not self._pulled:
                self._pull(item)
            self._static.copy_(self._staging, non_blocking=True)
            self._copied_out.record(torch.cuda.current_stream(self._static.device))
        self._next, self._pulled = next(self._items, None), False

    def ahead(self, step: int) -> None:
        item = self._next
        if self._stream is not None and not self._pulled and item is not None and item.step <= step:
            self._pull(item)

    def settle(self) -> None:
        self._end.settle()

    def waited(self) -> float:
        """On a GPU the time between the end of its queued work and the arrival of the next taps, by the device's clock."""
        done = [pair for pair in self._gaps if pair[1].query()]
        seconds = self._waited + sum(begin.elapsed_time(end) for begin, end in done) / 1000
        self._gaps = [pair for pair in self._gaps if pair not in done]
        self._waited = 0.0
        return seconds

    def targets_waited(self) -> float | None:
        total = sum(self._end.targets_waited) / len(self._end.targets_waited)
        since, self._targets_waited = total - self._targets_waited, total
        return since

    def slot(self) -> Tensor:
        return self._end.slots[0][0]

    def close(self) -> None:
        self._end.bye()

    def _take(self, item: Item) -> Tensor:
        with self._events.span("wait_taps", **attribute(item.kind, item.number)):
            return self._end.take(item)

    def _pull(self, item: Item) -> None:
        """Waits for the slot, not for the step that is under way; the slot is given back when the copy has ended."""
        device = self._static.device
        main = torch.cuda.current_stream(device)
        out_of_work, at_work = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        out_of_work.record(main)
        slot = self._take(item)
        with torch.cuda.device(device), self._reading(slot.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._copied_out)
            with self._events.work("pull", **attribute(item.kind, item.number)):
                self._staging.copy_(slot, non_blocking=True)
            self._arrived.record(self._stream)
        self._arrived.synchronize()
        at_work.record(main)
        self._gaps.append((out_of_work, at_work))
        self._end.give_back(item)
        self._pulled = True

    def _reading(self, source: torch.device) -> AbstractContextManager:
        """torch copies between GPUs on the source's current stream. On its default stream such a copy begins only when both
        GPUs have done all that they were given, the running step included (CUDA guide, peer-to-peer memory copies)."""
        if source.type != "cuda" or source == self._static.device:
            return nullcontext()
        if source not in self._source_streams:
            self._source_streams[source] = torch.cuda.Stream(source)
        return torch.cuda.stream(self._source_streams[source])
