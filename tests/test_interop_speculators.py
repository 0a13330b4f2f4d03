"""The `speculators` library (0.9.0) loads our speculators export without a missing or unexpected tensor; same logits."""

import pytest
import torch
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from torch.nn import functional as F

from draftsmith.attention import reference_attention
from draftsmith.export import export
from tiny_models import random_drafter, save_target, shape_for, tables_of, tiny_target, write_checkpoint

# family, tied, D, B, taps, windows. Windows reach past the text, so that only the causal rule of sliding layers shows:
# speculators lets a whole block see as far as its anchor, everybody else (and we) counts from each query.
CASES = {
    "d1-b4-k1": ("llama", True, 1, 4, (3,), (None,)),
    "d3-b8-k3-sliding": ("qwen3", False, 3, 8, (1, 3, 4), (None, 64, None)),
    "d5-b16-k6": ("qwen3", True, 5, 16, (0, 1, 2, 3, 4, 5), (None,) * 5),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    family, tied, layers, block, taps, windows = CASES[request.param]
    model = tiny_target(family, 7, tied)
    drafter = random_drafter(shape_for(model, layers, block, taps, windows=windows))
    target = save_target(model, tmp_path / "target")
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "out", "speculators", "float32")
    return model, drafter, tmp_path / "out", target


def load(out):
    config = DFlashSpeculatorConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"  # its default is compiled flex attention
    return DFlashDraftModel.from_pretrained(out, config=config, output_loading_info=True)


@torch.no_grad()
def test_loads_whole_and_gives_our_logits(case):
    model, drafter, out, _ = case
    theirs, report = load(out)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert not any(t.isnan().any() for n, t in theirs.state_dict().items() if not n.startswith("verifier_"))
    shape, tables, length = drafter.shape, tables_of(model), 40
    torch.manual_seed(1)
    taps, ids = torch.randn(1, length, drafter.fc.in_features), torch.randint(0, 60, (1, length))
    anchors = torch.tensor([0, 3, 11, length - shape.block_size - 1])
    mask = torch.zeros(1, length).index_fill(1, anchors, 1.0)  # it draws anchors where this is 1: here, all of them
    expected = theirs._backbone_forward(
        taps, ids, mask, torch.zeros(1, length, shape.hidden_size), torch.zeros(length, dtype=torch.long),
        max_anchors=len(anchors),
    )[1][0]  # fmt: skip
    slots = torch.arange(shape.block_size)
    block = torch.where(slots == 0, ids[0, anchors][:, None], shape.mask_token).flatten()

    def attend(layer, *args):
        return reference_attention(*args, anchors, torch.zeros_like(anchors), shape.block_size, shape.windows[layer])

    states = drafter(
        F.embedding(block, tables.embedding), drafter.fuse(taps[0]), (anchors[:, None] + slots).flatten(),
        torch.arange(length), attend,
    )  # fmt: skip
    ours = F.linear(states, tables.head.weight)
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_loads_by_directory_alone(case):
    """The config names the kind of speculator, the proposal and the target, whose embedding and head equal the stored."""
    model, drafter, out, target = case
    theirs = SpeculatorModel.from_pretrained(str(out))
    assert isinstance(theirs, DFlashDraftModel) and theirs.block_size == drafter.shape.block_size
    assert theirs.target_layer_ids == [t + 1 for t in drafter.shape.taps]
    config = theirs.config.speculators_config
    assert config.verifier.name_or_path == str(target) and config.verifier.architectures == model.config.architectures
    assert config.proposal_methods[0].speculative_tokens == drafter.shape.block_size - 1
    assert torch.equal(theirs.embed_tokens.weight, model.get_input_embeddings().weight)
    assert torch.equal(theirs.lm_head.weight, model.get_output_embeddings().weight)
