"""The live view, status, traces and sinks: everything that reads a run from its files."""

import gzip
import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console

from draftsmith.errors import UserError
from draftsmith.events import EventLog, StepRecord
from draftsmith.history import read_run
from draftsmith.profile import StepProfiler
from draftsmith.sinks import metrics
from draftsmith.status import status_of
from draftsmith.trace import TraceOptions, clock_shifts, events
from draftsmith.trace import main as trace_main
from draftsmith.watch import WatchOptions, sparkline
from draftsmith.watch import main as watch_main
from synthetic_run import invented_time, write_run


def draftsmith(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftsmith", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def seen(*runs: Path, width: int = 110) -> str:
    out = io.StringIO()
    watch_main(WatchOptions(runs), rich.console.Console(file=out, width=width))
    return out.getvalue()


def test_one_run_in_full(tmp_path: Path) -> None:
    text = seen(write_run(tmp_path / "smol", total=240))
    for expected in (
        "smol  finished", "step 240 / 240 (100%)", "acceptance length", "best 4.396 at step 240", "41% of 612",
        "updates skipped: 1", "box.trainer0", "bottleneck", "■\u00a0prefill", "■\u00a0wait_taps", "GPU utilisation",
        "peak 37.40 GiB",
    ):  # fmt: skip
        assert expected in text, expected
    assert all(len(line) <= 110 for line in text.splitlines())


def test_a_narrow_terminal_keeps_the_figures(tmp_path: Path) -> None:
    text = seen(write_run(tmp_path / "smol", total=120), width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "4.396" in text and "finished" in text


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    text = seen(write_run(tmp_path / "a", total=120), write_run(tmp_path / "b", total=120, level=0.5, split=False))
    header, first, second = text.splitlines()
    assert header.split()[:4] == ["run", "state", "step", "acceptance"]
    assert first.split()[:6] == ["a", "finished", "120", "/", "120", "4.396"] and second.split()[0] == "b"


RUNNING = """
import sys, time
from pathlib import Path
from draftsmith.events import EventLog, StepRecord
with EventLog(Path(sys.argv[1]), total_steps=8) as log:
    for step in range(1, 9):
        time.sleep(0.3)
        log.step(StepRecord(step=step, loss=9.0 - step))
"""


def test_it_follows_a_running_run_in_a_terminal_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "draftsmith", "watch", str(tmp_path), "--every", "0.1"]
    watching = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    running = subprocess.Popen([sys.executable, "-c", RUNNING, str(tmp_path)])
    screen = b""
    while chunk := _read(master):
        screen += chunk
    assert running.wait(30) == 0 and watching.wait(30) == 0
    text = screen.decode()
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text, "on the other screen, and back"
    assert " running " in text and "step 3 / 8" in text and "left" in text
    assert "step 8 / 8 (100%)" in text.rpartition("\x1b[?1049l")[2], "the last picture stays"


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other side is gone
        return b""


def test_sparkline() -> None:
    assert sparkline(np.array([0.0, 1.0, 2.0]), 10) == "▁▅█"
    assert sparkline(np.arange(1000.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([5.0, np.nan, 5.0]), 10) == "▅ ▅"
    assert sparkline(np.array([90.0, 100.0]), 10, from_zero=True) == "██"
    assert sparkline(np.array([np.nan]), 10) == sparkline(np.array([]), 10) == ""


def test_status_as_text_and_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "smol", total=240)
    text = draftsmith("status", run)
    assert text.returncode == 0
    assert text.stdout.splitlines()[0].startswith("smol: finished, step 240 of 240, ")
    assert "checkpoints  80, 160, 240" in text.stdout and "bound by     trainer" in text.stdout
    values = json.loads(draftsmith("status", run, "--json").stdout)
    assert values["state"] == "finished" and values["step"] == 240 and values["checkpoints"] == [80, 160, 240]
    assert values["acceptance_length"] == pytest.approx(4.3956, abs=1e-3)
    assert [worker["worker"] for worker in values["workers"]] == ["box.target0", "box.target1", "box.trainer0"]


def test_the_trainers_own_word_on_the_bottleneck_counts(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.step(StepRecord(step=1, loss=1.0, bound_by="input"))
    run = read_run(tmp_path)
    assert status_of(run).bottleneck == "input"
    assert metrics(run)[0][2].keys() == {"train/loss"}, "sinks take numbers only"


def test_commands_refuse_what_is_no_run(tmp_path: Path) -> None:
    for command in ("status", "watch", "report", "trace"):
        out = draftsmith(command, tmp_path / "nowhere")
        assert (
            out.returncode == 2 and "there is no such run directory" in out.stderr and len(out.stderr.splitlines()) == 1
        )


def test_trace_holds_every_span_on_one_clock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", total=60)
    assert trace_main(TraceOptions(run)) == 0
    with gzip.open(run / "trace.json.gz", "rt") as file:
        found = json.load(file)["traceEvents"]
    workers = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert set(workers.values()) == {"box.target0", "box.target1", "box.trainer0"}
    spans = [e for e in found if e["ph"] == "X"]
    steps = sorted((e for e in spans if e["name"] == "step"), key=lambda e: e["ts"])
    assert [e["args"]["unit"] for e in steps] == list(range(120))
    prefills = {e["args"]["unit"]: e for e in spans if e["name"] == "prefill"}
    assert {workers[e["pid"]] for e in prefills.values()} == {"box.target0", "box.target1"}
    for step in steps:  # every unit is prefilled before its step begins
        prefill = prefills[step["args"]["unit"]]
        assert prefill["ts"] < step["ts"] and abs(step["ts"] - prefill["ts"]) < 1e6
    waits = sorted((e for e in spans if e["name"] == "wait_taps"), key=lambda e: e["ts"])
    for wait, step in zip(waits, steps, strict=True):
        assert wait["ts"] + wait["dur"] <= step["ts"] + 1.0
    counters = [e for e in found if e["ph"] == "C" and e["name"] == "loss"]
    assert len(counters) == 12
    part = [e for e in events(read_run(run, spans=True), (22.0, 23.0)) if e["ph"] == "X"]
    assert 0 < len(part) < len(spans) and all(22e6 <= e["ts"] < 23e6 for e in part)


def test_workers_of_a_host_share_a_clock_that_was_set_meanwhile(tmp_path: Path) -> None:
    with invented_time() as clock:
        first = EventLog(tmp_path, "trainer", host="box")
        clock.sleep(1.0)
        clock.set_wall(-3600.0)
        second = EventLog(tmp_path, "target", host="box")
        for log in (first, second):
            log.add_span("same", clock.monotonic_ns(), clock.monotonic_ns() + 1000)
            log.close()
    run = read_run(tmp_path, spans=True)
    assert sorted(round(v) for v in clock_shifts(run.sessions).values()) == [0, 3600]
    at = [e["ts"] for e in events(run) if e["ph"] == "X"]
    assert at[0] == pytest.approx(at[1], abs=1.0)


def test_the_profilers_events_join_the_trace(tmp_path: Path) -> None:
    import torch

    with EventLog(tmp_path) as log:
        profiler = StepProfiler(tmp_path, log.worker, "2:3")
        for step in range(1, 6):
            profiler.before(step)
            with log.span("step", step=step):
                torch.ones(30, 30) @ torch.ones(30, 30)
                time.sleep(0.02)
    found = list(events(read_run(tmp_path, spans=True)))
    spans = {e["args"]["step"]: e for e in found if e["ph"] == "X" and e["name"] == "step"}
    products = sorted(e["ts"] for e in found if e["name"] == "aten::mm")
    assert len(products) == 2, "steps 2 and 3"
    for step, at in zip((2, 3), products, strict=True):
        assert spans[step]["ts"] - 1e4 < at < spans[step]["ts"] + spans[step]["dur"] + 1e4, "on the same clock"
    names = [e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"]
    assert any(name.startswith(f"{log.worker}: ") for name in names)


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"no gzip", lambda b: b[:30] + b"xxxx" + b[34:]]
)
def test_a_damaged_profile_is_named(tmp_path: Path, damage) -> None:
    with EventLog(tmp_path) as log, log.span("step", step=1):
        pass
    (tmp_path / "profiles").mkdir()
    profile = tmp_path / "profiles" / "here.json.gz"
    profile.write_bytes(damage(gzip.compress(json.dumps({"traceEvents": list(range(1000))}).encode())))
    with pytest.raises(UserError, match=r"here.json.gz: cannot be read: .*moved away"):
        trace_main(TraceOptions(tmp_path))


@pytest.mark.parametrize("steps", ["0:3", "5:2", "a", "1:b", "-1"])
def test_malformed_profile(tmp_path: Path, steps: str) -> None:
    with pytest.raises(UserError, match="FIRST:LAST"):
        StepProfiler(tmp_path, "w", steps)
