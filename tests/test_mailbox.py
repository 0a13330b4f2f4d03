"""The slot law in every interleaving, and the real mailbox between threads and between processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from draftsmith import slots as memory
from draftsmith.errors import UserError
from draftsmith.loop import Plan
from draftsmith.mailbox import (
    Cell,
    Item,
    Line,
    MailError,
    Patience,
    PeerLost,
    Slots,
    TargetEnd,
    TrainerEnd,
    cell_items,
    target_of,
)


class World:
    """All workers of one or two cells as a state machine over the real law (cell_items, target_of, Slots).

    A state is (per target: items claimed, items delivered; per trainer: place in its program, items pulled). `ahead`
    pulls one item before it is due, as a GPU trainer does; without it a trainer pulls when it needs the taps, as on a CPU.
    """

    def __init__(self, plan: Plan, cells: list[Cell], slots: int, ahead: bool, stop_after: int | None = None):
        self.ahead, self.slots = ahead, slots
        self.cells = cells
        self.items = [list(cell_items(plan, cell)) for cell in cells]
        self.targets = [(c, t) for c, cell in enumerate(cells) for t in range(cell.targets)]
        self.trainers = [(c, r) for c, cell in enumerate(cells) for r in range(cell.trainers)]
        self.of_target = [[i for i in self.items[c] if target_of(i, cells[c]) == t] for c, t in self.targets]
        self.of_trainer = [[i for i in self.items[c] if i.trainer == r] for c, r in self.trainers]
        self.programs = [self.program(mine, plan, stop_after) for mine in self.of_trainer]
        self.takes = [[op[1] for op in program if op[0] == "take"] for program in self.programs]

    def program(self, mine: list[Item], plan: Plan, stop_after: int | None) -> list[tuple]:
        """take ... meet ... for every step; held-out rows come after the step's meeting and end with one of their own."""
        out = []
        for step in range(plan.start, stop_after or plan.total):
            out += [("take", i) for i in mine if i.step == step and i.kind == "unit"] + [("meet", 2 * step)]
            if plan.evaluates(step + 1) and plan.rows:
                out += [("take", i) for i in mine if i.step == step and i.kind == "held-out row"]
                out += [("meet", 2 * step + 1)]
        return out

    def start(self) -> tuple:
        return ((0, 0),) * len(self.targets) + ((0, 0),) * len(self.trainers)

    def successors(self, state: tuple):
        split = len(self.targets)
        targets, trainers = state[:split], state[split:]
        arrived = [self.arrived(k, place) for k, (place, _) in enumerate(trainers)]
        for k, (claimed, delivered) in enumerate(targets):
            if claimed < len(self.of_target[k]) and claimed - delivered < 2:
                item = self.of_target[k][claimed]
                if self.ledger(k, claimed, trainers).is_free(item):
                    self.ledger(k, claimed, trainers).fill(item)  # MailError if it would overwrite
                    yield self.change(state, k, (claimed + 1, delivered))
            if delivered < claimed:
                yield self.change(state, k, (claimed, delivered + 1))
        for k, (place, pulled) in enumerate(trainers):
            at = split + k
            taken = sum(op[0] == "take" for op in self.programs[k][:place])
            if self.may_pull(k, place, taken, pulled, arrived) and self.delivered(k, pulled, targets):
                yield self.change(state, at, (place, pulled + 1))
            if place < len(self.programs[k]):
                op, what = self.programs[k][place]
                if (op == "take" and pulled > taken) or (op == "meet" and self.met(what, arrived)):
                    yield self.change(state, at, (place + 1, pulled))

    def arrived(self, k: int, place: int) -> int:
        """Meetings this trainer has come to (it is at one when its next operation is the meeting)."""
        program = self.programs[k]
        return sum(op[0] == "meet" for op in program[: place + 1])

    def met(self, meeting: int, arrived: list[int]) -> bool:
        """A CPU trainer waits for all; a GPU's host runs on and waits for the meeting before."""
        due = self.meetings().index(meeting) + (0 if self.ahead else 1)
        return min(arrived) >= due

    def meetings(self) -> list[int]:
        return [op[1] for op in self.programs[0] if op[0] == "meet"]

    def may_pull(self, k: int, place: int, taken: int, pulled: int, arrived: list[int]) -> bool:
        if pulled >= len(self.takes[k]) or place >= len(self.programs[k]):
            return False
        if pulled == taken and self.programs[k][place][0] == "take":
            return not self.ahead or pulled == 0 or self.staged_out(k, pulled - 1, arrived)
        # One ahead: its staging buffer is free once the device has come to the unit before.
        return self.ahead and pulled == taken and taken > 0 and self.staged_out(k, pulled - 1, arrived)

    def staged_out(self, k: int, index: int, arrived: list[int]) -> bool:
        item, program = self.takes[k][index], self.programs[k]
        before = sum(op[0] == "meet" for op in program[: program.index(("take", item))])
        return min(arrived) >= before

    def delivered(self, k: int, pulled: int, targets: tuple) -> bool:
        item = self.takes[k][pulled]
        c, _ = self.trainers[k]
        t = self.targets.index((c, target_of(item, self.cells[c])))
        return self.of_target[t].index(item) < targets[t][1]

    def ledger(self, k: int, claimed: int, trainers: tuple) -> Slots:
        c, _ = self.targets[k]
        ledger = Slots(self.cells[c], self.slots)
        read = {i for j, (d, _) in enumerate(self.trainers) if d == c for i in self.takes[j][: trainers[j][1]]}
        for item in self.of_target[k][:claimed]:
            if item not in read:
                ledger.fill(item)
        return ledger

    @staticmethod
    def change(state: tuple, at: int, value: tuple) -> tuple:
        return state[:at] + (value,) + state[at + 1 :]

    def explore(self) -> int:
        """Every reachable state; ends nowhere but with every trainer at its program's end. Returns how many there are."""
        seen, open_states = {self.start()}, [self.start()]
        while open_states:
            state = open_states.pop()
            following = list(self.successors(state))
            if not following:
                done = [
                    place == len(p) for (place, _), p in zip(state[len(self.targets) :], self.programs, strict=True)
                ]
                assert all(done), f"stuck at {state}"
            for new in following:
                if new not in seen:
                    seen.add(new)
                    open_states.append(new)
        return len(seen)


