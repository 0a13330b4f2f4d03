"""`draftsmith trace RUN`: every worker's spans on one clock, as a Chrome trace that ui.perfetto.dev opens. No torch.

The format is the JSON array of complete events ("ph": "X", times in microseconds) that Chrome's and torch's profilers write;
files of torch's profiler under RUN/profiles/ are put into the same trace, on the same clock.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tyro.conf import Positional

from draftsmith.errors import UserError
from draftsmith.history import Run, Session, read_run

COUNTERS = ("loss", "tokens_per_second", "useful_tflops", "memory_bytes", "gpu_utilisation_percent", "power_watts")


@dataclass(frozen=True)
class TraceOptions:
    """Writes a trace of all workers for ui.perfetto.dev or chrome://tracing."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """File to write, gzipped if it ends in .gz; default RUN/trace.json.gz."""
    seconds: tuple[float, float] | None = None
    """Only this stretch, in seconds since the run began."""


def main(options: TraceOptions) -> int:
    """`draftsmith trace`: prints the file's name."""
    run = read_run(options.run, spans=True)
    if not run.sessions:
        raise UserError(f"{options.run}: has no events to trace")
    out = options.out or options.run / "trace.json.gz"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open(out, "wt", encoding="utf-8") if out.suffix == ".gz" else out.open("w", encoding="utf-8")
        with opened as file:
            write(run, file, options.seconds)
    except OSError as error:
        raise UserError(f"{out}: the trace cannot be written: {error}") from None
    print(f"{out}  (open it at https://ui.perfetto.dev or in chrome://tracing)")
    return 0


def write(run: Run, file: TextIO, seconds: tuple[float, float] | None = None) -> None:
    """The trace of `run` as JSON text; `seconds` [begin, end) since the run began."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(events(run, seconds)):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")


def events(run: Run, seconds: tuple[float, float] | None = None) -> Iterator[dict[str, Any]]:
    """Trace events; time 0 is the moment when the first worker began. A process is a worker, a thread an attempt."""
    shifts = clock_shifts(run.sessions)
    zero = min(s.start + shifts[id(s)] for s in run.sessions)
    begin, end = seconds or (float("-inf"), float("inf"))
    pids = {worker: i + 1 for i, worker in enumerate(sorted({s.worker for s in run.sessions}))}
    for session in run.sessions:
        place = {"pid": pids[session.worker], "tid": session.attempt + 1}
        yield _name("process_name", session.worker, place)
        yield _name("thread_name", f"attempt {session.attempt + 1}", place)
        offset = shifts[id(session)] - zero
        for spans in session.spans():
            for i, start in enumerate(spans.start + offset):
                if not begin <= start < end:
                    continue
                known = {key: column[i] for key, column in spans.attributes.items() if column[i] is not None}
                yield {
                    "ph": "X",
                    "name": spans.name,
                    **place,
                    "ts": _us(start),
                    "dur": _us(spans.seconds[i]),
                    "args": known,
                }
        for record in session.steps:
            at = record["t"] + offset
            for name in COUNTERS:
                if begin <= at < end and record.get(name) is not None:
                    yield {"ph": "C", "name": name, **place, "ts": _us(at), "args": {name: record[name]}}
        for note in session.notes:
            if begin <= note["t"] + offset < end:
                yield {"ph": "i", "s": "p", "name": note["text"], **place, "ts": _us(note["t"] + offset)}
    yield from _profiles(run, zero, len(pids))


def clock_shifts(sessions: tuple[Session, ...]) -> dict[int, float]:
    """{id(session): seconds to add to its times}, so that the workers of one attempt on one host share one clock.

    Each log anchors the host's monotonic clock to the wall clock when it opens; if the wall clock was set between two
    openings, their anchors differ. All take the first one's.
    """
    first: dict[tuple[str, int], float] = {}
    for session in sorted(sessions, key=lambda s: s.start - s.clock_offset):  # in order of the monotonic clock
        first.setdefault((session.host, session.attempt), session.clock_offset)
    return {id(s): first[s.host, s.attempt] - s.clock_offset for s in sessions}


def _profiles(run: Run, zero: float, processes: int) -> Iterator[dict[str, Any]]:
    """Events of torch's profiler files, moved to this trace's clock and to processes of their own."""
    for path in sorted((run.path / "profiles").glob("*.json*")):
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                profile = json.load(file)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read: {error}; the trace goes without it if it is moved away") from None
        base = profile.get("baseTimeNanoseconds", 0) / 1e9
        pids: dict[Any, int] = {}
        for event in profile.get("traceEvents", []):
            if "pid" in event:
                event["pid"] = pids.setdefault(event["pid"], 1000 + processes + len(pids))
            if "ts" in event:
                event["ts"] = round(event["ts"] + (base - zero) * 1e6, 3)
            if event.get("name") == "process_name" and event.get("ph") == "M":
                event["args"] = {"name": f"{path.name.partition('.json')[0]}: {event.get('args', {}).get('name', '')}"}
            yield event
        processes += len(pids)


def _name(kind: str, name: str, place: dict[str, int]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 1)
