"""plan: its memory arithmetic against what the code really keeps, its speed arithmetic against measured steps."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith import attention, config
from draftsmith.__main__ import main
from draftsmith.attention import BlockAttention
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random
from draftsmith.errors import UserError
from draftsmith.job import Job
from draftsmith.loss import Head
from draftsmith.plan import best_topology, make_plan
from draftsmith.plan_facts import place_of
from draftsmith.plan_measure import as_a_worker
from draftsmith.plan_memory import (
    Compute,
    TargetSize,
    attention_bytes,
    budget,
    count_chunk_keys,
    known_size,
    parameter_count,
    prefill_bytes,
    saved_bytes,
    step_bytes,
    target_size,
)
from draftsmith.plan_speed import Layout, Times, layouts, predict, rank, times_by_rates, work_of
from draftsmith.rates import CARDS, GIB, H200, KNOWN_TARGETS, card, card_of, rates_of
from draftsmith.step import Tables, TrainStep, draft_states
from draftsmith.target import Target
from draftsmith.unit import UnitSequence, UnitShape
from live_bytes import kept_by_autograd, peak_of
from toy import random_corpus, toy_place


def drafter_shape(hidden=64, inner=160, layers=3, vocab=264, block=8, taps=3) -> DFlashShape:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return DFlashShape(
        hidden,
        inner,
        4,
        2,
        16,
        layers,
        vocab,
        block,
        260,
        tuple(range(1, taps + 1)),
        8,
        1e-6,
        rope,
        1024,
        (None,) * layers,
    )


def toy_step(shape: DFlashShape, unit: UnitShape, dtype: torch.dtype, recompute: bool = False):
    """(a step with unit 0 loaded, that unit)."""
    drafter = DFlash(shape)
    init_random(drafter, 0)
    table = torch.randn(shape.vocab_size, shape.hidden_size).to(dtype)
    head = Head(table.clone() * 0.02)
    step = TrainStep(
        drafter, Tables(table, 1.0, head), unit, config.LossConfig(), config.OptimConfig(), dtype, torch.device("cpu"),
        checkpoint_activations=recompute,
    )  # fmt: skip
    lengths = np.random.default_rng(0).integers(40, 120, 200)
    first = UnitSequence(random_corpus(lengths), unit, 0).unit(0)
    step.static.load(first)
    step.static.taps.normal_()
    return step, first


SHAPES = [
    (drafter_shape(), UnitShape(512, 32, 8, 0.5)),
    (drafter_shape(hidden=96, layers=1, taps=6), UnitShape(1024, 64, 8, 0.5)),
    (drafter_shape(vocab=4096, inner=640, layers=5, block=16), UnitShape(1024, 64, 16, 0.5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "unit"), SHAPES, ids=["usual", "one layer", "wide head"])
def test_activations_are_what_autograd_keeps_and_the_peak_is_within_a_tenth(shape, unit, dtype):
    step, first = toy_step(shape, unit, dtype)
    eager = Compute("cpu", dtype.itemsize, "eager")
    not_counted = [step.flat.compute, step.static.taps, step.static.ids, step.tables.embedding]
    plain = BlockAttention.choose(shape, step.device, dtype, compiled=False)
    kept = kept_by_autograd(lambda: draft_states(step.drafter, step.static, step.tables, plain, False), not_counted)
    predicted = saved_bytes(shape, unit, eager) + attention_bytes(shape, eager, count_chunk_keys(first))
    assert kept == pytest.approx(predicted, rel=0.08)
    step.accumulate()
    step.update(1e-3)
    peak = peak_of(step.accumulate)
    assert peak == pytest.approx(step_bytes(shape, unit, eager, count_chunk_keys(first)), rel=0.1)


def test_keys_are_counted_as_the_attention_concatenates_them(monkeypatch):
    shape, unit = SHAPES[0]
    step, first = toy_step(shape, unit, torch.float32)
    seen, sdpa = [], attention._sdpa
    monkeypatch.setattr(attention, "_sdpa", lambda q, k, v, mask: seen.append(len(k)) or sdpa(q, k, v, mask))
    step.accumulate()
    assert count_chunk_keys(first) == sum(seen) / shape.num_layers


@pytest.mark.parametrize(("shape", "unit"), SHAPES[:2], ids=["usual", "one layer"])
def test_compiled_activations_are_what_the_partitioner_keeps(shape, unit):
    """torch's partitioner, as Inductor uses it, without Inductor's code generation."""
    step, _ = toy_step(shape, unit, torch.bfloat16)
    forward = torch.compile(draft_states, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    attention = BlockAttention.choose(shape, step.device, torch.bfloat16, compiled=True)
    not_counted = [step.flat.compute, step.static.taps, step.static.ids, step.tables.embedding]
    kept = kept_by_autograd(lambda: forward(step.drafter, step.static, step.tables, attention, False), not_counted)
    assert kept == pytest.approx(saved_bytes(shape, unit, Compute("cpu", 2, "compile")), rel=0.02)


@pytest.mark.parametrize(("shape", "unit"), SHAPES[::2], ids=["usual", "wide head"])
def test_recomputed_layers_need_what_is_predicted_and_less_than_kept_ones(shape, unit):
    step, first = toy_step(shape, unit, torch.float32, recompute=True)
    step.accumulate()
    recomputed, chunk_keys = Compute("cpu", 4, "eager", recompute=True), count_chunk_keys(first)
    predicted = step_bytes(shape, unit, recomputed, chunk_keys)
    assert peak_of(step.accumulate) == pytest.approx(predicted, rel=0.1)
    assert predicted < step_bytes(shape, unit, Compute("cpu", 4, "eager"), chunk_keys)


def test_what_stays_is_counted_to_the_byte():
    shape, unit = SHAPES[0]
    step, _ = toy_step(shape, unit, torch.bfloat16)
    P = sum(p.numel() for p in step.drafter.parameters())
    assert parameter_count(shape) == P
    size = TargetSize(10, 10, 2, 64, 160, 64, 32, 264, False)
    lines = {
        line.name: line.bytes for line in budget("trainer", shape, unit, size, Compute("cuda", 2, "graph"), 0).lines
    }
    assert lines["float32 masters"] == step.flat.masters.numel() * 4
    assert lines["weights in the compute dtype"] == step.flat.compute.numel() * 2
    assert lines["AdamW's moments"] == (step.adamw.exp_avg.numel() + step.adamw.exp_avg_sq.numel()) * 4
    static = step.static
    names = ("ids", "positions", "documents", "anchors", "starts", "labels", "scored", "taps")
    buffers = [getattr(static, name) for name in names]
    assert lines["input buffers"] == sum(b.numel() * b.element_size() for b in buffers)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with target/, corpus/ and recipe.toml."""
    return toy_place(tmp_path_factory.mktemp("plan"))


