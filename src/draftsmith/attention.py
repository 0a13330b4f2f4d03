"""Draft-block attention over a packed row: each block sees the context strictly before its anchor, and itself.

Contract of every implementation (paper section 3; spec 1.5): the query in slot k of the block with anchor a sees
context rows t with start <= t < a, where start is the first row of the anchor's document, and the slots of its own
block: all of them in a full layer, slots <= k in a sliding layer, where the window also asks a + k - t < W.
Shapes: q [A*B, h, d], k and v of the block [A*B, g, d], k and v of the context [T, g, d], anchors and starts [A],
both ascending -> [A*B, h, d].

    reference   SDPA with a boolean mask; reads anchors on the host. CPU, eager
    op          one opaque operator: the reference on CPU, Triton kernels of this mask on CUDA. Compiled, graphed
    flex        flex_attention with a closed-form BlockMask (attention_flex.py). CUDA shapes that the kernels do not know
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafters.dflash import Attend, DFlashShape

if TYPE_CHECKING:
    from draftsmith.attention_triton import Tiles

Kind = Literal["reference", "op", "flex"]
CHUNK_QUERIES = 128  # block tokens that share one SDPA call on CPU
# A chunk's context is rounded out to whole multiples: oneDNN keeps a compiled kernel for every shape it meets in bfloat16,
# up to 1,024 of them, which took 700 MiB over 300 steps of the demo.
GRAIN = 64


@dataclass(frozen=True)
class BlockAttention:
    """One implementation, bound to a drafter's shape. `tiles` are the Triton kernels' sizes, None elsewhere."""

    shape: DFlashShape
    kind: Kind
    tiles: "Tiles | None" = None

    @classmethod
    def choose(
        cls, shape: DFlashShape, device: torch.device, dtype: torch.dtype, compiled: bool, kind: Kind | None = None
    ) -> "BlockAttention":
        """`kind`, or what suits the device. In a compiled region nothing may read tensors on the host, so there the CPU
        takes the operator."""
        if device.type != "cuda":
            return cls(shape, kind or ("op" if compiled else "reference"))
        from draftsmith.attention_triton import choose_tiles, supports

        fits = supports(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
        kind = kind or ("op" if dtype.itemsize == 2 and fits else "flex")
        return cls(shape, kind, choose_tiles(device) if kind == "op" else None)

    def over(self, anchors: Tensor, starts: Tensor, tokens: int) -> Attend:
        """The layers' `attend` for one unit of `tokens` context rows. What layers share (masks, tables) is made here, once."""
        B, windows = self.shape.block_size, self.shape.windows
        if self.kind == "reference":
            return lambda layer, *qkv: reference_attention(*qkv, anchors, starts, B, windows[layer])
        if self.kind == "flex":
            from draftsmith.attention_flex import flex_over

            return flex_over(anchors, starts, tokens, self.shape)
        anchors, starts = anchors.int(), starts.int()
        tables = {w: self._tables(anchors, starts, tokens, w or 0) for w in dict.fromkeys(windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
            window = windows[layer]
            return block_attention(
                q, k, v, context_k, context_v, anchors, starts, *tables[window], B, window or 0
            )[0]  # fmt: skip

        return attend

    def _tables(self, anchors: Tensor, starts: Tensor, tokens: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, rows of the backward pass, keys): the kernels' work lists; empty where the reference does the work."""
        if self.tiles is None:
            return (anchors.new_empty(0),) * 3
        from draftsmith.attention_plan import key_plan, row_plan
        from draftsmith.attention_triton import blocks_per_tile

        t, s = self.tiles, self.shape
        blocks = blocks_per_tile(s.num_heads, s.num_kv_heads, s.block_size)
        rows, back = (row_plan(anchors, starts, s.block_size, window, blocks, n) for n in (t.keys, t.back_keys))
        group = s.num_heads // s.num_kv_heads
        return rows, back, key_plan(anchors, starts, tokens, s.block_size, window, group, t.tile_keys, t.step_rows)


@torch.library.custom_op("draftsmith::block_attention", mutates_args=())
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, anchors: Tensor, starts: Tensor,
    rows: Tensor, back: Tensor, keys: Tensor, block_size: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [A*B, h, d], log-sum-exp): `window` 0 is full attention, tables are BlockAttention's. Differentiable."""
    if q.is_cuda:
        from draftsmith.attention_triton import choose_tiles, forward

        tiles = choose_tiles(q.device)
        return forward(q, k, v, context_k, context_v, anchors, starts, rows, block_size, window, tiles)
    out = reference_attention(q, k, v, context_k, context_v, anchors, starts, block_size, window or None)
    return out, q.new_empty(0)


@block_attention.register_fake
def _(q, k, v, context_k, context_v, anchors, starts, rows, back, keys, block_size, window):
    if not q.is_cuda:
        return q.new_empty(q.shape), q.new_empty(0)
    packed = q.shape[0] * q.shape[1] // k.shape[1]
    return q.new_empty(q.shape), q.new_empty((k.shape[1], -(-packed // 4) * 4), dtype=torch.float32)


@torch.library.custom_op("draftsmith::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, anchors: Tensor, starts: Tensor,
    back: Tensor, keys: Tensor, out: Tensor, lse: Tensor, block_size: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, context_k and context_v."""
    if q.is_cuda:
        from draftsmith.attention_triton import backward, choose_tiles

        return backward(
            grad, q, k, v, context_k, context_v, out, lse, anchors, starts, back, keys, block_size, window,
            choose_tiles(q.device),
        )  # fmt: skip
    return reference_backward(grad, q, k, v, context_k, context_v, anchors, starts, block_size, window or None)


@block_attention_backward.register_fake
def _(grad, q, k, v, context_k, context_v, anchors, starts, back, keys, out, lse, block_size, window):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, context_k, context_v))


def _save(ctx, inputs, output):
    q, k, v, context_k, context_v, anchors, starts, _, back, keys, ctx.block_size, ctx.window = inputs
    ctx.save_for_backward(q, k, v, context_k, context_v, anchors, starts, back, keys, *output)


def _backward(ctx, grad, _):
    grads = block_attention_backward(grad, *ctx.saved_tensors, ctx.block_size, ctx.window)
    return *grads, *(None,) * 7


block_attention.register_autograd(_backward, setup_context=_save)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor,
    anchors: Tensor, starts: Tensor, block_size: int, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Exact attention by SDPA with a boolean mask, per document in chunks of blocks: the CPU path and the GPU's parity
    reference. Reads anchors and starts on the host, so it is no part of a CUDA graph."""
    out = []
    for first, last, start, seen in block_chunks(anchors.tolist(), starts.tolist(), block_size, len(context_k)):
        rows = slice(first * block_size, last * block_size)
        mask = block_mask(anchors[first:last], start, seen, block_size, window)
        keys = torch.cat((context_k[seen], k[rows]))
        values = torch.cat((context_v[seen], v[rows]))
        out.append(_sdpa(q[rows], keys, values, mask))
    return torch.cat(out)


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor,
    anchors: Tensor, starts: Tensor, block_size: int, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `reference_attention` by the formula, for where autograd cannot see inside (an opaque operator)."""
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, context_k, context_v)]
    grad_q, grad_k, grad_v, grad_context_k, grad_context_v = grads
    group = q.shape[1] // k.shape[1]
    for first, last, start, seen in block_chunks(anchors.tolist(), starts.tolist(), block_size, len(context_k)):
        rows = slice(first * block_size, last * block_size)
        mask = block_mask(anchors[first:last], start, seen, block_size, window)
        keys, values = (torch.cat((c[seen], b[rows])) for c, b in ((context_k, k), (context_v, v)))
        x, d = (y[rows].unflatten(1, (-1, group)) for y in (q, grad))  # [n, g, group, d]
        scores = torch.einsum("nghd,mgd->ghnm", x, keys) * q.shape[2] ** -0.5
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        grad_p = torch.einsum("nghd,mgd->ghnm", d, values)
        grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * q.shape[2] ** -0.5
        grad_q[rows] = torch.einsum("ghnm,mgd->nghd", grad_s, keys).flatten(1, 2)
        grad_keys, grad_values = torch.einsum("ghnm,nghd->mgd", grad_s, x), torch.einsum("ghnm,nghd->mgd", p, d)
        for whole, part in ((grad_context_k, grad_keys), (grad_context_v, grad_values)):
            whole[seen] += part[: seen.stop - seen.start]
        grad_k[rows], grad_v[rows] = (part[seen.stop - seen.start :] for part in (grad_keys, grad_values))
    return grad_q, grad_k, grad_v, grad_context_k, grad_context_v


def block_mask(anchors: Tensor, start: int, seen: slice, block_size: int, window: int | None) -> Tensor:
    """Boolean [a*B, columns + a*B] for blocks of a document that starts at `start`: the context columns `seen` first, then
    the blocks' own slots."""
    device, count = anchors.device, anchors.numel()
    slot = torch.arange(block_size, device=device)
    column = torch.arange(seen.start, seen.stop, device=device)
    position = (anchors[:, None] + slot).flatten()  # [a*B] row position of each query
    context = ((column >= start) & (column < anchors[:, None])).repeat_interleave(block_size, 0)
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if window is not None:
        context = context & (position[:, None] - column < window)
        own = own.tril() & (slot[:, None] - slot < window)
    return torch.cat((context, torch.block_diag(*[own] * count)), dim=1)


def block_chunks(
    anchors: list[int], starts: list[int], block_size: int, tokens: int
) -> Iterator[tuple[int, int, int, slice]]:
    """Runs of at most CHUNK_QUERIES block tokens of one document: (first anchor, last, document start, context columns)."""
    first, blocks = 0, max(1, CHUNK_QUERIES // block_size)
    while first < len(anchors):
        last = first + 1
        while last < len(anchors) and last - first < blocks and starts[last] == starts[first]:
            last += 1
        start, end = starts[first], anchors[last - 1]
        yield first, last, start, slice(start // GRAIN * GRAIN, min(tokens, -(-end // GRAIN) * GRAIN))
        first = last


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [n, h, d], k and v [m, g, d], mask [n, m] -> [n, h, d]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
