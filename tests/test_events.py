"""Event files: what is written is read back, through kills, full disks, several attempts and several workers."""

import io
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import rich.console

from draftsmith.console import Console, duration, number, size, step_line
from draftsmith.errors import UserError
from draftsmith.events import EvaluationRecord, EventLog, StepRecord, own_seconds
from draftsmith.history import Follower, read_run
from draftsmith.meters import Meter
from draftsmith.status import status_of
from synthetic_run import dead_pid, invented_time, write_long_run, write_run

HERE = platform.node().split(".")[0]


def lines(log: EventLog) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in log.path.read_text().splitlines()]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with EventLog(tmp_path, total_steps=20, about={"device": "cpu"}) as log:
        with log.span("prefill", unit=4):
            pass
        log.add_span("pull", 10**9, 3 * 10**9, unit=5, bytes=7)
        log.step(StepRecord(step=10, loss=2.5, slot_accuracy=[0.5, 0.25], tokens_per_second=1234.5678))
        log.step(StepRecord(step=20, loss=math.nan, gradient_norm=math.inf))
        log.evaluation(EvaluationRecord(20, 2.5, 2.25, [0.75, 0.5], responses=3, cycles=40))
        log.note("said")
    assert "lr" not in lines(log)[3], "a field that is None is not written"
    run = read_run(tmp_path, spans=True)
    assert run.column("step").tolist() == [10, 20]
    assert run.column("loss")[0] == 2.5 and np.isnan(run.column("loss")[1])
    assert run.steps[0]["slot_accuracy"] == [0.5, 0.25] and run.steps[0]["tokens_per_second"] == 1234.57
    assert run.evaluations[0]["acceptance_per_position"] == [0.75, 0.5] and "loss" not in run.evaluations[0]
    session = run.sessions[0]
    assert (session.worker, session.role, session.total_steps) == (f"{HERE}.both0", "both", 20)
    assert session.notes[0]["text"] == "said"
    spans = {columns.name: columns for columns in session.spans()}
    assert spans["prefill"].attributes == {"unit": [4]}
    assert spans["pull"].seconds.tolist() == [2.0] and spans["pull"].attributes == {"unit": [5], "bytes": [7]}
    assert run.state() == "finished"


def test_spans_are_on_the_wall_clock_and_summed(tmp_path: Path) -> None:
    with invented_time() as clock:
        log = EventLog(tmp_path)
        clock.sleep(50.0)  # loading, before any span: no part of the first interval
        begin = log.seconds(clock.monotonic_ns())
        for unit in range(3):
            with log.span("wait_taps", unit=unit):
                clock.sleep(0.5)
            with log.span("step", unit=unit):
                clock.sleep(1.5)
        clock.sleep(4.0)
        log.step(StepRecord(step=3, loss=1.0))
        log.close()
    run = read_run(tmp_path, spans=True)
    assert run.steps[0]["busy_seconds"] == 4.5 and run.steps[0]["wait_seconds"] == 1.5
    assert run.sessions[0].busy()[0]["seconds"] == 10.0
    assert run.sessions[0].busy()[0]["span_counts"] == {"wait_taps": 3, "step": 3}
    steps = next(columns for columns in run.sessions[0].spans() if columns.name == "step")
    np.testing.assert_allclose(steps.start - begin, [0.5, 2.5, 4.5], atol=1e-5)


def test_time_inside_another_span_is_the_inner_ones() -> None:
    spans = [("evaluate", 0, 100), ("prefill", 10, 40), ("wait_unit", 15, 20), ("prefill", 50, 60), ("step", 100, 130)]
    seconds = {name: value * 1e9 for name, value in own_seconds(spans).items()}
    assert seconds == pytest.approx({"evaluate": 60, "prefill": 35, "wait_unit": 5, "step": 30})


def test_time_that_two_spans_share_counts_once() -> None:
    """A pull on a stream of its own beside a step: no worker is busy for more than its time."""
    assert own_seconds([("thread_a", 0, 10), ("thread_b", 5, 15)]) == {"thread_a": 0.5e-8, "thread_b": 1e-8}
    steps = [("step", 100 * i, 100 * i + 98) for i in range(10)]
    pulls = [("pull", 100 * i + 1, 100 * i + 99) for i in range(10)]
    seconds = {name: value * 1e9 for name, value in own_seconds(steps + pulls).items()}
    assert seconds == pytest.approx({"step": 10, "pull": 980})
    many = [("step", 0, 50), ("pull", 10, 70), ("prefill", 40, 60), ("update", 65, 80)]
    seconds = {name: value * 1e9 for name, value in own_seconds(many).items()}
    assert (
        seconds == pytest.approx({"step": 10, "pull": 35, "prefill": 20, "update": 15}) and sum(seconds.values()) == 80
    )


