"""unit(u): one fixed-shape micro-batch as a pure function of (prepared corpus, seed, u).

Nothing but the number u has to travel between workers: which documents, in which places, which anchors, labels and
positions follow from it on every machine. Keys come from a counter hash, never from a library's generator, so that
versions and thread counts cannot change them; UNIT_LAW names the algorithm and golden values in tests hold it.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np

UNIT_LAW = 1  # change it with any change of what unit(u) returns; checkpoints of another law do not resume

_MASK64 = (1 << 64) - 1
_EPOCH, _ROW, _ANCHOR = 0x65706F6368, 0x726F77, 0x616E63686F72  # streams: "epoch", "row", "anchor"


class Documents(Protocol):
    """What the unit law needs of a corpus split (data/shards.py implements it)."""

    lengths: np.ndarray  # [documents] int64, tokens of each document
    anchor_counts: np.ndarray  # [documents] int64, valid anchors of each document

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [n] int32, loss mask [n] uint8) of one document."""
        ...


class UnitShape(NamedTuple):
    """The fixed shape of every unit. `anchor_rate` is how many anchors a supervised token asks for (0 < rate <= 1)."""

    tokens: int  # T
    anchors: int  # A
    block_size: int  # B
    anchor_rate: float


@dataclass(frozen=True)
class Unit:
    """One packed row. Unused tokens form a last document of their own; unused anchors see nothing but their own block."""

    number: int
    ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64, restart at 0 in every document
    documents: np.ndarray  # [T] int64, ascending, restart at 0 in every row
    anchors: np.ndarray  # [A] int64 row positions, ascending
    starts: np.ndarray  # [A] int64 row position of the anchor's document's first token
    labels: np.ndarray  # [A, B-1] int64, slot k = 1..B-1 predicts the token at anchor + k
    scored: np.ndarray  # [A, B-1] bool: the label is supervised and belongs to the anchor's document
    tokens_used: int
    anchors_used: int


