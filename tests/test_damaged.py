"""Files of a run that are whole JSON, but not what was written: left out and said, never a traceback."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith import report
from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.events import EvaluationRecord, EventLog, StepRecord
from draftsmith.history import read_run
from draftsmith.history_rows import rows
from draftsmith.kinds import misfit
from draftsmith.report import render
from draftsmith.status import lines, status_of
from draftsmith.trace import write
from draftsmith.watch import run_view
from synthetic_run import write_config, write_evaluation


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (3, float, None),
        (True, int, "x is no integer"),
        (float("nan"), float, "x is no number"),
        (10**400, float, "x is no number"),
        (None, str | None, None),
        (3, str | None, "x is no string"),
        ([1, "a"], list[int], "x[1] is no integer"),
        (["a"], tuple[str, str], "x has 1 entries instead of 2"),
        ({"a": {"b": 1}}, dict[str, dict[str, str]], "x.a.b is no string"),
        ({"model": "m", "unknown": 3}, TargetConfig, None),
        ({"revision": None}, TargetConfig, "x.model is missing"),
        ({"model": "m", "dtype": "int3"}, TargetConfig, "x.dtype is none of auto, float32, bfloat16"),
    ],
)
def test_misfits(value: Any, kind: Any, said: str | None) -> None:
    assert misfit(value, kind, "x") == said


def a_run(path: Path) -> tuple[Path, Path]:
    """A small run with one event of every kind, and its event file."""
    path.mkdir()
    write_config(path)
    with EventLog(path, host="box") as log:
        for step in (1, 2):
            with log.span("step", unit=step):
                time.sleep(0.001)
            log.step(StepRecord(step=step, loss=2.0, slot_accuracy=[0.5, 0.25]))
            log.evaluation(EvaluationRecord(step, 2.5, 2.25, [0.75, 0.5], responses=3, cycles=40))
        log.plan(2, {"device": "cpu"})
        log.note("said")
    write_evaluation(path)
    return path, log.path


def seen(run: Path, file: Path) -> str:
    """Everything that reads a run, and the report's page."""
    found = read_run(run, spans=True)
    lines(status_of(found))
    with file.open("w") as out:
        write(found, out)
    Console(file=file.open("w")).print(run_view(found, time.time()))
    return render([found])


WRONG = {
    "open": {"about": 3},
    "spans": {"us": []},
    "busy": {"span_seconds": {"step": None}},
    "step": {"step": "x"},
    "evaluation": {"acceptance_per_position": 3},
    "plan": {"about": []},
    "note": {"t": None},
    "end": {"t": 1e300},
}


@pytest.mark.parametrize("kind", WRONG)
def test_events_that_do_not_fit_are_left_out_and_counted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_plotly", lambda: "")  # 4 MB that take a second to pack
    run, events = a_run(tmp_path / "run")
    written = events.read_text().splitlines()
    at = next(i for i, line in enumerate(written) if json.loads(line)["kind"] == kind)
    for damaged in (json.loads(written[at]) | WRONG[kind], {"kind": kind}):
        line = json.dumps(damaged, separators=(",", ":"))
        events.write_text("\n".join([*written, line, *written]) + "\n")
        page = seen(run, tmp_path / "out")
        if kind != "spans" or len(damaged) > 1:  # a line of spans without a name is asked for by nobody
            assert "1 line of events/ is no event of its kind; left out" in page
    events.write_text("\n".join([*written, *['{"kind":"note","t":1}', "[[]]", '{"kind":"step"}'], "garbage"]) + "\n")
    said = lines(status_of(read_run(run)))
    assert said[-1] == "  note         3 lines of events/ are no events of their kind; left out"


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("config.json", lambda _: [], "config.json: it is no object; left out"),
        ("config.json", lambda c: c | {"provenance": "x"}, "config.json: provenance is no object; left out"),
        ("config.json", lambda c: c | {"recipe": {"drafter": 3}}, "config.json: recipe.drafter is no object; left out"),
        ("evaluations/evaluation_001.json", lambda _: {}, "evaluation_001.json: block_size is missing; left out"),
        ("evaluations/evaluation_001.json", lambda _: [1, 2], "evaluation_001.json: it is no object; left out"),
        (
            "evaluations/evaluation_001.json",
            lambda e: e | {"samples": [{"set": 3}]},
            "evaluation_001.json: samples[0].set is no string; left out",
        ),
    ],
)
def test_other_files_that_do_not_fit_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: Callable[[Any], Any], said: str
) -> None:
    monkeypatch.setattr(report, "_plotly", lambda: "")
    run, _ = a_run(tmp_path / "run")
    (run / file).write_text(json.dumps(damage(json.loads((run / file).read_text()))))
    assert said in seen(run, tmp_path / "out")


def test_an_event_file_that_is_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "events/box.both0.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="box.both0.jsonl: the events cannot be read: Is a directory; move it away"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="box.both0.jsonl: the events cannot be written: Is a directory; move it away"):
        EventLog(tmp_path, host="box")


def test_a_row_like_others_whose_number_is_none_is_left_out():
    good = b'{"kind":"note","t":1.0,"text":"a"}'
    unfit: set[bytes] = set()
    lines = [good, good.replace(b"1.0", b"NaN"), good[:9], good.replace(b'"a"', b"3")]
    assert len(rows(lines, unfit)) == 1 and unfit == {lines[1], lines[3]}
