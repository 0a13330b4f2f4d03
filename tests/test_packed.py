"""A packed document trains as if alone, for every depth, block, tap count, head, rope spelling and anchor supply."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random
from draftsmith.loop import Plan
from draftsmith.step import TrainStep
from draftsmith.tables import load_tables
from draftsmith.target import Target
from draftsmith.target_facts import describe
from draftsmith.unit import UnitShape, evaluation_chunks, lay_out, with_anchors
from toy import MemoryCorpus, block_states, random_corpus, toy_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["tied", "untied", "old-rope"])
def target(request, tmp_path_factory) -> Path:
    directory = toy_target(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")
    if request.param == "old-rope":  # transformers 4 wrote rope_theta at the top level
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"] * 5
        path.write_text(json.dumps(config))
    return directory


def slot_losses(directory: Path, corpus: MemoryCorpus, members: list[int], shape: UnitShape, taps: tuple, layers: int):
    """{(document, anchor in the document, slot): cross-entropy} of one row with every valid anchor, and the gradients."""
    facts = describe(directory)
    drafter_shape = DFlashShape(
        facts.hidden_size, facts.intermediate_size, facts.num_heads, facts.num_kv_heads, facts.head_dim, layers,
        facts.vocab_size, shape.block_size, 260, taps, facts.num_layers, facts.rms_norm_eps, facts.rope,
        facts.max_positions, tuple(8 if i % 2 else None for i in range(layers)),
    )  # fmt: skip
    drafter = DFlash(drafter_shape)
    init_random(drafter, 1, std=0.08)
    tables = load_tables(directory, torch.float32, CPU)
    step = TrainStep(drafter, tables, shape, LossConfig(gamma=4.0), OptimConfig(), torch.float32, CPU)
    row = lay_out(corpus, members, shape)
    unit = with_anchors(row, row.valid, shape, 0)
    step.static.load(unit)
    static = step.static
    Target.load(directory, taps, torch.float32, CPU).prefill(
        static.ids, static.positions, static.documents, static.taps
    )
    logits = (block_states(step)[:, 1:] @ tables.head.weight.T).detach()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), static.labels.flatten(), reduction="none")
    losses = losses.view(static.labels.shape)
    out = {}
    for i in range(unit.anchors_used):
        a = unit.anchors[i]
        for k in np.flatnonzero(unit.scored[i]):
            out[members[unit.documents[a]], int(unit.positions[a]), int(k) + 1] = float(losses[i, k])
    step.accumulate()
    return out, step.flat.sums[0].clone(), step.flat.gradient.clone() / step.constant


@pytest.mark.parametrize(
    ("layers", "block", "taps"),
    [
        (1, 4, (2,)),
        (2, 8, (1, 2)),
        (5, 16, (1, 2, 3)),
        (1, 8, (0, 1, 2, 3, 4)),
        (2, 16, (0, 1, 2, 3, 4, 5)),
        (2, 4, (3, 1, 0, 2)),
    ],
)
def test_packed_equals_alone(target, layers, block, taps):
    if taps[-1] == 5 and target.name.startswith("old"):
        taps = taps[::-1]
    corpus = random_corpus([50, 33, 71, 20], vocab=256, seed=2)
    packed = UnitShape(256, 130, block, 1.0)  # more slots than valid anchors: the rest must not matter
    together, weight, gradient = slot_losses(target, corpus, [2, 0, 3, 1], packed, taps, layers)
    alone, weights, gradients = {}, 0.0, 0.0
    for index in range(4):
        shape = UnitShape(96, 60, block, 1.0)
        losses, w, g = slot_losses(target, corpus, [index], shape, taps, layers)
        alone |= losses
        weights, gradients = weights + w, gradients + g
    assert together.keys() == alone.keys() and len(together) > 200
    np.testing.assert_allclose([together[k] for k in alone], list(alone.values()), rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(weight, weights, rtol=1e-6, atol=1e-4)
    assert (gradient - gradients).norm() < 2e-4 * gradients.norm()


def test_evaluation_chunks_hold_every_valid_anchor_once():
    corpus = random_corpus([50, 33, 71, 20], seed=2)
    shape = UnitShape(256, 16, 8, 1.0)
    row = lay_out(corpus, [2, 0, 3, 1], shape)
    chunks = evaluation_chunks(corpus, [2, 0, 3, 1], shape, 0)
    anchors = np.concatenate([c.anchors[: c.anchors_used] for c in chunks])
    assert anchors.tolist() == row.valid.tolist() and len(chunks) == -(-len(row.valid) // 16)


@pytest.mark.parametrize("trainers", [1, 2, 3, 5])
def test_trainers_share_the_units_of_a_step_without_gap_or_overlap(trainers):
    plans = [Plan(0, 7, 4, r, trainers) for r in range(trainers)]
    for step in range(7):
        shares = [plan.units(step) for plan in plans]
        assert sorted(u for share in shares for u in share) == list(range(4 * step, 4 * step + 4))
        assert all(u % trainers == r for r, share in enumerate(shares) for u in share)
    assert sorted(u for plan in plans for u in plan.all_units()) == list(range(28))
