"""z-lab's own package (`dflash` 0.1.0) loads our zlab export: same block logits, same text, same acceptance lengths."""

import time

import pytest
import torch
from dflash import model as zlab
from torch.nn import functional as F

from draftsmith.caches import DraftCache
from draftsmith.decode import Decoder
from draftsmith.export import export
from tiny_models import (
    Trained,
    own_greedy,
    random_drafter,
    random_prompts,
    save_target,
    shape_for,
    tables_of,
    tiny_target,
    write_checkpoint,
)

# family, tied, draft layers D, block B, taps (K of them), windows
CASES = {
    "d1-b4-k1": ("qwen3", False, 1, 4, (3,), (None,)),
    "d2-b8-k2": ("llama", True, 2, 8, (1, 4), (None, None)),
    "d5-b16-k5": ("qwen3", True, 5, 16, (0, 1, 2, 3, 4), (None,) * 5),
    "d2-b4-k6": ("qwen3", False, 2, 4, (0, 1, 2, 3, 5, 4), (None, None)),
    "sliding": ("llama", False, 3, 8, (2, 0, 4), (5, None, 5)),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Our drafter, somewhat trained, and z-lab's model from its float32 export. The last layer is no tap here: z-lab
    takes its normed output, vLLM and we the plain one, and no rule for taps ever selects it."""
    torch.set_num_threads(1)
    tmp_path = tmp_path_factory.mktemp(request.param)
    family, tied, layers, block, taps, windows = CASES[request.param]
    model = tiny_target(family, 7, tied, seed=len(taps))
    drafter = random_drafter(shape_for(model, layers, block, taps, windows=windows), std=0.05)
    prompts = random_prompts(6, seed=block)
    Trained(model, drafter, [(p, own_greedy(model, p, 24)) for p in prompts]).train(25)
    write_checkpoint(tmp_path / "run", drafter, save_target(model, tmp_path / "target"))
    export(tmp_path / "run", tmp_path / "out", "zlab", "float32")
    theirs = zlab.DFlashDraftModel.from_pretrained(tmp_path / "out", attn_implementation="sdpa", dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlab, "_cuda_time", time.perf_counter)  # its timer calls CUDA
        yield model, drafter, theirs.eval(), prompts


@torch.no_grad()
def test_block_logits(case):
    model, drafter, theirs, _ = case
    shape, tables, length = drafter.shape, tables_of(model), 11
    assert theirs.block_size == shape.block_size and theirs.mask_token_id == shape.mask_token
    assert tuple(theirs.target_layer_ids) == shape.taps
    torch.manual_seed(3)
    taps = torch.randn(1, length, drafter.fc.in_features)
    ids = torch.tensor([[7] + [shape.mask_token] * (shape.block_size - 1)])
    x, positions = F.embedding(ids, tables.embedding), torch.arange(length + shape.block_size)[None]
    expected = theirs(target_hidden=taps, noise_embedding=x, position_ids=positions)
    cache = DraftCache(shape, 1, positions.shape[1], torch.float32, torch.device("cpu"))
    cache.absorb(slice(None), drafter, drafter.fuse(taps), positions[:, :length])
    block = positions[:, length:]
    attend = cache.attention(block, torch.tensor([shape.block_size]), positions.shape[1])
    states = drafter(x, x[:, :0], block, block[:, :0], attend)
    ours, expected = (F.linear(s, tables.head.weight) for s in (states, expected))
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("new", [1, 2, 23])
def test_generation(case, new):
    """Stop tokens and the length limit cut the last cycle the same way; all rows are decoded in one batch."""
    model, drafter, theirs, prompts = case
    prompts = prompts + random_prompts(2, seed=99)
    stops = [1, 5, 9, 23]
    ours = Decoder(model, drafter, tables_of(model)).generate(prompts, new, stops)
    for prompt, generation in zip(prompts, ours, strict=True):
        expected = zlab.dflash_generate(theirs, model, torch.tensor([prompt]), new, stops, return_stats=True)
        assert list(generation.tokens) == expected.output_ids[0, len(prompt) :].tolist()
        assert [c.committed for c in generation.cycles] == expected.acceptance_lengths
    if new == 23:
        committed = [c.committed for g in ours for c in g.cycles]
        assert 1 in committed and max(committed) >= 3  # the drafter is right sometimes, not always
        assert len({len(g.tokens) for g in ours}) > 1  # some rows stopped before the limit


def test_smaller_block(case):
    model, drafter, theirs, prompts = case
    block = drafter.shape.block_size // 2
    ours = Decoder(model, drafter, tables_of(model), block).generate(prompts[:2], 12)
    for prompt, generation in zip(prompts, ours, strict=False):
        expected = zlab.dflash_generate(
            theirs, model, torch.tensor([prompt]), 12, None, block_size=block, return_stats=True
        )
        assert list(generation.tokens) == expected.output_ids[0, len(prompt) :].tolist()
        assert [c.committed for c in generation.cycles] == expected.acceptance_lengths
