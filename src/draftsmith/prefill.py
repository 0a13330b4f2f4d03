"""The role `target`: prefill the items of a cell that fall to this worker, in order, each into its slot."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from draftsmith.device_spans import open_log
from draftsmith.events import EventLog
from draftsmith.host import Worker
from draftsmith.job import dtype_of
from draftsmith.loop import Loader
from draftsmith.mailbox import Item, TargetEnd, cell_items, target_of
from draftsmith.run import EXIT_DONE
from draftsmith.slots import Transport, choose_transport, make_slots
from draftsmith.static import StaticUnit
from draftsmith.step_modes import COMPILE_LOCK
from draftsmith.taps import attribute
from draftsmith.target import Target
from draftsmith.unit import Unit

FLUSH_EVERY = 50  # items between writes to the event file, for which a GPU has to be waited for


def target_role(worker: Worker, look: Callable[[Target], None] | None = None) -> int:
    """Prefill the items of this target in order, each into its slot, until the trainers need no more.

    `look` is shown the target before it works for others (the doctor's).
    """
    job, place = worker.job, worker.place
    device = torch.device(place.device)
    dtype = dtype_of(job.config.target.dtype, device)
    with open_log(worker.run, place) as events:
        with COMPILE_LOCK:
            target = job.load_target(device, worker.console.progress)
            if look is not None:
                look(target)
        worker.all_set_up.wait(may_compile=target.may_compile)
        width = len(job.drafter.taps) * job.drafter.hidden_size
        transport = transport_of(worker, events)
        memory = make_slots(transport, job.config.topology.slots, job.shape.tokens, width, dtype, device)
        for line in (*target.report(), f"{len(memory.tensors)} slots, transport {transport}"):
            events.note(line)
            worker.console.note(line)
        end, start = worker.mail.as_target(memory)
        units, cell = job.units(worker.run.path), place.cell()
        plan = job.plan(units, place, start)

        def build(item: Item) -> Unit:
            return units.unit(item.number) if item.kind == "unit" else job.held_out_row(item.number)[0]

        def items() -> Iterator[Item]:
            return (item for item in cell_items(plan, cell) if target_of(item, cell) == place.index)

        with Loader(build, items()) as loader:
            Prefill(target, StaticUnit(job.shape, 0, dtype, device), end, events, width, dtype).run(items(), loader)
        end.finish()
        end.close()
    return EXIT_DONE


def transport_of(worker: Worker, events: EventLog) -> Transport:
    """How this cell's taps travel; what makes it slower is said."""
    topology = worker.place.topology
    if topology.threads:
        return "local"
    devices = [torch.device(d) for d in topology.devices]
    transport, reason = choose_transport(devices[: topology.targets], devices[topology.targets :])
    if transport == "ipc" and worker.job.config.topology.transport == "pinned":
        return "pinned"
    if reason:
        events.note(reason)
        worker.console.note(reason)
    return transport


class Prefill:
    """The target's loop. On a GPU the next prefill is queued before this one's end is waited for and told."""

    def __init__(
        self, target: Target, static: StaticUnit, end: TargetEnd, events: EventLog, width: int, dtype: torch.dtype
    ):
        self._target, self._static, self._end, self._events = target, static, end, events
        self._device = static.ids.device
        self._unsaid: tuple[Item, torch.cuda.Event] | None = None
        bounce = end.slots[0].device != self._device  # pinned slots: the prefill writes to the device first
        self._bounce = torch.empty(len(static.ids), width, dtype=dtype, device=self._device) if bounce else None

    def run(self, items: Iterator[Item], loader: Loader[Item]) -> None:
        for item in items:
            attributes = attribute(item.kind, item.number)
            with self._events.span("wait_unit", **attributes):
                unit = loader.take(item)
            if not self._end.can_claim(item):
                self._say()
            with self._events.span("wait_slot", **attributes):
                slot = self._end.claim(item)
            if slot is None:
                return
            self._static.load(unit)
            with self._events.work("prefill", **attributes):
                self._prefill(slot)
            done = self._record()
            self._say()
            self._unsaid = (item, done) if done is not None else None
            if done is None:
                self._end.deliver(item)
            if item.ticket % FLUSH_EVERY < self._end.ledger.cell.targets:
                self._events.flush()
        self._say()

    def _prefill(self, slot: Tensor) -> None:
        s = self._static
        out = slot if self._bounce is None else self._bounce
        self._target.prefill(s.ids, s.positions, s.documents, out)
        if self._bounce is not None:
            slot.copy_(self._bounce, non_blocking=True)

    def _record(self) -> "torch.cuda.Event | None":
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _say(self) -> None:
        """Tell the trainer of the item whose prefill was queued before, once the device has ended it."""
        if self._unsaid is not None:
            item, done = self._unsaid
            self._unsaid = None
            done.synchronize()
            self._end.deliver(item)
