"""Checkpoints: bitwise back, complete or absent, pruned to the last n and the best, clear refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith import checkpoint
from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random
from draftsmith.errors import UserError
from draftsmith.loss import Head
from draftsmith.meters import Meter
from draftsmith.step import Tables, TrainStep, learning_rate
from draftsmith.unit import UnitSequence, UnitShape
from toy import moments, random_corpus


def make_step(layers: int = 1, seed: int = 0, **optim) -> TrainStep:
    shape = DFlashShape(
        hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=layers, vocab_size=50,
        block_size=4, mask_token=49, taps=(1, 2), num_target_layers=6, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256, windows=(None,) * layers,
    )  # fmt: skip
    drafter = DFlash(shape)
    init_random(drafter, seed)
    generator = torch.Generator().manual_seed(7)
    tables = Tables(torch.randn(50, 32, generator=generator), 1.0, Head(torch.randn(50, 32, generator=generator)))
    unit = UnitShape(128, 16, 4, 0.5)
    return TrainStep(drafter, tables, unit, LossConfig(), OptimConfig(**optim), torch.float32, torch.device("cpu"))


def train(step: TrainStep, steps: range, total: int = 20) -> list[float]:
    """Steps of two units each on a fixed corpus and made-up taps."""
    units = UnitSequence(random_corpus(range(20, 60), vocab=49), step.shape, seed=0)
    losses = []
    for number in steps:
        for u in (2 * number, 2 * number + 1):
            step.static.load(units.unit(u))
            step.static.taps.copy_(torch.randn(step.static.taps.shape, generator=torch.Generator().manual_seed(u)))
            step.accumulate()
        step.update(learning_rate(number, total, step.optim))
        losses.append(step.read().loss)
        step.clear()
    return losses


def save(run: Path, number: int, step: TrainStep, state: dict) -> checkpoint.Checkpoint:
    """step_N of a run, written by a writer that drops none."""
    writer = checkpoint.Writer(run, 10**9, step)
    try:
        writer.start(number, state)
        return writer.finish()
    finally:
        writer.close()


def test_twenty_steps_equal_ten_and_ten_resumed_bitwise(tmp_path):
    whole, half, rest = make_step(), make_step(), make_step(seed=5)
    losses = train(whole, range(20))
    first = train(half, range(10))
    saved = save(tmp_path, 10, half, {})
    checkpoint.restore(checkpoint.read_checkpoint(saved.path), rest)
    second = train(rest, range(10, 20))
    assert first + second == losses
    assert losses[-1] < losses[0]
    assert torch.equal(whole.flat.masters, rest.flat.masters)
    for a, b in zip(moments(whole), moments(rest), strict=True):
        assert torch.equal(a, b)


def test_memory_is_flat_over_300_steps():
    step, meter = make_step(), Meter()
    train(step, range(20), 320)
    before = meter.read()["memory_bytes"]
    train(step, range(20, 320), 320)
    assert meter.read()["memory_bytes"] - before < 8 << 20  # one leaked unit a step is 60 MiB


def test_a_non_finite_unit_skips_the_update_and_is_named():
    step = make_step()
    train(step, range(2))
    weights, before = step.flat.masters.clone(), moments(step)
    units = UnitSequence(random_corpus(range(20, 60), vocab=49), step.shape, seed=0)
    step.static.load(units.unit(13))
    step.static.taps.fill_(float("nan"))
    step.accumulate()
    step.update(1e-3)
    stats = step.read()
    assert stats.skipped_total == stats.skipped_in_row == 1 and stats.bad_unit == 13
    assert torch.equal(step.flat.masters, weights)
    for a, b in zip(moments(step), before, strict=True):
        assert torch.equal(a, b)
    step.clear()
    train(step, range(2, 3))
    assert step.read().skipped_in_row == 0


def test_prune_keeps_the_last_and_the_best(tmp_path):
    step = make_step()
    for number, acceptance in ((1, 1.5), (2, 1.9), (3, None), (4, 1.2), (5, 1.8)):
        save(tmp_path, number, step, {"acceptance_length": acceptance})
    checkpoint.prune(tmp_path, keep_last=2)
    found = checkpoint.list_checkpoints(tmp_path)
    assert [c.step for c in found] == [2, 4, 5]
    assert checkpoint.best_checkpoint(found).step == 2


def test_an_old_checkpoint_that_cannot_be_moved_is_one_line(tmp_path):
    writer = checkpoint.Writer(tmp_path, 1, make_step())
    writer.start(1, {})
    writer.start(2, {})
    writer.finish()
    (tmp_path / "checkpoints" / f".step_2.{os.getpid()}.tmp" / "in the way").mkdir(parents=True)
    writer.start(3, {})
    with pytest.raises(UserError, match="step_2: the old checkpoint could not be deleted"):
        writer.finish()
    writer.close()
    assert [c.step for c in checkpoint.list_checkpoints(tmp_path)] == [2, 3]


def test_another_shape_is_refused_with_the_difference(tmp_path):
    saved = save(tmp_path, 1, make_step(layers=1), {})
    with pytest.raises(UserError, match="num_layers 1 instead of 2"):
        checkpoint.restore(saved, make_step(layers=2))


@pytest.mark.parametrize("damage", ["truncate", "remove", "{", "[]", '{"format": 1, "step": 1}'])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, damage):
    saved = save(tmp_path, 1, make_step(), {})
    model = saved.path / "model.safetensors"
    if damage == "truncate":
        os.truncate(model, 100)
    elif damage == "remove":
        model.unlink()
    else:
        (saved.path / "state.json").write_text(damage)
    with pytest.raises(UserError) as error:
        checkpoint.restore(checkpoint.read_checkpoint(saved.path), make_step())
    assert str(saved.path) in str(error.value) and "\n" not in str(error.value)
    assert "delete its directory" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("drafter", {}, "drafter.hidden_size is missing"),
        ("drafter", 3, "drafter is no object"),
        ("optimizer_step", None, "optimizer_step is no number"),
        ("acceptance_length", "x", "acceptance_length is no number"),
        ("recipe", 3, "recipe is no object"),
        ("recipe", {"target": {"model": "m", "chat_template": 3}}, "recipe.target.chat_template is no string"),
    ],
)
def test_a_state_that_is_wrong_inside_names_file_and_field(tmp_path, field, value, said):
    saved = save(tmp_path, 1, make_step(), {})
    state = {**json.loads((saved.path / "state.json").read_text()), field: value}
    (saved.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=f"state.json: {said}; if the checkpoint is damaged"):
        checkpoint.restore(checkpoint.list_checkpoints(tmp_path)[0], make_step())


def test_no_space_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    step = make_step()
    save(tmp_path, 1, step, {})
    # Stands for a full disk: filling a real one would disturb the machine.
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("U", (), {"free": 10})())
    with pytest.raises(
        UserError, match="step_2: .* not be written: .* KiB are needed, .* KiB more than are free.*free some space"
    ):
        save(tmp_path, 2, step, {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_killed_while_writing_leaves_the_old_one(tmp_path):
    """A process that writes checkpoints without pause is killed at several moments; what is listed always loads."""
    program = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_checkpoint import make_step, save
        step = make_step()
        for n in range(1, 10**6):
            save(Path({str(tmp_path)!r}), n, step, {{}})
            print(n, flush=True)
        """
    )
    for moment in range(2):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2 + moment):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = checkpoint.list_checkpoints(tmp_path)
        assert len(found) >= 2
        for one in found[-2:]:
            assert np.isfinite(sum(float(t.sum()) for t in checkpoint.load_weights(one).values()))
            assert json.loads((one.path / "state.json").read_text())["step"] == one.step