def test_target_size_and_prefill_are_the_loaded_models(place):
    taps = (1, 2, 3)
    target = Target.load(place / "target", taps, torch.float32, "cpu")
    size = target_size(place / "target", taps)
    assert size.parameters == sum(p.numel() for p in target.decoder.parameters())
    shape, unit = drafter_shape(inner=128), UnitShape(512, 8, 8, 0.5)
    ids = torch.randint(0, 260, (512,))
    positions, documents, out = torch.arange(512) % 128, torch.arange(512) // 128, torch.empty(512, 3 * 64)
    peak = peak_of(lambda: target.prefill(ids, positions, documents, out))
    assert peak == pytest.approx(prefill_bytes(shape, unit, size, Compute("cpu", 4, "eager")), rel=0.1)


QWEN3_8B = DFlashShape(
    4096, 12288, 32, 8, 128, 5, 151936, 16, 151669, (1, 9, 17, 25, 33), 36, 1e-6,
    {"rope_type": "default", "rope_theta": 1e6}, 40960, (None,) * 5,
)  # fmt: skip


@pytest.mark.parametrize(("tokens", "anchors", "milliseconds"), [(16384, 1024, 247.2), (2048, 64, 27.0)])
def test_built_in_rates_give_the_measured_steps_of_an_h200(tokens, anchors, milliseconds):
    """Measured: forward, loss, backward and update in one CUDA graph, documents of 2,048 tokens."""
    size = known_size(KNOWN_TARGETS[3], QWEN3_8B.taps)
    work = work_of(QWEN3_8B, UnitShape(tokens, anchors, 16, 0.5), size, 1024, tokens * 2048, 2)
    times = times_by_rates(work, H200)
    assert 1e3 * (times.unit + times.update) == pytest.approx(milliseconds, rel=0.1)
    assert tokens / times.prefill == pytest.approx(43_145, rel=0.05)


