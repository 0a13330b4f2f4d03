"""Attention over packed rows: closed-form block masks, kernels against the exact loop, fused siblings, whole-graph tracing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from draftsmith.target import Target
from draftsmith.target_attention import DocumentLoop, Scores, attach, packed_attention
from draftsmith.target_fuse import fuse_siblings
from draftsmith.target_kernels import FlexBlocks, block_tables, document_starts
from draftsmith.target_proof import survey
from target_families import HIDDEN, VOCAB, save_family

CPU = torch.device("cpu")


def numbers(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.full((n,), 3 + i) for i, n in enumerate(lengths)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([None, 1, 5, 128, 200]))
def test_block_tables_equal_torchs_own(lengths, window):
    documents = numbers(lengths)
    starts, tokens = document_starts(documents), len(documents)

    def rule(batch, head, query, key):
        seen = (documents[query] == documents[key]) & (key <= query)
        return seen & (query - key < window) if window else seen

    kernel = FlexBlocks(tokens, {window}, CPU)
    kernel.load(documents)
    ours, theirs = kernel.masks[window], create_block_mask(rule, None, None, tokens, tokens, "cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    partial, full = block_tables(starts, window)
    assert not (partial & full).any()
    for count, indices, table in (
        (theirs.kv_num_blocks, theirs.kv_indices, partial),
        (theirs.full_kv_num_blocks, theirs.full_kv_indices, full),
    ):
        for row in range(len(table)):
            # Torch counts a tile that reaches past the row's end as partial; both give the same result.
            if (row + 1) * 128 <= tokens:
                want = sorted(indices[0, 0, row, : count[0, 0, row]].tolist())
                assert table[row].nonzero()[:, 0].tolist() == want


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_equals_the_loop(window, softcap, sinks):
    torch.manual_seed(0)
    lengths = [61, 140, 3, 52]
    q, k, v = torch.randn(256, 4, 16), torch.randn(256, 2, 16), torch.randn(256, 2, 8)
    scores = Scores(0.3, window, softcap, torch.randn(4) if sinks else None)
    results = []
    for kernel in (DocumentLoop(), FlexBlocks(256, {window}, CPU)):
        kernel.load(numbers(lengths))
        results.append(kernel.attend(q, k, v, scores))
    assert results[0].shape == (256, 4, 8)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_unknown_keywords_and_masks_are_errors():
    module = torch.nn.Module()
    kernel = DocumentLoop()
    kernel.load(torch.zeros(5, dtype=torch.int64))
    module.packed_kernel = kernel
    q = torch.randn(1, 2, 5, 8)
    out, weights = packed_attention(
        module, q, q, q, None, scaling=0.5, sliding_window=None, position_ids=torch.zeros(1)
    )
    assert out.shape == (1, 5, 2, 8) and weights is None
    with pytest.raises(TypeError, match="position_bias"):
        packed_attention(module, q, q, q, None, position_bias=torch.zeros(1))
    with pytest.raises(TypeError, match="mask"):
        packed_attention(module, q, q, q, torch.zeros(1, 1, 5, 5))
    with pytest.raises(TypeError, match="mask"):
        packed_attention(module, q, q, q, None, is_causal=False)
    with pytest.raises(TypeError, match="dropout"):
        packed_attention(module, q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_fused_and_traced_as_one_graph(family, tmp_path):
    """The forward that CUDA captures: fused siblings, block masks, no graph break, boundaries as data."""
    save_family(family, tmp_path)
    target = Target.load(tmp_path, (0, 2, 4), torch.float32, CPU)
    lengths = [40, 70, 18]
    ids = torch.randint(3, VOCAB, (128,), generator=torch.Generator().manual_seed(0))
    first = (torch.cat([torch.arange(n) for n in lengths]), numbers(lengths))
    second = (torch.arange(128), torch.zeros(128, dtype=torch.int64))
    want = [torch.empty(128, 3 * HIDDEN) for _ in range(2)]
    for out, (positions, documents) in zip(want, (first, second), strict=True):
        target.prefill(ids, positions, documents, out)

    kernel = FlexBlocks(128, survey(target.decoder, target.forward, 5).windows, CPU)
    attach(target.decoder, kernel)
    assert fuse_siblings(target.decoder) == (5 if family == "qwen3_moe" else 10)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    traced = torch.compile(target.forward, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for out, (positions, documents) in zip(want, (first, second), strict=True):
            kernel.load(documents)
            torch.testing.assert_close(torch.cat(traced(ids[None], positions[None]), -1), out, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    if family == "qwen3":
        linears = [n for n in graphs[0].graph.nodes if n.target in (torch.nn.functional.linear, torch._C._nn.linear)]
        assert len(linears) == 5 * 4  # qkv, o, gate and up, down
