"""The kinds of what a run directory holds, and its event lines and JSON files checked against them. Imports no torch."""

import json
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from draftsmith.errors import first_line
from draftsmith.events import EvaluationRecord, StepRecord
from draftsmith.kinds import misfit


class Corpus(TypedDict, total=False):
    counts: dict[str, Any]
    histogram: dict[str, int]


class About(TypedDict, total=False):
    """Facts about a worker."""

    device: str | None
    corpus: Corpus | None


class At(TypedDict):
    """Every event but spans."""

    t: float


class Open(At):
    host: str
    role: str
    index: int
    attempt: int
    pid: int
    clock_offset_seconds: float
    total_steps: int | None
    about: About


class Plan(At):
    total_steps: int
    about: About


class Spans(TypedDict):
    name: str
    start: float
    start_us: list[float]
    us: list[float]


class Busy(At):
    seconds: float
    span_seconds: dict[str, float]


class Note(At):
    text: str


class End(At):
    error: str | None


LATEST = 1e11  # seconds since the epoch
# What is not finite is written as null (events.py).
_STEP = {name: hint | None for name, hint in get_type_hints(StepRecord).items()}
Step = TypedDict("Step", {**_STEP, "t": float, "step": int, "slot_accuracy": list[float | None] | None})
Evaluation = TypedDict("Evaluation", {**get_type_hints(EvaluationRecord), "t": float})

EVENTS = {
    "open": Open, "plan": Plan, "spans": Spans, "busy": Busy, "note": Note, "end": End, "step": Step, "evaluation": Evaluation,
}  # fmt: skip


class Provenance(TypedDict, total=False):
    versions: dict[str, Any]
    argv: list[str]


class Written(TypedDict, total=False):
    """config.json."""

    recipe: dict[str, dict[str, Any]]
    provenance: Provenance


class Figures(TypedDict):
    """Of a set of prompts."""

    answers: int | None
    tokens: int | None
    target_passes: int | None
    acceptance_length: float | None
    acceptance_length_vllm: float | None
    acceptance_per_position: list[float]
    target_passes_saved: float | None
    identical_to_plain_greedy: float | None
    tokens_per_second: float | None
    tokens_per_second_plain: float | None
    speed_up: float | None


class Sample(TypedDict):
    set: str
    question: str
    tokens: list[Any]
    accepted: list[int]
    committed: list[int]
    runs: list[tuple[str, str]]


class Temperature(TypedDict, total=False):
    temperature: float


class Decoded(TypedDict):
    """evaluations/NAME.json."""

    step: int | None
    target: str | None
    block_size: int
    dtype: str
    device: str
    options: Temperature
    all: Figures
    sets: dict[str, Figures]
    samples: list[Sample]


def rows(lines: list[bytes], unfit: set[bytes]) -> list[dict[str, Any]]:
    """The events in whole lines. A line that a kill cut is passed over, one that is no event of its kind goes to `unfit`."""
    seen: set[tuple] = set()
    try:
        found = json.loads(b"[%s]" % b",".join(lines), parse_constant=_refuse)  # together: several times quicker
        if len(found) == len(lines) and all(_is_event(row, seen) for row in found):
            return found
    except (ValueError, RecursionError):
        pass
    found = []
    for line in lines:
        try:
            row = json.loads(line, parse_constant=_refuse)
            fits = _is_event(row, seen)
        except NotFinite:
            fits = False
        except (ValueError, RecursionError):
            continue
        if fits:
            found.append(row)
        else:
            unfit.add(line)
    return found


def _is_event(row: Any, seen: set[tuple]) -> bool:
    """`seen`: signatures of rows that were events; a long run's steps are alike."""
    if not isinstance(row, dict) or not isinstance(kind := row.get("kind"), str):
        return False
    signature = _signature(row)
    if signature is None or signature not in seen:
        if misfit(row, EVENTS.get(kind, At), kind) is not None:
            return False
        if signature is not None:
            seen.add(signature)
    if not 0 <= row["start" if kind == "spans" else "t"] < LATEST:
        return False
    if kind == "spans":
        return all(len(column) == len(row["us"]) for column in row.values() if isinstance(column, list))
    return kind != "evaluation" or bool(row["acceptance_per_position"])


def _signature(row: dict[str, Any]) -> tuple | None:
    """Names and types of a row of plain values and lists of them: of rows with one signature all are events, or none is."""
    types = tuple(map(type, row.values()))
    if dict in types:
        return None
    inside = tuple(frozenset(map(type, v)) for v in row.values() if type(v) is list)
    return None if any(dict in one or list in one for one in inside) else (row["kind"], tuple(row), types, inside)


class NotFinite(ValueError):
    """A number that is none, which the writer leaves out."""


def _refuse(constant: str) -> None:
    raise NotFinite(constant)


def read_fitting(path: Path, kind: Any) -> tuple[dict[str, Any], str | None]:
    """(content, None) of a JSON file, empty if it is not there or being written; ({}, why) if it is not of `kind`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}, None
    except (OSError, RecursionError) as error:
        return {}, f"{path}: cannot be read: {first_line(error)}; left out"
    wrong = misfit(content, kind, "it")
    return ({}, f"{path}: {wrong.removeprefix('it.')}; left out") if wrong else (content, None)
