"""The mailbox: how taps get from the target workers of a host to its trainer workers.

Which target prefills an item, into which of its slots, and which trainer reads it follows from the item's ticket (its
number within the cell) by arithmetic: no dispatcher, no free list, no stealing. Messages only say "filled" and "free";
a message with another number than the arithmetic's is an error. The taps themselves never pass through here (slots.py).

Why it cannot hang while everybody works: the smallest ticket that has not been read waits for nothing but finished
work, whatever the numbers of targets, trainers, slots and cells (tests/test_mailbox.py walks every interleaving).
Every wait has a deadline and its message names the worker, the item and what the other side last did.
"""

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.loop import Plan

Kind = Literal["unit", "held-out row"]
MESSAGE_BYTES = 1 << 16


class Cell(NamedTuple):
    """The workers of one host, and where its trainers stand among those of all hosts."""

    targets: int
    trainers: int
    first_trainer: int = 0
    all_trainers: int = 1


class Item(NamedTuple):
    """One filling of a slot. `trainer` is the reader's index in the cell, `step` the optimizer step it belongs to."""

    ticket: int
    kind: Kind
    number: int
    trainer: int
    step: int


def cell_items(plan: "Plan", cell: Cell) -> Iterator[Item]:
    """Everything that a cell's targets prefill, in order: the units of each step, then the held-out rows after it."""
    mine = range(cell.first_trainer, cell.first_trainer + cell.trainers)
    ticket = 0
    for step in range(plan.start, plan.total):
        units: list[tuple[Kind, int]] = [("unit", u) for u in range(step * plan.per_step, (step + 1) * plan.per_step)]
        rows: list[tuple[Kind, int]] = [("held-out row", r) for r in range(plan.rows)]
        for kind, number in units + (rows if plan.evaluates(step + 1) else []):
            trainer = number % cell.all_trainers
            if trainer in mine:
                yield Item(ticket, kind, number, trainer - cell.first_trainer, step)
                ticket += 1


def target_of(item: Item, cell: Cell) -> int:
    return item.ticket % cell.targets


def slot_of(item: Item, cell: Cell, slots: int) -> int:
    return item.ticket // cell.targets % slots


class Slots:
    """Which item each slot of one target holds: the whole state of a mailbox, and the checks on every change of it."""

    def __init__(self, cell: Cell, count: int):
        self.cell = cell
        self.held: list[Item | None] = [None] * count

    def index(self, item: Item) -> int:
        return slot_of(item, self.cell, len(self.held))

    def is_free(self, item: Item) -> bool:
        """The item's own slot has been read to the end."""
        return self.held[self.index(item)] is None

    def fill(self, item: Item) -> int:
        held = self.held[self.index(item)]
        if held is not None:
            raise MailError(f"{name(item)} would overwrite {name(held)}, which has not been read")
        self.held[self.index(item)] = item
        return self.index(item)

    def give_back(self, ticket: int) -> None:
        for slot, item in enumerate(self.held):
            if item is not None and item.ticket == ticket:
                self.held[slot] = None
                return
        raise MailError(f"ticket {ticket} was given back, but the slots hold {[i and i.ticket for i in self.held]}")


class MailError(Exception):
    """The other side broke the order: a bug, or workers of different attempts or recipes in one cell."""


class PeerLost(Exception):
    """Another worker is gone, or was silent for longer than the deadline. Seldom the root of a failure."""


class Patience(NamedTuple):
    """Seconds a wait may last: `first` until the first finished step (loading, compiling), then `later`."""

    first: float
    later: float


class Line:
    """One end of a connection between two workers (SOCK_SEQPACKET: whole messages, in order, end of file at death)."""

    def __init__(self, sock: socket.socket, peer: str):
        self.sock, self.peer = sock, peer
        self.act, self.since = "has said nothing yet", time.monotonic()
        self.said_bye = self.lost = False
        sock.setblocking(False)

    def send(self, act: str, **values: Any) -> None:
        """A peer that is gone is noticed by whoever waits for it, not here."""
        try:
            self.sock.send(json.dumps({"act": act, **values}).encode())
        except (BrokenPipeError, ConnectionResetError):
            pass

    def receive(self) -> dict[str, Any] | None:
        """The next message, None if there is none now; sets `lost` when the peer has closed its end."""
        try:
            data = self._recv()
        except BlockingIOError:
            return None
        if not data:
            self.lost = True
            return None
        message = json.loads(data)
        self.act, self.since = message["act"], time.monotonic()
        if "number" in message:
            self.act += f" {message['kind']} {message['number']}"
        self.said_bye |= message["act"] == "bye"
        return message

    def _recv(self) -> bytes:
        """A peer that closes its end with messages unread makes one call fail; its own last messages come after."""
        try:
            return self.sock.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            return self.sock.recv(MESSAGE_BYTES)

    def last(self) -> str:
        """What the peer did last, for messages."""
        return f'{self.peer} last said "{self.act}" {time.monotonic() - self.since:.0f} s ago'