def test_built_in_rates_give_the_measured_run_of_an_h200():
    """records/pipeline_h200.md: documents of 554 tokens in the mean, four units a step, colocated."""
    size, unit = known_size(KNOWN_TARGETS[3], QWEN3_8B.taps), UnitShape(4096, 1904, 16, 0.5)
    times = times_by_rates(work_of(QWEN3_8B, unit, size, 350, 4096 / 554 * 554**2 * 1.25, 2), H200)
    run = predict(Layout("colocated", 1, 1), times, 4, unit.tokens, lambda layout: 1, 1)
    assert run.step_seconds == pytest.approx(1.935, rel=0.1)


def test_layouts_use_every_device_and_rank_by_arithmetic():
    found = [layout for layout in layouts(4) if layout.workers == "processes"]
    assert [x.name for x in found] == ["colocated x 4", "split 1:3", "split 2:2", "split 3:1"]
    assert all(x.devices == 4 for x in layouts(4))
    times = Times("test", False, prefill=3.0, unit=1.0, update=0.0, pull=0.0, copy=0.0, reduce=0.0)

    def at(layout: Layout):
        return predict(layout, times, 12, 100, lambda x: 10, 10)

    assert at(Layout("colocated", 4, 4)).step_seconds == 3 * 4.0
    assert at(Layout("split", 3, 1)).step_seconds == 12.0 and at(Layout("split", 3, 1)).trainer_busy == 1.0
    assert at(Layout("split", 2, 2)).step_seconds == 18.0 and at(Layout("split", 2, 2)).bound_by == "targets"
    best = rank([at(layout) for layout in layouts(4)])
    assert best[0].layout.name == "colocated x 4" and best[1].layout.name == "split 3:1"
    tight = predict(Layout("colocated", 4, 4), times, 12, 100, lambda x: 11, 10)
    assert rank([tight, at(Layout("split", 1, 3))])[-1] == tight


def test_cards_by_name_and_by_driver():
    assert card("H200") == CARDS["h200"] and rates_of(CARDS["h200"]) == H200
    assert card_of("NVIDIA H200", 139.8) == CARDS["h200"]
    assert card_of("NVIDIA A100-SXM4-80GB", 79.2) == CARDS["a100-80gb"]
    assert card_of("NVIDIA A100-SXM4-40GB", 39.5) == CARDS["a100-40gb"]
    assert card_of("NVIDIA L40S", 44.5) == CARDS["l40s"] and card_of("NVIDIA L4", 22.0) == CARDS["l4"]
    assert card_of("NVIDIA GeForce RTX 4090", 23.6) == CARDS["rtx4090"]
    assert card_of("Unheard of", 10.0) is None
    estimate = rates_of(CARDS["a100-80gb"])
    assert estimate.estimate and estimate.step == pytest.approx(H200.step * 312 / 989)
    with pytest.raises(UserError, match="h200"):
        card("h2000")


def test_plan_for_a_named_card_loads_nothing_and_says_where_its_rates_are_from(place):
    recipe = config.load(place / "recipe.toml")
    plan = make_plan(recipe, "a100-80gb", 4)
    assert not plan.place.here and plan.times.estimate and "estimate" in plan.times.source
    assert len(plan.ranking) == len(layouts(4)) and all(p.fits for p in plan.ranking)
    assert plan.disk.checkpoint == 12 * plan.parameters
    rows = plan.corpus.rows_in_epoch
    assert plan.steps == pytest.approx(rows * recipe.optim.epochs / recipe.unit.per_step, abs=6)
    assert plan.smallest_card is not None and plan.largest_target is not None
    fewer = make_plan(replace(recipe, unit=replace(recipe.unit, per_step=3)), "h200", 2)
    assert any("uneven" in note for note in fewer.notes) == (fewer.ranking[0].layout.trainers == 2)


