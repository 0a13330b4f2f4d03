"""Draft-block attention: every implementation against a brute-force mask; work lists and block masks likewise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from draftsmith import attention_flex
from draftsmith.attention import BlockAttention, block_attention, reference_attention
from draftsmith.bench import BenchStepOptions, drafter_shape

TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TABLES += tuple(name.replace("kv", "q") for name in TABLES)


def row(seed: int, documents: list[int], anchors: int, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and starts of a packed row as unit.py makes them: ascending, unused ones at the row's end."""
    rng, tokens = np.random.default_rng(seed), sum(documents)
    first = np.repeat(np.cumsum([0, *documents[:-1]]), documents)
    at = np.full(anchors, tokens - 1)
    starts = at.copy()
    used = min(used, tokens - 1, anchors)
    at[:used] = np.sort(rng.choice(tokens - 1, used, replace=False))
    starts[:used] = first[at[:used]]
    return torch.tensor(at), torch.tensor(starts)


def dense_mask(anchors, starts, tokens: int, block: int, window: int | None) -> torch.Tensor:
    """[A*B, T + A*B] by the contract's words, one pair at a time."""
    count = len(anchors)
    mask = torch.zeros(count * block, tokens + count * block, dtype=torch.bool)
    for i, (a, s) in enumerate(zip(anchors.tolist(), starts.tolist(), strict=True)):
        for k in range(block):
            q = i * block + k
            for t in range(s, a):
                mask[q, t] = window is None or a + k - t < window
            for j in range(block):
                mask[q, tokens + i * block + j] = window is None or (j <= k and k - j < window)
    return mask


@pytest.mark.parametrize("window", [None, 8, 3])
@pytest.mark.parametrize("documents", [[40], [7, 1, 30, 12]])
def test_reference_and_operator_equal_a_dense_mask(documents, window):
    tokens, block, heads, kv_heads = sum(documents), 4, 4, 2
    anchors, starts = row(1, documents, 12, 10)
    n = 12 * block
    generator = torch.Generator().manual_seed(0)
    sizes = [(n, heads)] + [(n, kv_heads)] * 2 + [(tokens, kv_heads)] * 2
    inputs = [torch.randn(m, h, 8, dtype=torch.float64, generator=generator).requires_grad_() for m, h in sizes]
    q, k, v, context_k, context_v = inputs
    keys, values = (torch.cat(x).repeat_interleave(2, 1) for x in ((context_k, k), (context_v, v)))
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * 8**-0.5
    scores = scores.masked_fill(~dense_mask(anchors, starts, tokens, block, window), float("-inf"))
    expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    none = torch.empty(0, dtype=torch.int32)
    by_operator = block_attention(*inputs, anchors.int(), starts.int(), none, none, none, block, window or 0)[0]
    for out in (reference_attention(*inputs, anchors, starts, block, window), by_operator):
        torch.testing.assert_close(out, expected)
        for got, want in zip(torch.autograd.grad(out, inputs, grad), expected_grads, strict=True):
            torch.testing.assert_close(got, want)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    documents=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    anchors=st.integers(1, 40),
    unused=st.integers(0, 10),
    block=st.sampled_from([2, 5, 8, 16]),
    window=st.sampled_from([None, 3, 40, 300]),
)
def test_closed_form_block_mask_equals_create_block_mask(seed, documents, anchors, unused, block, window):
    tokens = sum(documents)
    at, starts = row(seed, documents, anchors, max(0, anchors - unused))
    mask = attention_flex.block_mask(at, starts, tokens, block, window)
    visible = attention_flex.mask_function(at, starts, tokens, block, window)
    n = anchors * block
    expected = create_block_mask(visible, 1, 1, n, tokens + n, device="cpu", BLOCK_SIZE=attention_flex.TILE)
    for name in TABLES:
        got, want = getattr(mask, name), getattr(expected, name)
        assert got.shape == want.shape and torch.equal(got, want), name
        assert got.is_contiguous(), name
    assert mask.seq_lengths == expected.seq_lengths


def test_mask_function_says_what_the_contract_says():
    anchors, starts = row(3, [30, 9], 6, 5)
    for window in (None, 6):
        visible = attention_flex.mask_function(anchors, starts, 39, 4, window)
        q, kv = torch.meshgrid(torch.arange(24), torch.arange(39 + 24), indexing="ij")
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(visible(zero, zero, q, kv), dense_mask(anchors, starts, 39, 4, window))


def test_the_cpu_takes_the_reference_or_the_operator():
    shape = drafter_shape(BenchStepOptions(shape="tiny"))
    cpu = torch.device("cpu")
    assert BlockAttention.choose(shape, cpu, torch.float32, compiled=False).kind == "reference"
    assert BlockAttention.choose(shape, cpu, torch.float32, compiled=True).kind == "op"
