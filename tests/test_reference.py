"""Numbers from an independent implementation (speculators 0.9.0, float32): logits of every slot and every gradient.

Their loss divides by the count of scored slots + 1e-5; ours follows the sum law, which is tested on the same case.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash, DFlashShape, from_zlab, to_zlab
from draftsmith.loss import Head
from draftsmith.step import Tables, TrainStep
from draftsmith.unit import Unit, UnitShape
from toy import block_states

DATA = Path(__file__).parent / "data"


def reference(case: str) -> tuple[dict, dict]:
    with safe_open(DATA / f"dflash_full_ce_{case}.safetensors", "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, dict(file.metadata())


def reference_unit(t: dict, meta: dict) -> Unit:
    """The reference batch as one of our units; labels are the file's (argmax of the verifier)."""
    B, T = int(meta["BS"]), int(meta["T"])
    anchors, valid = t["anchors"].numpy(), t["anchor_valid"].numpy()
    documents = t["batch.document_ids"][0].numpy()
    labels = t["expected.verifier_logits"].argmax(-1).view(-1, B).numpy()[:, 1:]
    scored = t["expected.slot_mask"].view(-1, B).numpy()[:, 1:]
    starts = np.array(
        [np.flatnonzero(documents == documents[a])[0] if ok else 0 for a, ok in zip(anchors, valid, strict=True)]
    )
    return Unit(
        0, t["batch.input_ids"][0].numpy(), t["batch.position_ids"][0].numpy(), documents,
        anchors, starts, labels, scored, T, int(valid.sum()),
    )  # fmt: skip


def make_step(t: dict, meta: dict, case: str) -> TrainStep:
    shape = DFlashShape(
        hidden_size=int(meta["H"]), intermediate_size=int(meta["FF"]), num_heads=int(meta["NH"]),
        num_kv_heads=int(meta["NKV"]), head_dim=int(meta["HD"]), num_layers=int(meta["L"]), vocab_size=int(meta["V"]),
        block_size=int(meta["BS"]), mask_token=int(meta["mask_id"]), taps=(0, 1, 2), num_target_layers=8,
        rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=64,
        windows=(None,) * int(meta["L"]),
    )  # fmt: skip
    drafter = DFlash(shape)
    weights = {k.removeprefix("weights."): v for k, v in t.items() if k.startswith("weights.")}
    body = {k: v for k, v in weights.items() if k.startswith(("fc.", "hidden_norm.", "norm.", "layers."))}
    drafter.load_state_dict(from_zlab(body, shape))
    tables = Tables(weights["embed_tokens.weight"], 1.0, Head(weights["lm_head.weight"]))
    loss = LossConfig(weighting=case, gamma=float(meta["gamma"]), alpha=float(meta["dpace_alpha"]))
    unit_shape = UnitShape(int(meta["T"]), len(t["anchors"]), shape.block_size, 1.0)
    return TrainStep(drafter, tables, unit_shape, loss, OptimConfig(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", ["decay", "dpace"])
def test_logits_loss_and_gradients_equal_the_independent_implementation(case):
    t, meta = reference(case)
    step = make_step(t, meta, case)
    step.static.load(reference_unit(t, meta))
    step.static.taps.copy_(t["batch.hidden_states"][0])
    valid = t["anchor_valid"]

    logits = block_states(step) @ step.tables.head.weight.T
    expected = t["expected.draft_logits"].view(logits.shape)
    torch.testing.assert_close(logits[valid], expected[valid], rtol=1e-5, atol=1e-5)

    step.accumulate()
    count = t["expected.slot_mask"].sum() + 1e-5
    loss_sum, denominator = step.flat.sums[1], step.flat.sums[0]
    assert float(loss_sum / count) == pytest.approx(float(meta["loss"]), rel=1e-5)
    gradients = to_zlab(step.flat.named(step.flat.gradient / step.constant / count), step.drafter.shape)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, t[f"grads.{name}"], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )

    # The sum law's own denominator: the sum of weights for decay, the number of scored slots for D-PACE.
    scored = t["expected.slot_mask"].view(-1, step.shape.block_size)[:, 1:]
    by_law = (scored * step.slot_weights).sum() if case == "decay" else scored.sum()
    assert float(denominator) == pytest.approx(float(by_law), rel=1e-6)
    step.update(0.0)
    norm = torch.sqrt(sum((t[f"grads.{n}"] * count / by_law).square().sum() for n in gradients))
    assert float(step.norm) == pytest.approx(float(norm), rel=1e-4)
    assert json.dumps(step.read().slot_accuracy)