def test_plan_measures_this_machine_and_train_can_take_its_topology(place):
    recipe = config.load(place / "recipe.toml")
    small = replace(recipe, unit=replace(recipe.unit, tokens=512, anchors=32), run=replace(recipe.run, device="cpu"))
    plan = make_plan(small)
    assert plan.place.kind == "cpu" and plan.times.source.startswith("measured here")
    assert plan.times.prefill > 0 and plan.times.unit > 0 and plan.ranking[0].fits
    chosen = best_topology(small, plan)
    assert (chosen.topology.targets, chosen.topology.trainers) == (0, 1)


def test_measured_times_that_scatter_are_said(place, monkeypatch):
    ticks = iter(
        [1.0, 1.0, 1.0] * 3 + [3.0, 1.0, 2.0]
    )  # prefill, unit and update of each unit; the last on a busy machine
    monkeypatch.setattr("draftsmith.plan_measure.timed", lambda run, device: run() or next(ticks))
    recipe = config.load(place / "recipe.toml")
    plan = make_plan(replace(recipe, run=replace(recipe.run, device="cpu")))
    assert plan.times.scatter == 2.0
    assert "measured times scatter by a factor of 2.0: is the machine busy?" in plan.notes


def test_a_target_that_needs_a_split_is_planned_by_rates(place, monkeypatch):
    """Measuring takes one device for both roles."""
    recipe = config.load(place / "recipe.toml")
    tight = replace(place_of(recipe, "cpu", 2), memory=1 << 20)
    monkeypatch.setattr("draftsmith.plan.place_of", lambda *_: tight)
    plan = make_plan(recipe)
    assert plan.times is None and any("target and trainer together need" in note for note in plan.notes)
    with pytest.raises(UserError, match="says why"):
        best_topology(recipe, plan)
    tight = replace(tight, card=CARDS["h200"], memory=max(b.total for b in plan.budgets if b.role != "both"))
    plan = make_plan(recipe)
    assert plan.ranking[0].fits and best_topology(recipe, plan).topology.targets == 1
    assert not next(p for p in plan.ranking if p.layout.kind == "colocated").fits


def test_a_measurement_that_runs_out_of_memory_leaves_the_rates(place, monkeypatch):
    def full(job, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    recipe = config.load(place / "recipe.toml")
    here = replace(place_of(recipe, "cpu", 1), card=CARDS["h200"])
    monkeypatch.setattr("draftsmith.plan.place_of", lambda *_: here)
    monkeypatch.setattr(Job, "load_target", full)
    plan = make_plan(recipe)
    assert plan.times.source == H200.source and "not measured: CPU ran out of memory" in plan.notes[0]


def test_measuring_makes_the_device_current_as_a_worker_does(monkeypatch):
    """Copies record their events on the current device's stream."""
    current, threads = [], torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    with as_a_worker(torch.device("cuda", 1), 1):
        assert current == [torch.device("cuda", 1)] and torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_the_command_prints_text_and_json(place, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", str(place / "recipe.toml"), "--device", "h200", "--count", "8", "--json"])
    assert end.value.code == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["place"]["count"] == 8 and {b["role"] for b in plan["budgets"]} == {"both", "target", "trainer"}
    with pytest.raises(SystemExit) as end:
        main(["plan", str(place / "recipe.toml"), "--device", "h200", "--optim.epochs", "12.0"])
    text = capsys.readouterr().out
    assert "colocated worker" in text and "GiB" in text and "measured on an H200" in text
    for words in (["--device", "h9"], ["--device", "h200", "--count", "0"]):
        with pytest.raises(SystemExit) as end:
            main(["plan", str(place / "recipe.toml"), *words])
        assert end.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_room_of_a_card_is_less_than_its_memory(place):
    plan = make_plan(config.load(place / "recipe.toml"), "rtx4090")
    assert plan.place.memory < CARDS["rtx4090"].memory * GIB