def test_facts_known_later(tmp_path: Path) -> None:
    with EventLog(tmp_path, about={"device": "cpu"}) as log:
        log.plan(70, {"ceiling_tflops": 0.2})
    assert read_run(tmp_path).total_steps == 70
    assert read_run(tmp_path).sessions[0].about == {"device": "cpu", "ceiling_tflops": 0.2}


def test_threads_lose_no_span(tmp_path: Path) -> None:
    log = EventLog(tmp_path)

    def work(thread: int) -> None:
        for unit in range(500):
            with log.span(f"thread{thread}", unit=unit):
                pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.flush()
    log.close()
    units: dict[str, list[int]] = {}
    for columns in read_run(tmp_path, spans=True).sessions[0].spans():
        units.setdefault(columns.name, []).extend(columns.attributes["unit"])
    assert units == {f"thread{i}": list(range(500)) for i in range(4)}


def test_any_cut_of_the_last_line_is_coped_with(tmp_path: Path) -> None:
    log = EventLog(tmp_path, host=HERE)
    log.step(StepRecord(step=10, loss=3.0))
    log.step(StepRecord(step=20, loss=2.0))
    whole = log.path.read_bytes()
    last = len(whole) - whole[:-1].rfind(b"\n") - 1
    for cut in range(1, last, 7):
        log.path.write_bytes(whole[: len(whole) - cut])
        assert read_run(tmp_path).done_steps == 10
        second = EventLog(tmp_path, attempt=1, host=HERE)
        second.step(StepRecord(step=30, loss=1.0))
        assert [r["step"] for r in read_run(tmp_path).steps] == [10, *([20] if cut == 1 else []), 30], f"cut by {cut}"


WRITER = """
import sys
from dataclasses import fields
from pathlib import Path
from draftsmith.events import EventLog, StepRecord
log = EventLog(Path(sys.argv[1]), total_steps=10**9)
for step in range(1, 10**9):
    with log.span("step", unit=step):
        pass
    log.step(StepRecord(step=step, loss=1.0, slot_accuracy=[0.1] * 15))
"""


def test_files_survive_kill_9(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    follower = None
    while follower is None or follower.poll().done_steps < 200:
        assert child.poll() is None
        if (tmp_path / "events").is_dir():
            follower = follower or Follower(tmp_path)
        time.sleep(0.01)
    assert follower.poll().state() == "running"
    child.send_signal(signal.SIGKILL)
    child.wait()
    run = read_run(tmp_path, spans=True)
    assert [r["step"] for r in run.steps] == list(range(1, run.done_steps + 1))
    assert run.done_steps == follower.poll().done_steps >= 200
    assert run.state() == "killed"
    assert sum(len(c.start) for c in run.sessions[0].spans()) in (run.done_steps, run.done_steps + 1)


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "here.both0.jsonl").symlink_to("/dev/full")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with EventLog(tmp_path, host="here") as log:
            log.step(StepRecord(step=1, loss=1.0))
    assert len(said) == 1 and "No space left" in str(said[0].message)


def test_a_resumed_attempt_replaces_the_steps_it_did_again(tmp_path: Path) -> None:
    first = EventLog(tmp_path, host="one", total_steps=60)
    for step in (10, 20, 30, 40):
        first.step(StepRecord(step=step, loss=1.0))
        first.evaluation(EvaluationRecord(step, 2.0, 2.0, [0.5], 1, 1))
    second = EventLog(tmp_path, host="two", total_steps=60, attempt=1)  # resumed elsewhere, from step 20
    for step in (30, 40, 50):
        second.step(StepRecord(step=step, loss=2.0))
        second.evaluation(EvaluationRecord(step, 3.0, 3.0, [0.5], 1, 1))
    run = read_run(tmp_path)
    assert [(r["step"], r["loss"]) for r in run.steps] == [(10, 1), (20, 1), (30, 2), (40, 2), (50, 2)]
    assert [e["acceptance_length"] for e in run.evaluations] == [2, 2, 3, 3, 3]
    assert run.attempt == 1 and [s.host for s in run.current()] == ["two"]


def test_states(tmp_path: Path) -> None:
    def written(name: str, error: str | None = None, step: int = 5, close: bool = True, host: str = HERE) -> Path:
        log = EventLog(tmp_path / name, total_steps=10, host=host)
        log.step(StepRecord(step=step, loss=1.0))
        if close:
            log.close(error)
        return tmp_path / name

    assert read_run(written("a", step=10)).state() == "finished"
    assert read_run(written("b")).state() == "stopped"
    assert read_run(written("c", error="RuntimeError: no")).state() == "failed"
    assert status_of(read_run(tmp_path / "c")).error == "RuntimeError: no"
    running = read_run(written("d", close=False))
    assert running.state() == "running"
    running.sessions[0].pid = dead_pid()
    assert running.state() == "killed"
    running.sessions[0].pid, running.sessions[0].start = os.getpid(), 1e9  # this process is younger than that
    assert running.state() == "killed"
    elsewhere = read_run(written("e", close=False, host="elsewhere"))
    assert elsewhere.state() == "running"
    assert elsewhere.state(time.time() + 7200) == "killed"
    (tmp_path / "f" / "events").mkdir(parents=True)
    assert read_run(tmp_path / "f").state() == "empty"


