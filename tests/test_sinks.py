"""Sinks: TensorBoard and Weights & Biases read back what a run hands on, afterwards and while it trains."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from draftsmith.config import from_dict
from draftsmith.errors import UserError
from draftsmith.events import EventLog, StepRecord
from draftsmith.history import read_run
from draftsmith.run import EXIT_DONE, EXIT_STOPPED
from draftsmith.sinks import SinkOptions, SinkProcesses, follow, main, metrics
from draftsmith.train import train
from pipeline import command, ended, read_until, recipe, start
from synthetic_run import write_run
from toy import toy_place


def test_tensorboard_reads_what_the_sink_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run = write_run(tmp_path / "run", total=120)
    for _ in range(2):  # a second start hands the whole run on anew and leaves no doubles
        assert main(SinkOptions(run, "tensorboard")) == 0
    read = EventAccumulator(str(run / "tensorboard"), {"tensors": 0})
    read.Reload()
    losses = [(e.step, float(make_ndarray(e.tensor_proto))) for e in read.Tensors("train/loss")]
    expected = read_run(run)
    assert [step for step, _ in losses] == expected.column("step").tolist()
    np.testing.assert_allclose([loss for _, loss in losses], expected.column("loss"), rtol=1e-6)
    assert len(read.Tensors("held_out/acceptance_per_position/07")) == 12


def test_wandb_reads_what_the_sink_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", total=120)
    out = subprocess.run(sink_command(run, "wandb"), capture_output=True, text=True, timeout=60, check=False)
    assert out.returncode == 0, out.stderr
    history, config = wandb_records(run)
    expected = read_run(run)
    assert [h["_step"] for h in history] == expected.column("step").tolist()
    np.testing.assert_allclose([h["train/loss"] for h in history], expected.column("loss"))
    assert history[-1]["held_out/acceptance_length"] == expected.evaluations[-1]["acceptance_length"]
    assert config["drafter"]["block"] == 8


def sink_command(run: Path, to: str) -> list[str]:
    return [sys.executable, "-m", "draftsmith", "sink", str(run), "--to", to]


def wandb_records(run: Path) -> tuple[list[dict], dict]:
    """The history and the config of the one offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    history, config = [], {}
    for data in leveldb_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        if record.HasField("run"):
            config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
    return history, config


def tensorboard_steps(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), {"tensors": 0})
    read.Reload()
    return [e.step for e in read.Tensors("train/loss")]


def leveldb_log(data: bytes) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, parts with checksum, length and type)."""
    records, parts, at = [], b"", 7  # 7 bytes of W&B's own come first
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no part begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


RUNNING = """
import sys, time
from pathlib import Path
from draftsmith.events import EventLog, StepRecord
with EventLog(Path(sys.argv[1]), total_steps=8) as log:
    for step in range(1, 9):
        time.sleep(0.3)
        log.step(StepRecord(step=step, loss=9.0 - step))
"""


def test_a_sink_follows_a_run_until_its_end(tmp_path: Path) -> None:
    """Two processes at once: what the run writes while the sink looks on arrives once, evaluations included."""
    running = subprocess.Popen([sys.executable, "-c", RUNNING, str(tmp_path)])
    while not (tmp_path / "events").is_dir():
        time.sleep(0.01)
    follow(SinkOptions(tmp_path, "tensorboard", every=0.05))
    assert running.wait(10) == 0
    assert tensorboard_steps(tmp_path) == list(range(1, 9))


def test_a_failing_sink_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tensorboard").write_text("a file where the sink wants its directory")
    log = EventLog(tmp_path)
    with SinkProcesses(tmp_path, ("tensorboard",), said.append), log:
        step = 0
        while not said:
            step += 1
            log.step(StepRecord(step=step, loss=1.0))
            time.sleep(0.05)
        log.step(StepRecord(step=step + 1, loss=1.0))
    (line,) = said
    assert line.startswith("the sink tensorboard failed and the run goes on without it: FileExistsError")
    assert read_run(tmp_path).state() == "finished" and read_run(tmp_path).done_steps == step + 1


def test_a_sink_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SinkProcesses, "PATIENCE_SECONDS", 0.5)
    said: list[str] = []
    with EventLog(tmp_path), SinkProcesses(tmp_path, ("tensorboard",), said.append) as sinks:  # it never sees the end
        ((_, process, _),) = sinks._started
    assert ended([process.pid])
    assert len(said) == 1 and "killed, or not done in time" in said[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_place(tmp_path_factory.mktemp("sinks"), hidden=32)


def with_sinks(place: Path, *names: str, steps: int = 6, **run):
    return recipe(place, steps=steps, **run, sinks=names)


def test_a_run_hands_its_metrics_to_both_tools_while_it_trains(place: Path, tmp_path: Path) -> None:
    assert train(with_sinks(place, "tensorboard", "wandb"), tmp_path / "run") == EXIT_DONE
    run = read_run(tmp_path / "run")
    assert tensorboard_steps(run.path) == [1, 2, 3, 4, 5, 6]
    history, config = wandb_records(run.path)
    np.testing.assert_allclose([h["train/loss"] for h in history], run.column("loss"))
    assert history[2]["held_out/acceptance_length"] == run.evaluations[0]["acceptance_length"]
    assert config["run"]["sinks"] == ["tensorboard", "wandb"]


def test_a_sink_that_fails_leaves_a_run_as_it_is(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(recipe(place, stop_after=3), run) == EXIT_STOPPED
    (run / "tensorboard").write_text("a file where the sink wants its directory")
    assert train(with_sinks(place, "tensorboard"), run, resume=True) == EXIT_DONE
    (log,) = (run / "logs" / "attempt_1").glob("*.both0.log")
    said = [line for line in log.read_text().splitlines() if "the sink" in line]
    assert len(said) == 1 and "the sink tensorboard failed and the run goes on without it: FileExistsError" in said[0]


def test_a_killed_run_leaves_no_sink_behind(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    c = with_sinks(place, "tensorboard", steps=100_000, evaluate_every=0)
    training = start([*command(place, run, c), "--unchecked"])
    read_until(training, "step")
    while not list(run.glob("tensorboard/events*")):
        time.sleep(0.1)
    sinks = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if str(run).encode() in _read(p)]
    sinks.remove(training.pid)
    assert len(sinks) == 1
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    assert ended(sinks, 20.0)
    assert tensorboard_steps(run) == read_run(run).column("step").tolist(), "what was written before the kill arrived"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_sink_without_its_package_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the sink wandb needs the package wandb: pip install 'draftsmith\[sinks\]'"):
        train(with_sinks(place, "wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_recipe_names_each_sink_once_and_only_known_ones(place: Path) -> None:
    for names, match in ((["wandb", "wandb"], "run.sinks names a sink twice"), (["mlflow"], "run.sinks.0")):
        values = recipe(place).to_dict()
        values["run"]["sinks"] = names
        with pytest.raises(UserError, match=match):
            from_dict(values, "recipe.toml")


def test_metrics_join_a_step_and_its_evaluation(tmp_path: Path) -> None:
    found = {step: values for step, _, values in metrics(read_run(write_run(tmp_path / "run", total=120)))}
    assert sorted(found) == list(range(5, 121, 5))
    assert "held_out/loss" in found[10] and "held_out/loss" not in found[5]
    assert "train/slot_accuracy/01" in found[5] and "train/t" not in found[5]