class End:
    """One worker's end of its cell's lines: sends, waits, and knows what the others did last."""

    def __init__(self, me: str, attempt: int, lines: Sequence[Line], patience: Patience):
        self.me, self.attempt, self.lines, self.patience = me, attempt, list(lines), patience
        self.settled = False
        self.waited = 0.0  # seconds
        self._selector = selectors.DefaultSelector()
        for index, line in enumerate(self.lines):
            self._selector.register(line.sock, selectors.EVENT_READ, index)

    def close(self) -> None:
        """Close every line: whoever waits for this worker learns of it at once."""
        self._selector.close()
        for line in self.lines:
            line.sock.close()

    def note(self, text: str) -> None:
        """Tell every peer what this worker is at, so that their messages can name it."""
        for line in self.lines:
            line.send(text)

    def wait(self, ready: Callable[[], bool], line: Line | None, what: str) -> None:
        """Until `ready`, handling messages. PeerLost if a peer has left without a bye, or at the deadline."""
        begin = time.monotonic()
        limit = self.patience.later if self.settled else self.patience.first
        self.pump(0)
        while not ready():
            left = begin + limit - time.monotonic()
            if left <= 0:
                about = line.last() if line else "; ".join(one.last() for one in self.lines)
                raise PeerLost(f"attempt {self.attempt}: {self.me} waited {limit:.0f} s for {what}; {about}")
            self.pump(left, what)
        self.waited += time.monotonic() - begin

    def pump(self, timeout: float, what: str = "its next message") -> None:
        """Handle what has come, waiting at most `timeout` seconds for the first of it."""
        for key, _ in self._selector.select(timeout):
            line = self.lines[key.data]
            while (message := line.receive()) is not None:
                self.handle(key.data, message)
            if line.lost:
                self._selector.unregister(line.sock)
                if not line.said_bye:
                    raise PeerLost(
                        f"attempt {self.attempt}: {line.peer} is gone ({self.me} waited for {what}); {line.last()}"
                    )

    def handle(self, index: int, message: dict[str, Any]) -> None:
        raise TypeError("an End is a TargetEnd or a TrainerEnd")

    def check(self, message: dict[str, Any], peer: str, item: Item) -> None:
        said = (message["attempt"], message["ticket"], message["kind"], message["number"])
        due = (self.attempt, item.ticket, item.kind, item.number)
        if said != due:
            raise MailError(f"{self.me}: {peer} says (attempt, ticket, kind, number) = {said}, but {due} is due")


class TargetEnd(End):
    """A target's side: `claim` a slot for the next item, write the taps, `deliver`. `lines` are to the cell's trainers."""

    def __init__(
        self, me: str, attempt: int, cell: Cell, slots: "Sequence[Tensor]", lines: Sequence[Line], patience: Patience
    ):
        super().__init__(me, attempt, lines, patience)
        self.slots, self.ledger = slots, Slots(cell, len(slots))

    def can_claim(self, item: Item) -> bool:
        """The item's slot is free now, or nobody will ever read it."""
        self.pump(0)
        return self.ledger.is_free(item) or self.finished()

    def claim(self, item: Item) -> "Tensor | None":
        """The slot [T, K*H] to write `item` into, as soon as it has been read; None when every trainer has left."""
        line = self.lines[item.trainer]
        held = self.ledger.held[self.ledger.index(item)]
        reader = self.lines[held.trainer] if held else line
        self.wait(lambda: self.ledger.is_free(item) or self.finished(), reader, f"a free slot for {name(item)}")
        if self.finished():
            return None
        line.send("began", attempt=self.attempt, ticket=item.ticket, kind=item.kind, number=item.number)
        return self.slots[self.ledger.fill(item)]

    def deliver(self, item: Item) -> None:
        """The slot holds the item's taps (the device has finished writing)."""
        self.lines[item.trainer].send(
            "filled", attempt=self.attempt, ticket=item.ticket, kind=item.kind, number=item.number, waited=self.waited
        )

    def finished(self) -> bool:
        return all(line.said_bye for line in self.lines)

    def finish(self) -> None:
        """Keep the slots alive until every trainer has left."""
        self.wait(self.finished, None, "the trainers' bye")

    def handle(self, index: int, message: dict[str, Any]) -> None:
        if message["act"] == "free":
            if message["attempt"] != self.attempt:
                raise MailError(f"{self.me}: {self.lines[index].peer} is of attempt {message['attempt']}")
            self.ledger.give_back(message["ticket"])
        elif message["act"] == "first step done":
            self.settled = True


class TrainerEnd(End):
    """A trainer's side: `take` an item's slot, copy the taps, `give_back`. `lines` and `slots` are of the cell's targets."""

    def __init__(
        self,
        me: str,
        attempt: int,
        cell: Cell,
        slots: "Sequence[Sequence[Tensor]]",
        lines: Sequence[Line],
        patience: Patience,
    ):
        super().__init__(me, attempt, lines, patience)
        self.cell, self.slots = cell, slots
        self.targets_waited = [0.0] * len(lines)  # seconds that each target says it waited for free slots
        self._filled: list[deque[dict[str, Any]]] = [deque() for _ in lines]

    def take(self, item: Item) -> "Tensor":
        """The slot [T, K*H] that holds `item`'s taps, once it is filled."""
        target = target_of(item, self.cell)
        line, filled = self.lines[target], self._filled[target]
        self.wait(lambda: bool(filled), line, f"the taps of {name(item)}")
        self.check(filled.popleft(), line.peer, item)
        slots = self.slots[target]
        return slots[slot_of(item, self.cell, len(slots))]

    def give_back(self, item: Item) -> None:
        """The taps have been copied; the slot may be written again."""
        self.lines[target_of(item, self.cell)].send(
            "free", attempt=self.attempt, ticket=item.ticket, kind=item.kind, number=item.number
        )

    def settle(self) -> None:
        """The first step is done: from now on waits are short, here and at the targets."""
        self.settled = True
        self.note("first step done")

    def bye(self) -> None:
        """This trainer needs nothing more; without it the targets take the end of the line for a death."""
        self.note("bye")
        self.close()

    def handle(self, index: int, message: dict[str, Any]) -> None:
        if message["act"] == "filled":
            self._filled[index].append(message)
            self.targets_waited[index] = message["waited"]


def name(item: Item) -> str:
    return f"{item.kind} {item.number}"