def check_items(plan: Plan, cells: list[Cell]) -> None:
    """Every unit and every held-out row that is due, once, in one cell, in order of the steps."""
    items = [i for cell in cells for i in cell_items(plan, cell)]
    units = Counter(i.number for i in items if i.kind == "unit")
    assert units == Counter(range(plan.start * plan.per_step, plan.total * plan.per_step))
    evaluations = sum(plan.evaluates(done) for done in range(plan.start + 1, plan.total + 1))
    assert Counter(i.number for i in items if i.kind == "held-out row") == Counter(
        {r: evaluations for r in range(plan.rows)}
    ) or not (plan.rows and evaluations)
    for cell in cells:
        mine = list(cell_items(plan, cell))
        assert [i.ticket for i in mine] == list(range(len(mine)))
        assert [i.step for i in mine] == sorted(i.step for i in mine)
        for i in mine:
            assert i.number % cell.all_trainers == cell.first_trainer + i.trainer


def cells_of(*shapes: tuple[int, int]) -> list[Cell]:
    total = sum(m for _, m in shapes)
    first = [sum(m for _, m in shapes[:k]) for k in range(len(shapes))]
    return [Cell(n, m, f, total) for (n, m), f in zip(shapes, first, strict=True)]


SMALL = list(product((1, 2, 3), (1, 2), (1, 2, 3)))


@pytest.mark.parametrize("ahead", [False, True])
def test_no_interleaving_hangs_overwrites_or_loses(ahead):
    states = 0
    for targets, trainers, slots in SMALL:
        for per_step in {1, trainers, trainers + 1}:
            plan = Plan(1, 3, per_step, evaluate_every=2, rows=2)
            states += World(plan, cells_of((targets, trainers)), slots, ahead).explore()
            check_items(plan, cells_of((targets, trainers)))
    assert states > 10_000


@pytest.mark.parametrize("ahead", [False, True])
def test_two_cells_of_unequal_shape(ahead):
    for shapes, slots in product([((1, 1), (1, 1)), ((2, 1), (1, 2)), ((1, 2), (1, 1))], (1, 2)):
        plan = Plan(0, 2, 3, evaluate_every=1, rows=1)
        assert World(plan, cells_of(*shapes), slots, ahead).explore() > 50
        check_items(plan, cells_of(*shapes))


def test_a_stop_leaves_no_trainer_waiting():
    for targets, trainers in ((1, 2), (2, 1), (3, 2)):
        for stop_after in (1, 2):
            plan = Plan(0, 3, trainers + 1, evaluate_every=2, rows=1)
            World(plan, cells_of((targets, trainers)), 2, True, stop_after).explore()


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True])
def test_every_interleaving_of_larger_cells(ahead):
    for targets, trainers, slots in [(3, 3, 2), (2, 3, 3), (3, 3, 1), (1, 3, 2)]:
        World(Plan(0, 2, 4, evaluate_every=2, rows=1), cells_of((targets, trainers)), slots, ahead).explore()
    World(Plan(0, 2, 4, evaluate_every=1, rows=2), cells_of((2, 2), (2, 1)), 2, ahead).explore()