# Checkpoints in the background ----------------------------------------------------------------------------------------


def test_background_writer_saves_the_state_of_the_moment(tmp_path):
    step, other = make_step(), make_step(seed=3)
    train(step, range(5))
    writer = checkpoint.Writer(tmp_path, 2, step)
    writer.start(5, {"note": "x"})
    at_five, before = step.flat.masters.clone(), moments(step)
    train(step, range(5, 10))
    written = writer.finish()
    writer.close()
    assert written.step == 5 and written.state["note"] == "x" and writer.poll() is None
    checkpoint.restore(checkpoint.read_checkpoint(written.path), other)
    assert torch.equal(other.flat.masters, at_five) and not torch.equal(step.flat.masters, at_five)
    for a, b in zip(moments(other), before, strict=True):
        assert torch.equal(a, b)


def test_background_writer_keeps_last_and_best_and_reports_failure_once(tmp_path, monkeypatch):
    step = make_step()
    writer = checkpoint.Writer(tmp_path, 1, step)
    for number, acceptance in ((1, 2.0), (2, 1.0), (3, None)):
        writer.start(number, {"acceptance_length": acceptance})
    writer.finish()
    assert [c.step for c in checkpoint.list_checkpoints(tmp_path)] == [1, 3]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full)  # stands for a disk that fills up while it is written to
    writer.start(4, {})
    with pytest.raises(UserError, match="step_4: the checkpoint could not be written.*No space"):
        writer.finish()
    monkeypatch.undo()
    writer.start(5, {})
    assert writer.finish().step == 5
    writer.close()
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_removed_run_directory_is_named(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    writer = checkpoint.Writer(run, 1, make_step())
    shutil.rmtree(run)
    with pytest.raises(UserError, match="the run directory is gone"):
        writer.start(1, {})
    writer.close()


def test_leftovers_of_killed_writers_are_swept(tmp_path):
    (tmp_path / "checkpoints" / ".step_3.99.tmp").mkdir(parents=True)
    checkpoint.sweep(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())