def hash64(seed: int, stream: int, counter: np.ndarray | int) -> np.ndarray:
    """Counter hash, uint64: the splitmix64 finalizer (Steele et al. 2014) over a key made of (seed, stream)."""
    key = _mix_int(_mix_int(seed & _MASK64) ^ stream)
    with np.errstate(over="ignore"):
        x = np.asarray(counter, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def fitting_anchor_rate(corpus: Documents, tokens: int, anchors: int) -> float:
    """The anchor rate at which a row of T tokens of average mix asks for 80 % of A: richer mixes still fit.

    Measured on log-normal lengths: 99.5 % of the tokens used, all anchors; at 100 % of A only 95 % of the tokens.
    """
    supervised = tokens * float(corpus.anchor_counts.sum()) / max(1.0, float(corpus.lengths.sum()))
    return min(1.0, max(1e-3, 0.8 * anchors / max(1.0, supervised)))


def longest_document(*splits: Documents) -> int:
    """Tokens of the longest document in any of the splits; 0 if there is none."""
    return max(int(split.lengths.max(initial=0)) for split in splits)


def valid_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions a of one document with loss_mask[a] and loss_mask[a+1] (spec 2.3), int64 ascending."""
    mask = loss_mask.astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


class Row(NamedTuple):
    """Documents side by side, before anchors are chosen."""

    ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    documents: np.ndarray  # [T] int64
    first: np.ndarray  # [T] int64 row position of the own document's first token
    supervised: np.ndarray  # [T + B] bool, B extra so that slots past the row read False
    valid: np.ndarray  # int64 row positions of every valid anchor, ascending
    used: int


def lay_out(corpus: Documents, members: Sequence[int], shape: UnitShape) -> Row:
    """Put `members` side by side; what is left of the row is a document of its own with token 0, never supervised."""
    T = shape.tokens
    ids, positions, documents, first = (np.zeros(T, np.int64) for _ in range(4))
    supervised = np.zeros(T + shape.block_size, bool)
    valid, at = [np.zeros(0, np.int64)], 0
    for place, index in enumerate(members):
        tokens, mask = corpus.document(index)
        end = at + len(tokens)
        ids[at:end], positions[at:end], documents[at:end] = tokens, np.arange(end - at), place
        supervised[at:end], first[at:end] = mask, at
        valid.append(at + valid_anchors(mask))
        at = end
    documents[at:], positions[at:], first[at:] = len(members), np.arange(T - at), at
    return Row(ids, positions, documents, first, supervised, np.concatenate(valid), at)


def with_anchors(row: Row, chosen: np.ndarray, shape: UnitShape, number: int) -> Unit:
    """A unit from a row and at most A of its valid anchors (ascending)."""
    T, A, B = shape.tokens, shape.anchors, shape.block_size
    anchors, starts = np.full(A, T - 1, np.int64), np.full(A, T - 1, np.int64)
    anchors[: len(chosen)], starts[: len(chosen)] = chosen, row.first[chosen]
    slots = anchors[:, None] + np.arange(1, B)  # [A, S]
    inside = np.minimum(slots, T - 1)
    scored = row.supervised[slots] & (slots < T) & (row.documents[inside] == row.documents[anchors][:, None])
    scored[len(chosen) :] = False
    labels = np.where(scored, row.ids[inside], 0)
    return Unit(
        number=number, ids=row.ids, positions=row.positions, documents=row.documents, anchors=anchors, starts=starts,
        labels=labels, scored=scored, tokens_used=row.used, anchors_used=len(chosen),
    )  # fmt: skip


def build_unit(corpus: Documents, members: Sequence[int], shape: UnitShape, number: int, keys: np.ndarray) -> Unit:
    """One row with the A valid anchors whose `keys` [T] (unique uint64) are smallest."""
    row = lay_out(corpus, members, shape)
    chosen = row.valid[np.argsort(keys[row.valid], kind="stable")[: shape.anchors]]
    return with_anchors(row, np.sort(chosen), shape, number)


def evaluation_chunks(corpus: Documents, members: Sequence[int], shape: UnitShape, number: int) -> list[Unit]:
    """A held-out row as several units that differ only in their anchors: together they hold every valid anchor once,
    since a walk needs the accepted length at whichever anchor it reaches."""
    row = lay_out(corpus, members, shape)
    ends = range(0, max(1, len(row.valid)), shape.anchors)
    return [with_anchors(row, row.valid[at : at + shape.anchors], shape, number) for at in ends]


class UnitSequence:
    """The training sequence: units 0, 1, 2 ... over epochs without end. Rows of an epoch are planned when first asked for."""

    def __init__(self, corpus: Documents, shape: UnitShape, seed: int, plans: "PlanCache | None" = None):
        check_documents(corpus, shape)
        self.corpus, self.shape, self.seed = corpus, shape, seed
        self._plans = plans or PlanCache(None)
        self._ends: list[int] = []  # units up to and including epoch e
        self._epoch: tuple[int, list[list[int]]] | None = None  # the epoch in hand

    def rows_in_epoch(self, epoch: int) -> int:
        return len(self._rows(epoch))

    def place(self, number: int) -> tuple[int, int]:
        """(epoch, row) of a unit."""
        while not self._ends or number >= self._ends[-1]:
            self._ends.append((self._ends[-1] if self._ends else 0) + self.rows_in_epoch(len(self._ends)))
        epoch = int(np.searchsorted(self._ends, number, side="right"))
        return epoch, number - (self._ends[epoch - 1] if epoch else 0)

    def documents(self, number: int) -> list[int]:
        """Indices into the corpus of a unit's documents, in row order."""
        epoch, row = self.place(number)
        return self._rows(epoch)[row]

    def unit(self, number: int) -> Unit:
        position = np.arange(self.shape.tokens, dtype=np.uint64)
        low = np.uint64(24)  # position in the low bits makes every key unique
        stream = _ANCHOR ^ _mix_int(number)
        keys = (hash64(self.seed, stream, position) >> low << low) | position
        return build_unit(self.corpus, self.documents(number), self.shape, number, keys)

    def _rows(self, epoch: int) -> list[list[int]]:
        if self._epoch is None or self._epoch[0] != epoch:
            plan = lambda: plan_epoch(self.corpus, self.shape, self.seed, epoch)  # noqa: E731
            rows = self._plans.get(epoch, len(self.corpus.lengths), plan)
            self._epoch = (epoch, rows)
        return self._epoch[1]


class PlanCache:
    """Keeps planned epochs of one corpus, shape and seed, in `directory` (one .npz an epoch, complete or absent) or, with
    None, nowhere. A file that does not hold every document once is planned anew."""

    def __init__(self, directory: Path | None):
        self.directory = directory

    def get(self, epoch: int, documents: int, plan: Callable[[], list[list[int]]]) -> list[list[int]]:
        """The rows of an epoch of a corpus of so many documents."""
        if self.directory is None:
            return plan()
        path = self.directory / f"epoch_{epoch}.npz"
        if (kept := _read_plan(path, documents)) is not None:
            return kept
        rows = plan()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{id(rows):x}.npz")
        ends = np.cumsum([len(r) for r in rows])
        try:
            for place in (self.directory.parent, self.directory):
                place.mkdir(exist_ok=True)  # without parents: a run directory that is gone is not made again
            np.savez(temporary, documents=np.concatenate([np.asarray(r, np.int64) for r in rows]), ends=ends)
            temporary.replace(path)
        except OSError:  # a full disk: others plan anew, and the next checkpoint says what is wrong
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return rows


def _read_plan(path: Path, documents: int) -> list[list[int]] | None:
    try:
        with path.open("rb") as file, np.load(file) as data:
            order, ends = data["documents"], data["ends"]
        whole = np.array_equal(np.sort(order), np.arange(documents)) and ends[-1] == documents
        if whole and (np.diff(ends, prepend=0) > 0).all():
            return [row.tolist() for row in np.split(order, ends[:-1])]
    except (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, BadZipFile):
        pass  # none yet, or not what was written
    return None


def check_documents(corpus: Documents, shape: UnitShape) -> None:
    """Refuse what can never be packed or trained: it was `prepare`'s work to reject it, counted."""
    if not len(corpus.lengths):
        raise ValueError("there are no documents to train on; if all are held out, prepare with a smaller --held-out")
    check_lengths(corpus, shape, "document")
    if shape.tokens >= 1 << 24:
        raise ValueError(f"unit.tokens = {shape.tokens} is more than {(1 << 24) - 1}")


def check_lengths(corpus: Documents, shape: UnitShape, what: str) -> None:
    """ValueError where a document is longer than a row; `what` names the documents of this split, which may be empty."""
    longest = int(corpus.lengths.max(initial=0))
    if longest > shape.tokens:
        raise ValueError(
            f"{what} {int(corpus.lengths.argmax())} has {longest} tokens but a unit has unit.tokens = {shape.tokens}: "
            f"raise unit.tokens to {-(-longest // 128) * 128} or prepare with --max-tokens {shape.tokens}"
        )


def plan_epoch(corpus: Documents, shape: UnitShape, seed: int, epoch: int) -> list[list[int]]:
    """Pack every document of an epoch once, on both budgets (tokens and anchors); rows in shuffled order.

    Documents are shuffled, taken in windows, largest first within a window, and put where they fit best; rows stay open
    across windows. A document asks for `anchor_rate` anchors a valid anchor, at most A.
    """
    T, A = shape.tokens, shape.anchors
    count = len(corpus.lengths)
    order = np.argsort(hash64(seed, _EPOCH ^ _mix_int(epoch), np.arange(count)), kind="stable")
    asked = np.minimum(np.ceil(corpus.anchor_counts * shape.anchor_rate).astype(np.int64), A)
    needs = np.maximum(corpus.lengths, -(-asked * T // A))
    window = max(4096, 64 * T // max(1, int(corpus.lengths.mean())))
    packer = _Packer(T, A)
    for i in range(0, count, window):
        part = order[i : i + window]
        part = part[np.argsort(-needs[part], kind="stable")]
        columns = (x[part].tolist() for x in (needs, corpus.lengths, asked))
        for index, need, length, anchors in zip(part.tolist(), *columns, strict=True):
            packer.add(index, need, length, anchors)
    turn = np.argsort(hash64(seed, _ROW ^ _mix_int(epoch), np.arange(len(packer.rows))), kind="stable")
    return [packer.rows[i] for i in turn.tolist()]


class _Packer:
    """Best fit on one scale for both budgets: a row's room is the smaller of its tokens left and its anchors left in
    units of T/A tokens, a document's need the larger of its two asks. Room >= need implies that both budgets hold, and a
    row whose anchors ran out does not stand in the way of others (a search on tokens alone filled 23 % of a corpus)."""

    def __init__(self, tokens: int, anchors: int):
        self.tokens, self.anchors = tokens, anchors
        self.rows: list[list[int]] = []
        self._left: list[tuple[int, int]] = []  # (tokens, anchors) left of each row
        self._by_room: dict[int, list[int]] = {}
        self._rooms: list[int] = []  # the keys of _by_room, ascending

    def add(self, index: int, need: int, length: int, anchors: int) -> None:
        at = bisect_left(self._rooms, need)
        if at < len(self._rooms):
            room = self._rooms[at]
            row = self._by_room[room].pop()
            if not self._by_room[room]:
                del self._by_room[room]
                self._rooms.pop(at)
        else:
            row = len(self.rows)
            self.rows.append([])
            self._left.append((self.tokens, self.anchors))
        self.rows[row].append(index)
        tokens_left, anchors_left = self._left[row][0] - length, self._left[row][1] - anchors
        self._left[row] = (tokens_left, anchors_left)
        room = min(tokens_left, anchors_left * self.tokens // self.anchors)
        if room > 0:
            if room not in self._by_room:
                self._by_room[room] = []
                self._rooms.insert(bisect_left(self._rooms, room), room)
            self._by_room[room].append(row)