def test_a_failing_block_is_an_error_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), EventLog(tmp_path):
        1 / 0  # noqa: B018
    assert read_run(tmp_path).sessions[0].error == "ZeroDivisionError: division by zero"


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run directory"):
        read_run(tmp_path)


def test_a_copy_tells_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "here" / "run", total=60)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    now = time.time()
    assert status_of(read_run(tmp_path / "here/run"), now) == status_of(read_run(tmp_path / "there/run"), now)


def test_follower_reads_what_was_added(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    follower = Follower(tmp_path)
    assert follower.poll().done_steps == 0
    log.step(StepRecord(step=1, loss=1.0))
    assert follower.poll().done_steps == 1
    EventLog(tmp_path, "target", index=3).note("late")
    assert [s.worker for s in follower.poll().sessions] == [f"{HERE}.both0", f"{HERE}.target3"]
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[: whole.find(b"\n") + 1])  # a shorter file took its place
    assert follower.poll().done_steps == 0


def test_bottleneck_is_the_busiest_role(tmp_path: Path) -> None:
    status = status_of(read_run(write_run(tmp_path / "run", total=60)))
    busy = {worker.worker: worker.busy_share for worker in status.workers}
    assert busy["box.trainer0"] > busy["box.target0"] and status.bottleneck == "trainer"
    assert 0 < next(w.wait_share for w in status.workers if w.worker == "box.target1") < 0.2
    assert status_of(read_run(write_run(tmp_path / "one", total=60, split=False))).bottleneck is None


def test_a_hundred_thousand_steps_are_read_whole(tmp_path: Path) -> None:
    write_long_run(tmp_path, 100_000)
    run = read_run(tmp_path)
    assert run.column("step").tolist() == list(range(1, 100_001))
    assert run.sessions[0].span_lines == [] and len(run.sessions[0].busy_lines) == 100_000


@pytest.mark.parametrize("module", ["events", "history", "console", "status", "watch", "report", "trace", "sinks"])
def test_seeing_a_run_needs_no_torch(module: str) -> None:
    code = f"import sys, draftsmith.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


RECORD = StepRecord(
    step=40, loss=2.34567, block_acceptance=1.8, lr=3e-4, gradient_norm=0.51, tokens_per_second=61234.0,
    useful_tflops=248.0, ceiling_tflops=620.0, memory_bytes=3 * 2**30, skipped_updates=2,
)  # fmt: skip


def test_a_plain_console_prints_one_line_a_log_step() -> None:
    out = io.StringIO()
    console = Console(rich.console.Console(file=out, width=40))
    console.step(RECORD, 1000)
    console.note("[brackets] stay")
    assert out.getvalue().splitlines() == [step_line(RECORD, 1000), "[brackets] stay"]
    assert step_line(RECORD, 1000, 75.0) == (
        "step   40/1000  loss 2.3457  block 1.80  lr 3.00e-04  norm 0.51  61.2 k tok/s  "
        "248 TFLOP/s (40% of ceiling)  3.0 GiB  skipped 2  1 min 15 s left"
    )


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    with Console(rich.console.Console(file=out, force_terminal=True, width=100)) as console:
        console.step(RECORD, 1000)
        console.step(StepRecord(step=80, loss=2.0), 1000)
    text = out.getvalue()
    assert "80 of 1,000 steps" in text and "\x1b[?25l" in text, "a bar was shown and the cursor hidden"
    assert text.endswith("\x1b[2K") or "\x1b[?25h" in text.rpartition("\x1b[?25l")[2], "and given back"


def test_progress_of_other_work() -> None:
    out = io.StringIO()
    console = Console(rich.console.Console(file=out, width=80))
    with console.progress("prepare", 12_345, "rows") as bar:
        bar.advance(12_000)
        bar.advance(345)
    with console.progress("load", None, "shards") as bar:
        bar.advance(3)
    assert out.getvalue().splitlines() == [
        "prepare: 12.3 k rows", "prepare: 12.3 k of 12.3 k rows", "load ...", "load: 3 shards",
    ]  # fmt: skip
    shown = io.StringIO()
    with Console(rich.console.Console(file=shown, force_terminal=True, width=100)) as console:
        with console.progress("prepare", 10, "rows") as bar:
            bar.advance(10)
    assert "10 of 10 rows" in shown.getvalue()


