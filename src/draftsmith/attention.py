"""Draft-block attention over a packed row: each block sees the context strictly before its anchor, and itself.

Contract of every implementation (paper section 3; spec 1.5): the query in slot k of the block with anchor a sees
context rows t with start <= t < a, where start is the first row of the anchor's document, and the slots of its own
block: all of them in a full layer, slots <= k in a sliding layer, where the window also asks a + k - t < W.
Shapes: q [A*B, h, d], k and v of the block [A*B, g, d], k and v of the context [T, g, d], anchors and starts [A],
both ascending -> [A*B, h, d].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_QUERIES = 128  # block tokens that share one SDPA call on CPU


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor,
    anchors: Tensor, starts: Tensor, block_size: int, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Exact attention by SDPA with a boolean mask, per document in chunks of blocks: the CPU path and the GPU's parity
    reference. Reads anchors and starts on the host, so it is no part of a CUDA graph."""
    out = []
    for first, last, start, end in _chunks(anchors.tolist(), starts.tolist(), max(1, CHUNK_QUERIES // block_size)):
        rows = slice(first * block_size, last * block_size)
        mask = block_mask(anchors[first:last], start, end, block_size, window)
        keys = torch.cat((context_k[start:end], k[rows]))
        values = torch.cat((context_v[start:end], v[rows]))
        out.append(_sdpa(q[rows], keys, values, mask))
    return torch.cat(out)


def block_mask(anchors: Tensor, start: int, end: int, block_size: int, window: int | None) -> Tensor:
    """Boolean [a*B, (end - start) + a*B] for blocks of one document: context columns first, then the blocks' own slots."""
    device, count = anchors.device, anchors.numel()
    slot = torch.arange(block_size, device=device)
    column = torch.arange(start, end, device=device)
    position = (anchors[:, None] + slot).flatten()  # [a*B] row position of each query
    context = (column < anchors[:, None]).repeat_interleave(block_size, 0)
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if window is not None:
        context = context & (position[:, None] - column < window)
        own = own.tril() & (slot[:, None] - slot < window)
    return torch.cat((context, torch.block_diag(*[own] * count)), dim=1)


def _chunks(anchors: list[int], starts: list[int], blocks: int):
    """Runs of at most `blocks` anchors of one document: (first, last, context start, context end)."""
    first = 0
    while first < len(anchors):
        last = first + 1
        while last < len(anchors) and last - first < blocks and starts[last] == starts[first]:
            last += 1
        yield first, last, starts[first], anchors[last - 1]
        first = last


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [n, h, d], k and v [m, g, d], mask [n, m] -> [n, h, d]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