def test_wrong_order_is_refused_by_the_ledger():
    cell = Cell(2, 1)
    items = list(cell_items(Plan(0, 4, 2), cell))
    ledger = Slots(cell, 2)
    ledger.fill(items[0])
    ledger.fill(items[2])
    assert not ledger.is_free(items[4])
    with pytest.raises(MailError, match="unit 4 would overwrite unit 0"):
        ledger.fill(items[4])
    with pytest.raises(MailError, match="ticket 6 was given back"):
        ledger.give_back(6)
    ledger.give_back(0)
    assert ledger.is_free(items[4])


# The real thing -------------------------------------------------------------------------------------------------------

TOKENS, WIDTH = 8, 3


def target_loop(end: TargetEnd, plan: Plan, cell: Cell, index: int) -> None:
    for item in cell_items(plan, cell):
        if target_of(item, cell) == index:
            slot = end.claim(item)
            if slot is None:
                break
            slot.fill_(content(item))
            end.deliver(item)
    end.finish()
    end.close()


def trainer_loop(end: TrainerEnd, plan: Plan, cell: Cell, index: int, stop_after: int = 10**9) -> list[float]:
    seen = []
    for item in cell_items(plan, cell):
        if item.trainer == index and item.step < stop_after:
            slot = end.take(item)
            assert bool((slot == content(item)).all()), f"{item} holds {slot}"
            seen.append(float(slot[0, 0]))
            end.give_back(item)
    end.bye()
    return seen


def content(item: Item) -> float:
    return item.number + (0.5 if item.kind == "unit" else 0.25)


PATIENCE = Patience(20, 20)