class LateEvent:
    """Stands for a CUDA event of a device that does everything 5 ms after it was asked to."""

    broken = False

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = time.monotonic_ns() + 5_000_000

    def query(self) -> bool:
        return time.monotonic_ns() >= self.at

    def synchronize(self) -> None:
        if LateEvent.broken:
            raise RuntimeError("the device has failed")
        time.sleep(max(0, self.at - time.monotonic_ns()) / 1e9)

    def elapsed_time(self, later: "LateEvent") -> float:
        return (later.at - self.at) / 1e6


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> type[LateEvent]:
    import torch

    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return LateEvent


def test_a_devices_work_stands_beside_its_hosts(tmp_path: Path, late_device: type[LateEvent]) -> None:
    from draftsmith.device_spans import DeviceEventLog

    with DeviceEventLog(tmp_path, "both", 0, 0) as log:
        for unit in range(3):
            with log.work("step", unit=unit):
                time.sleep(0.002)
        log.step(StepRecord(step=1, loss=1.0))
        with log.work("update", step=1):
            pass
    run = read_run(tmp_path, spans=True)
    host, device = sorted(run.sessions, key=lambda s: s.of_device)
    assert (host.worker, device.worker) == (f"{HERE}.both0", f"{HERE}.both-gpu0") and run.state() == "finished"
    first, second = (next(s for s in session.spans() if s.name == "step") for session in (host, device))
    assert first.attributes == second.attributes == {"unit": [0, 1, 2]}
    assert all(second.start - first.start > 0.0049), "each when the device did it"
    assert [s.name for s in device.spans()] == ["step", "update"] and len(device.busy()) == 2
    assert status_of(run).bottleneck is None, "one role, on its host and its device"


def test_a_device_that_failed_is_not_waited_for(
    tmp_path: Path, late_device: type[LateEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.device_spans import DeviceEventLog

    with pytest.raises(ZeroDivisionError), DeviceEventLog(tmp_path, "both", 0, 0) as log:
        with log.work("step", unit=0):
            pass
        monkeypatch.setattr(late_device, "broken", True)
        1 / 0  # noqa: B018
    assert read_run(tmp_path).state() == "failed"


def test_numbers_and_durations() -> None:
    assert [number(v) for v in (None, 0, 7, 0.5, 1234, 12_345, 999_999, 2.5e6, 3e9)] == [
        "–", "0", "7", "0.5", "1,234", "12.3 k", "1 M", "2.5 M", "3 G",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59, 65, 3725, 90_000)] == ["0 s", "59 s", "1 min 05 s", "1 h 02 min", "1 d 01 h"]


def test_sizes_show_some_digits() -> None:
    shown = [size(n) for n in (7, 2**10, 20 * 2**10, 2**20, 300 * 2**20, 5 * 2**30)]
    assert shown == ["7 bytes", "1.0 KiB", "20.0 KiB", "1.0 MiB", "0.29 GiB", "5.00 GiB"]


def test_meter_without_gpu() -> None:
    reading = Meter().read()
    assert 10**6 < reading["memory_bytes"] < reading["memory_total_bytes"]
    step = StepRecord(step=1, loss=1.0, **reading)
    assert step.power_watts is None and "power_watts" not in reading
    assert Meter("00000000-0000-0000-0000-000000000000").read() == {}


def test_every_field_is_described() -> None:
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    for record, heading in ((StepRecord, "## Step records"), (EvaluationRecord, "## Evaluation records")):
        table = page.partition(heading)[2].partition("\n## ")[0]
        described = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
        assert described == [field.name for field in fields(record)]


def test_gauges_count_what_is_compiled_after_them() -> None:
    import torch

    from draftsmith.gauges import Gauges

    @torch.compile(dynamic=False, backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    double(torch.ones(2))
    gauges = Gauges(torch.device("cpu"), torch.float32, measure_ceiling=False)
    for length, recompiles in ((2, 0), (3, 1), (3, 1), (4, 2)):
        double(torch.ones(length))
        assert gauges.read()["recompiles"] == recompiles
    line = step_line(StepRecord(step=1, loss=1.0, recompiles=2), 10)
    assert line.endswith("recompiled 2") and "recompiled" not in step_line(
        StepRecord(step=1, loss=1.0, recompiles=0), 10
    )


def test_gauges_fill_a_record() -> None:
    import torch

    from draftsmith.data.shards import Manifest
    from draftsmith.gauges import Gauges

    gauges = Gauges(torch.device("cpu"), torch.float32)
    record = StepRecord(step=1, loss=1.0, **gauges.read())
    assert 1e-4 < record.ceiling_tflops < 100 and record.memory_bytes > 10**6
    about = gauges.about(Manifest(1, "m", "h", 10, None, counts={"kept": 3}, histogram={"64": 3}))
    assert about == {"device": "CPU, threads: 1", "corpus": {"counts": {"kept": 3}, "histogram": {"64": 3}}}
