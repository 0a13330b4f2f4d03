"""Reads a run directory back: events, configuration, checkpoints, evaluations. Imports no torch.

Contract: reads only files below the run directory, so a copy elsewhere tells the same; copes with a run in progress, a
last line cut by a kill, several attempts (a resumed attempt replaces the steps it did again), and several workers. What
is whole JSON but not what was written is left out, once for all readers, and `Run.left_out` says so.
`Follower` reads only what was added since the last poll, for live views.
"""

import math
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.events import DEVICE_SUFFIX
from draftsmith.history_rows import Decoded, Written, read_fitting, rows

SPANS, BUSY, OPEN = (b'{"kind":"%s"' % kind for kind in (b"spans", b"busy", b"open"))
_SPAN_HEAD = re.compile(rb'"name":"([^"]*)","start":([0-9]{1,15}(?:\.[0-9]+)?)')


@dataclass
class Session:
    """One attempt of one worker: what it wrote between opening its file and leaving."""

    worker: str
    host: str
    role: str
    index: int
    attempt: int
    pid: int
    start: float
    clock_offset: float
    total_steps: int | None
    about: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    busy_lines: list[bytes] = field(default_factory=list)
    span_lines: list[bytes] = field(default_factory=list)
    unfit: set[bytes] = field(default_factory=set)
    """The run's lines of JSON that are no event of their kind; they are left out."""
    last: float = 0.0
    """Time of the newest event."""
    ended: bool = False
    error: str | None = None

    @property
    def of_device(self) -> bool:
        """It tells of a worker's GPU, beside the worker's own one."""
        return self.role.endswith(DEVICE_SUFFIX)

    def busy(self, last: int = 0) -> list[dict[str, Any]]:
        """The sums over intervals, parsed on demand: all, or the `last` ones."""
        return rows(self.busy_lines[-last:], self.unfit)

    def spans(self, begin: float = -math.inf, end: float = math.inf) -> "Iterator[SpanColumns]":
        """The spans of [begin, end], in seconds since the epoch, and some around them; parsed on demand."""
        for lines in self._span_lines_by_name().values():
            starts = np.array([start for start, _ in lines])
            first = max(0, int(np.searchsorted(starts, begin, side="right")) - 1)  # the line that `begin` falls into
            for _, line in lines[first : int(np.searchsorted(starts, end, side="right"))]:
                yield from (_columns(values) for values in rows([line], self.unfit))

    def middle(self) -> float | None:
        """When the middle one of its span lines begins."""
        heads = [_SPAN_HEAD.search(line) for line in self.span_lines[len(self.span_lines) // 2 :][:1]]
        return float(heads[0][2]) if heads and heads[0] else None

    def _span_lines_by_name(self) -> dict[bytes, list[tuple[float, bytes]]]:
        found: dict[bytes, list[tuple[float, bytes]]] = {}
        for line in self.span_lines:
            if head := _SPAN_HEAD.search(line):
                found.setdefault(head[1], []).append((float(head[2]), line))
        return {name: sorted(lines, key=lambda pair: pair[0]) for name, lines in found.items()}


@dataclass(frozen=True)
class SpanColumns:
    """Spans of one name."""

    name: str
    start: np.ndarray
    """[n] float64 seconds since the epoch."""
    seconds: np.ndarray
    """[n] float64."""
    attributes: dict[str, list[Any]]


@dataclass(frozen=True)
class Run:
    """A run as its files tell it now."""

    path: Path
    config: dict[str, Any]
    """config.json; empty if there is none, or none that fits."""
    sessions: tuple[Session, ...]
    steps: tuple[dict[str, Any], ...]
    """Step records in order of steps, superseded ones left out; `t` is the time."""
    evaluations: tuple[dict[str, Any], ...]
    unfit: set[bytes] = field(default_factory=set, compare=False)
    """Lines of its event files that were left out; grows while spans are read."""
    unread: tuple[str, ...] = ()
    """Other files that were left out, a line each."""
    _columns: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    """Columns asked for before; a long run's take a while to collect."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def attempt(self) -> int:
        """The newest attempt's number."""
        return max((s.attempt for s in self.sessions), default=0)

    @property
    def total_steps(self) -> int | None:
        newest = [s.total_steps for s in self.current() if s.total_steps]
        return max(newest, default=None)

    @property
    def done_steps(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def left_out(self) -> list[str]:
        """What its files hold that is not what was written and is shown nowhere, a line each."""
        count = len(self.unfit)
        rows = f"{count} lines of events/ are no events of their kind; left out"
        if count == 1:
            rows = "1 line of events/ is no event of its kind; left out"
        return [*self.unread, *([rows] if count else [])]

    def current(self) -> list[Session]:
        """Every worker's newest session within the newest attempt."""
        newest = {s.worker: s for s in self.sessions if s.attempt == self.attempt}
        return list(newest.values())

    def column(self, name: str) -> np.ndarray:
        """[steps] float64 of a scalar field, NaN where a record lacks it."""
        if name not in self._columns:
            self._columns[name] = np.array([record.get(name) for record in self.steps], np.float64)
        return self._columns[name]

    def state(self, now: float | None = None) -> str:
        """running, finished, stopped (on request), failed, killed (left without a word), or empty (no events)."""
        sessions = self.current()
        if not sessions:
            return "empty"
        if any(s.error for s in sessions):
            return "failed"
        if all(s.ended for s in sessions):
            return "finished" if not self.total_steps or self.done_steps >= self.total_steps else "stopped"
        open_ones = [s for s in sessions if not s.ended]
        now = time.time() if now is None else now
        return "running" if all(_alive(s, self._patience(), now) for s in open_ones) else "killed"

    def _patience(self) -> float:
        """Seconds of silence after which a worker of another host counts as gone."""
        gaps = np.diff([record["t"] for record in self.steps[-50:]])
        return max(120.0, 10 * float(np.median(gaps))) if len(gaps) else 1800.0

    def left_seconds(self) -> float | None:
        """Time to the last step at the pace of the last records of this attempt; None if unknown."""
        if not self.total_steps:
            return None
        begin = min((s.start for s in self.current()), default=0.0)
        recent = [record for record in self.steps[-30:] if record["t"] >= begin]
        if len(recent) < 2:
            return None
        pace = (recent[-1]["t"] - recent[0]["t"]) / (recent[-1]["step"] - recent[0]["step"])
        return max(0, self.total_steps - self.done_steps) * pace

    def elapsed_seconds(self) -> float:
        """Time that workers were at it, over all attempts."""
        spans = {}
        for s in self.sessions:
            begin, end = spans.get(s.attempt, (s.start, s.last))
            spans[s.attempt] = (min(begin, s.start), max(end, s.last))
        return sum(end - begin for begin, end in spans.values())

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints that are there now."""
        return sorted(
            int(path.name.removeprefix("step_"))
            for path in (self.path / "checkpoints").glob("step_*")
            if path.name.removeprefix("step_").isdigit() and (path / "state.json").is_file()
        )

    def decoded(self) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
        """(name, content) of every evaluation that `draftsmith evaluate` left in evaluations/, oldest name first; and a line
        on each file there that is none."""
        found, wrong = [], []
        for path in sorted((self.path / "evaluations").glob("*.json")):
            content, why = read_fitting(path, Decoded)
            if why:
                wrong.append(why)
            elif content:
                found.append((path.stem, content))
        return found, wrong


def read_run(path: Path, spans: bool = False) -> Run:
    """The run in `path`. `spans`: keep span lines too (for timelines). Raises UserError if there is no run."""
    return Follower(path, spans).poll()


class Follower:
    """Reads a run again and again, each time only what is new. Raises UserError if `path` is no run directory."""

    def __init__(self, path: Path, spans: bool = False):
        if not path.is_dir():
            raise UserError(f"{path}: there is no such run directory")
        if not (path / "config.json").is_file() and not (path / "events").is_dir():
            raise UserError(f"{path}: is not a run directory (no config.json, no events)")
        self.path, self._spans = path, spans
        self._files: dict[Path, _File] = {}
        self._unfit: set[bytes] = set()

    def poll(self) -> Run:
        """The run as of now."""
        for path in sorted((self.path / "events").glob("*.jsonl")):
            self._files.setdefault(path, _File(path, self._spans, self._unfit)).read()
        sessions = tuple(session for file in self._files.values() for session in file.sessions)
        config, wrong = read_fitting(self.path / "config.json", Written)
        return Run(
            self.path,
            config,
            sessions,
            tuple(_in_order([s.steps for s in _writers(sessions, "steps")])),
            tuple(_in_order([s.evaluations for s in _writers(sessions, "evaluations")])),
            self._unfit,
            (wrong,) if wrong else (),
        )


class _File:
    """One event file and how far it has been read."""

    def __init__(self, path: Path, spans: bool, unfit: set[bytes]):
        self._path, self._spans, self._offset, self._unfit = path, spans, 0, unfit
        self.sessions: list[Session] = []

    def read(self) -> None:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # replaced by a shorter copy
                    self._offset, self.sessions = 0, []
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise UserError(f"{self._path}: the events cannot be read: {error.strerror}; move it away") from None
        complete = data.rfind(b"\n") + 1  # the rest is a line being written, or one cut by a kill
        self._offset += complete
        pending: list[bytes] = []
        for line in data[:complete].split(b"\n"):
            if line.startswith(SPANS):
                if self._spans and self.sessions:
                    self.sessions[-1].span_lines.append(line)
            elif line.startswith(BUSY):
                if self.sessions:
                    self.sessions[-1].busy_lines.append(line)
            elif line.startswith(OPEN):
                self._take(pending)
                self.sessions += [_session(self._path, values, self._unfit) for values in rows([line], self._unfit)]
                pending = []
            elif line:
                pending.append(line)
        self._take(pending)

    def _take(self, lines: list[bytes]) -> None:
        """Lines of the newest session."""
        if not self.sessions:
            return
        session = self.sessions[-1]
        records = {"step": session.steps, "evaluation": session.evaluations, "note": session.notes}
        for values in [*rows(lines, self._unfit), *session.busy(last=1)]:
            kind = values.pop("kind")
            session.last = max(session.last, values.get("t", session.last))
            if kind == "plan":
                session.total_steps = values["total_steps"]
                session.about |= values["about"]
            elif kind == "end":
                session.ended, session.error = True, values.get("error")
            elif kind in records:
                records[kind].append(values)


def _columns(values: dict[str, Any]) -> SpanColumns:
    start = values["start"] + np.array(values["start_us"], np.float64) / 1e6
    known = ("kind", "name", "start", "start_us", "us")
    attributes = {key: column for key, column in values.items() if key not in known and isinstance(column, list)}
    return SpanColumns(values["name"], start, np.array(values["us"], np.float64) / 1e6, attributes)


def _session(path: Path, values: dict[str, Any], unfit: set[bytes]) -> Session:
    return Session(
        worker=path.stem,
        host=values["host"],
        role=values["role"],
        index=values["index"],
        attempt=values["attempt"],
        pid=values["pid"],
        start=values["t"],
        last=values["t"],
        clock_offset=values["clock_offset_seconds"],
        total_steps=values.get("total_steps"),
        about=values["about"],
        unfit=unfit,
    )


def _writers(sessions: tuple[Session, ...], what: str) -> list[Session]:
    """Sessions whose records count, oldest attempt first: within an attempt one worker's, the lowest by index."""
    chosen: dict[int, str] = {}
    having = [s for s in sessions if getattr(s, what)]
    for s in sorted(having, key=lambda s: (s.index, s.worker)):
        chosen.setdefault(s.attempt, s.worker)
    return sorted((s for s in having if chosen[s.attempt] == s.worker), key=lambda s: (s.attempt, s.start))


def _in_order(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Records by rising step: one that goes back takes the later ones away, since the run did them again."""
    out: list[dict[str, Any]] = []
    for part in parts:
        for record in part:
            while out and out[-1]["step"] >= record["step"]:
                out.pop()
            out.append(record)
    return out


def _alive(session: Session, patience: float, now: float) -> bool:
    """Its process is there (same host), or it wrote not long ago (another host)."""
    if session.host != platform.node().split(".")[0]:
        return now - session.last < patience
    try:
        os.kill(session.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return _same_process(session.pid, session.start)


def _same_process(pid: int, start: float) -> bool:
    """The process is no zombie and began before `start`; True where /proc does not tell."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return True
    began = int(boot.split()[1]) + int(values[19]) / os.sysconf("SC_CLK_TCK")
    return values[0] != "Z" and began < start + 5.0  # a younger one was given the number of a dead one