@pytest.mark.parametrize("targets,trainers,slots", [(1, 1, 1), (2, 2, 3), (3, 2, 1), (1, 3, 2)])
def test_threads(targets, trainers, slots):
    plan, cell = Plan(2, 30, 3, evaluate_every=7, rows=4), Cell(targets, trainers, 0, trainers)
    down, up = memory.socket_pairs(targets, trainers)
    local: dict[str, memory.SlotMemory] = {}
    seen: dict[int, list[float]] = {}
    errors: list[Exception] = []

    def target(t: int) -> None:
        name = f"target {t}"
        local[name] = memory.make_slots("local", slots, TOKENS, WIDTH, torch.float32, torch.device("cpu"))
        lines, _ = memory.offer(down[t], name, 0, local[name], 20)
        target_loop(TargetEnd(name, 0, cell, local[name].tensors, lines, PATIENCE), plan, cell, t)

    def trainer(r: int) -> None:
        lines, opened = memory.receive(up[r], f"trainer {r}", r, 0, 2, local, 20)
        seen[r] = trainer_loop(TrainerEnd(f"trainer {r}", 0, cell, opened, lines, PATIENCE), plan, cell, r)

    def guarded(work, index: int) -> None:
        try:
            work(index)
        except (AssertionError, MailError, PeerLost, OSError) as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target, t)) for t in range(targets)]
    threads += [threading.Thread(target=guarded, args=(trainer, r)) for r in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(t.is_alive() for t in threads)
    whole = sorted(content(i) for i in cell_items(plan, cell))
    assert sorted(x for part in seen.values() for x in part) == whole


CHILD = textwrap.dedent(
    f"""
    import sys, torch
    from pathlib import Path
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from draftsmith import slots as memory
    from draftsmith.mailbox import Cell, Patience, TargetEnd
    from draftsmith.loop import Plan
    from test_mailbox import PATIENCE, TOKENS, WIDTH, target_loop
    directory, index, targets, trainers, steps = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    listener = memory.listen(directory, index)
    print("listening", flush=True)
    owned = memory.make_slots("shared", 2, TOKENS, WIDTH, getattr(torch, sys.argv[6]), torch.device("cpu"))
    lines, _ = memory.offer(memory.accept(listener, trainers, 20), f"target {{index}}", 0, owned, 20)
    cell = Cell(targets, trainers, 0, trainers)
    target_loop(TargetEnd(f"target {{index}}", 0, cell, owned.tensors, lines, PATIENCE), Plan(0, steps, 2), cell, index)
    print("left", flush=True)
    """
)


def start_target(directory: Path, index: int, targets: int, trainers: int, steps: int, dtype: str = "float32"):
    argv = [sys.executable, "-c", CHILD, str(directory), *map(str, (index, targets, trainers, steps)), dtype]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    return process


def test_processes_share_memory_and_leave_nothing():
    directory = memory.private_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    cell, steps = Cell(2, 1), 40
    children = [start_target(directory, t, 2, 1, steps, "bfloat16") for t in range(2)]
    lines, opened = memory.receive(memory.connect(directory, 2), "trainer 0", 0, 0, 0, None, 20)
    assert opened[0][0].dtype == torch.bfloat16 and len(opened[0]) == 2
    end = TrainerEnd("trainer 0", 0, cell, opened, lines, PATIENCE)
    # Nobody can shorten the file under a reader's feet, not even by its descriptor.
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    assert "draftsmith-slots (deleted)" in maps
    seen = trainer_loop(end, Plan(0, steps, 2), cell, 0)
    assert len(seen) == 2 * steps
    for child in children:
        assert child.stdout.readline() == "left\n" and child.wait(10) == 0
        child.stdout.close()
    for socket_file in directory.iterdir():
        socket_file.unlink()
    directory.rmdir()


def test_slots_cannot_be_truncated():
    owned = memory.make_slots("shared", 2, TOKENS, WIDTH, torch.float32, torch.device("cpu"))
    with pytest.raises(PermissionError):
        os.ftruncate(owned.file, 10)
    os.close(owned.file)


def test_a_killed_target_is_named_at_once_with_its_last_act():
    directory = memory.private_directory()
    child = start_target(directory, 0, 1, 1, 100)
    cell = Cell(1, 1)
    lines, opened = memory.receive(memory.connect(directory, 1), "trainer 0", 0, 0, 0, None, 20)
    end = TrainerEnd("trainer 0", 0, cell, opened, lines, PATIENCE)
    items = list(cell_items(Plan(0, 100, 2), cell))
    end.take(items[0])
    end.give_back(items[0])
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(
        PeerLost, match=rf"target 0 \(pid {child.pid}\) is gone .*last said \"(began|filled) unit \d+\""
    ):
        for item in items[1:]:
            end.take(item)
            end.give_back(item)
    end.close()
    child.stdout.close()


def pair(patience: Patience = PATIENCE):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tensors, cell = tuple(torch.zeros(2, TOKENS, WIDTH)), Cell(1, 1)
    target = TargetEnd("target 0", 3, cell, tensors, [Line(a, "trainer 0")], patience)
    trainer = TrainerEnd("trainer 0", 3, cell, [tensors], [Line(b, "target 0")], patience)
    return target, trainer, list(cell_items(Plan(0, 9, 1), cell))


def test_deadlines_name_worker_item_and_the_other_sides_last_act():
    target, trainer, items = pair(Patience(0.05, 0.02))
    with pytest.raises(PeerLost, match="attempt 3: trainer 0 waited 0 s for the taps of unit 0; target 0 last said"):
        trainer.take(items[0])
    for item in items[:2]:
        target.claim(item)
        target.deliver(item)
    with pytest.raises(PeerLost, match='target 0 waited 0 s for a free slot for unit 2; trainer 0 last said "has said'):
        target.claim(items[2])
    trainer.take(items[0])
    trainer.give_back(items[0])
    assert not target.settled
    trainer.settle()
    target.claim(items[2])
    assert target.settled
    with pytest.raises(PeerLost, match='last said "first step done"'):
        target.claim(items[3])


def test_a_wrong_number_is_an_error():
    target, trainer, items = pair()
    target.lines[0].send("filled", attempt=3, ticket=1, kind="unit", number=1, waited=0.0)
    with pytest.raises(MailError, match=r"target 0 says .* \(3, 1, 'unit', 1\), but \(3, 0, 'unit', 0\) is due"):
        trainer.take(items[0])
    target, trainer, items = pair()
    target.lines[0].send("filled", attempt=2, ticket=0, kind="unit", number=0, waited=0.0)
    with pytest.raises(MailError, match="but"):
        trainer.take(items[0])
    trainer.lines[0].send("free", attempt=3, ticket=5, kind="unit", number=5)
    with pytest.raises(MailError, match="ticket 5 was given back"):
        target.claim(items[0])


def test_a_trainer_that_leaves_with_a_bye_ends_the_target_and_without_one_is_a_loss():
    target, trainer, items = pair()
    for item in items[:2]:
        target.claim(item)
        target.deliver(item)
    trainer.bye()
    assert target.claim(items[2]) is None
    target.finish()
    target, trainer, items = pair()
    trainer.close()
    with pytest.raises(PeerLost, match="trainer 0 is gone"):
        target.claim(items[0])


def test_greeting_of_another_attempt_is_refused():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.send(json.dumps({"act": "hello", "attempt": 1, "name": "trainer 0", "index": 0, "pid": 1}).encode())
    with pytest.raises(MailError, match="trainer 0 is of attempt 1, this is attempt 2"):
        memory.greeted(b, "target 0", 2, 1.0)
    with pytest.raises(PeerLost, match="waited 0 s for a peer's greeting"):
        memory.greeted(b, "target 0", 2, 0.01)


def test_expandable_segments_are_named(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(UserError, match="PYTORCH_CUDA_ALLOC_CONF=.*expandable_segments"):
        memory.make_slots("ipc", 1, 2, 2, torch.float32, torch.device("cpu"))
