"""Draft-block attention on CUDA by three Triton kernels made for its mask; the contract is attention.py's.

All query heads of a key/value head share its mask, so a tile's rows are (block token, head of the group) pairs: with 4
heads a group and blocks of 16, 128 rows are only two blocks, whose contexts differ little. Rows of a tile see one run
of context tokens, full in the middle and masked at its ends, and the blocks of the tile itself. The runs come from
attention_plan.py. No atomics: results are reproducible bitwise.

    forward         one program a row tile: out and log2-sum-exp
    backward rows   one program a row tile: dq, dk and dv of the blocks, and delta = rowsum(out * dout)
    backward keys   one program a tile of context tokens: dk and dv of the context
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634
MAX_ROWS = 128  # rows of a tile: the tensor cores want 64 or 128, registers end there


class Tiles(NamedTuple):
    """Compile-time sizes of the kernels. Numbers of the H200; smaller ones where shared memory is short."""

    keys: int  # context tokens at a time in forward and backward rows
    row_warps: int
    row_stages: int
    back_keys: int  # context tokens at a time in backward rows
    back_stages: int
    tile_keys: int  # context tokens of one program of backward keys
    step_rows: int  # rows at a time there
    key_warps: int
    key_stages: int


def choose_tiles(device: torch.device) -> Tiles:
    """By the shared memory that a block may use: 227 KiB on H100/H200, 163 on A100, 99 on RTX 30/40 and A6000."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024
    if shared >= 200:
        return Tiles(64, 8, 4, 64, 3, 128, 64, 8, 3)
    if shared >= 160:
        return Tiles(64, 8, 2, 32, 2, 128, 32, 8, 2)
    return Tiles(32, 8, 2, 16, 1, 64, 32, 8, 1)


def supports(heads: int, kv_heads: int, head_dim: int, block_size: int) -> bool:
    """A block with all heads of a group has to fit one tile, and the head size has to be one of the kernels'."""
    group = heads // kv_heads
    return group * block_size <= MAX_ROWS and group & (group - 1) == 0 and head_dim in (16, 32, 64, 128)


def blocks_per_tile(heads: int, kv_heads: int, block_size: int) -> int:
    return max(1, MAX_ROWS // (heads // kv_heads * block_size))


@triton.jit
def _rows(tile, ROWS: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr, BLOCKS: tl.constexpr, count):
    """(block token, head of the group, row is real) of a row tile."""
    row = tl.arange(0, ROWS)
    token = tile * (BLOCKS * B) + row // GROUP
    return token, row % GROUP, (row < BLOCKS * B * GROUP) & (token < count)


@triton.jit
def _own_mask(token, real, key, count, B: tl.constexpr, BLOCKS: tl.constexpr, tile, WINDOW: tl.constexpr):
    """[ROWS, KEYS]: which block tokens of the tile a row sees. A row that is not real sees all, so that its sum is not 0."""
    mask = (token[:, None] // B) == (key[None, :] // B)
    if WINDOW > 0:
        back = (token % B)[:, None] - (key % B)[None, :]
        mask = mask & (back >= 0) & (back < WINDOW)
    mask = mask & ((key < count) & (key < (tile + 1) * BLOCKS * B))[None, :]
    return mask | (real[:, None] == 0)


@triton.jit
def _context_mask(anchor, start, slot, token, WINDOW: tl.constexpr):
    """[ROWS, KEYS] for context tokens `token`."""
    mask = (token[None, :] < anchor[:, None]) & (token[None, :] >= start[:, None])
    if WINDOW > 0:
        mask = mask & ((anchor + slot)[:, None] - token[None, :] < WINDOW)
    return mask


@triton.jit
def _softmax_step(acc, m, l, s, v, PRECISION: tl.constexpr):
    """One step of the running softmax; `s` is scaled to base 2."""
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, ck_desc, cv_desc, out_ptr, lse_ptr, anchors_ptr, starts_ptr, plan_ptr,
    q_stride, k_stride, v_stride, row_stride, count, scale,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    BLOCKS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, g = tl.program_id(0), tl.program_id(1)
    token, head, real = _rows(tile, ROWS, GROUP, B, BLOCKS, count)
    d = tl.arange(0, D)
    q_at = (token * q_stride + (g * GROUP + head) * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0)
    key = tile * BLOCKS * B + tl.arange(0, OWN)
    own_k = tl.load(k_ptr + (key * k_stride + g * D)[:, None] + d[None, :], mask=(key < count)[:, None], other=0.0)
    own_v = tl.load(v_ptr + (key * v_stride + g * D)[:, None] + d[None, :], mask=(key < count)[:, None], other=0.0)
    # The own block comes first: every row sees something there, so the running maximum is finite from then on.
    own_s = tl.dot(q, own_k.T, input_precision=PRECISION) * scale
    own_s = tl.where(_own_mask(token, real, key, count, B, BLOCKS, tile, WINDOW), own_s, float("-inf"))
    m = tl.max(own_s, 1)
    own_p = tl.exp2(own_s - m[:, None])
    l = tl.sum(own_p, 1)
    acc = tl.dot(own_p.to(own_v.dtype), own_v, input_precision=PRECISION)

    low = tl.load(plan_ptr + tile * 4)
    before = low + tl.load(plan_ptr + tile * 4 + 1) * KEYS
    full = before + tl.load(plan_ptr + tile * 4 + 2) * KEYS
    after = full + tl.load(plan_ptr + tile * 4 + 3) * KEYS
    step = tl.arange(0, KEYS)
    anchor = tl.load(anchors_ptr + token // B, mask=real, other=0)
    start = tl.load(starts_ptr + token // B, mask=real, other=0)
    for part in tl.static_range(2):
        masked_low = low if part == 0 else full
        masked_high = before if part == 0 else after
        for at in range(masked_low, masked_high, KEYS):
            t = at + step
            k = ck_desc.load([at, g * D])
            v = cv_desc.load([at, g * D])
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale
            s = tl.where(_context_mask(anchor, start, token % B, t, WINDOW), s, float("-inf"))
            acc, m, l = _softmax_step(acc, m, l, s, v, PRECISION)
        if part == 0:
            for at in range(before, full, KEYS):
                k = ck_desc.load([at, g * D])
                v = cv_desc.load([at, g * D])
                s = tl.dot(q, k.T, input_precision=PRECISION) * scale
                acc, m, l = _softmax_step(acc, m, l, s, v, PRECISION)

    out_at = (token * HEADS + g * GROUP + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + out_at, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(lse_ptr + g * row_stride + token * GROUP + head, m + tl.log2(l), mask=real)


@triton.jit
def _backward_rows(
    q_ptr, k_ptr, v_ptr, ck_desc, cv_desc, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    anchors_ptr, starts_ptr, plan_ptr, q_stride, k_stride, v_stride, row_stride, count, scale, scale2,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    BLOCKS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, g = tl.program_id(0), tl.program_id(1)
    token, head, real = _rows(tile, ROWS, GROUP, B, BLOCKS, count)
    d = tl.arange(0, D)
    q = tl.load(
        q_ptr + (token * q_stride + (g * GROUP + head) * D)[:, None] + d[None, :], mask=real[:, None], other=0.0
    )
    out_at = (token * HEADS + g * GROUP + head)[:, None] * D + d[None, :]
    do = tl.load(do_ptr + out_at, mask=real[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=real[:, None], other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    row_at = g * row_stride + token * GROUP + head
    tl.store(delta_ptr + row_at, delta, mask=real)
    lse = tl.load(lse_ptr + row_at, mask=real, other=float("inf"))  # p = 0 in rows that are not real

    key = tile * BLOCKS * B + tl.arange(0, OWN)
    mine = (key < count) & (key < (tile + 1) * BLOCKS * B)
    own_k = tl.load(k_ptr + (key * k_stride + g * D)[:, None] + d[None, :], mask=mine[:, None], other=0.0)
    own_v = tl.load(v_ptr + (key * v_stride + g * D)[:, None] + d[None, :], mask=mine[:, None], other=0.0)
    own_s = tl.dot(q, own_k.T, input_precision=PRECISION) * scale2
    own = _own_mask(token, real, key, count, B, BLOCKS, tile, WINDOW)
    own_p = tl.where(own, tl.exp2(own_s - lse[:, None]), 0.0)
    dv = tl.dot(own_p.to(do.dtype).T, do, input_precision=PRECISION)
    own_ds = (own_p * (tl.dot(do, own_v.T, input_precision=PRECISION) - delta[:, None])).to(q.dtype)
    dk = tl.dot(own_ds.T, q, input_precision=PRECISION) * scale
    own_at = (key * (HEADS // GROUP) + g)[:, None] * D + d[None, :]
    tl.store(dv_ptr + own_at, dv.to(dv_ptr.dtype.element_ty), mask=mine[:, None])
    tl.store(dk_ptr + own_at, dk.to(dk_ptr.dtype.element_ty), mask=mine[:, None])
    dq = tl.dot(own_ds, own_k, input_precision=PRECISION)

    low = tl.load(plan_ptr + tile * 4)
    before = low + tl.load(plan_ptr + tile * 4 + 1) * KEYS
    full = before + tl.load(plan_ptr + tile * 4 + 2) * KEYS
    after = full + tl.load(plan_ptr + tile * 4 + 3) * KEYS
    step = tl.arange(0, KEYS)
    anchor = tl.load(anchors_ptr + token // B, mask=real, other=0)
    start = tl.load(starts_ptr + token // B, mask=real, other=0)
    for part in tl.static_range(2):
        masked_low = low if part == 0 else full
        masked_high = before if part == 0 else after
        for at in range(masked_low, masked_high, KEYS):
            t = at + step
            k = ck_desc.load([at, g * D])
            v = cv_desc.load([at, g * D])
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale2
            p = tl.where(_context_mask(anchor, start, token % B, t, WINDOW), tl.exp2(s - lse[:, None]), 0.0)
            ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if part == 0:
            for at in range(before, full, KEYS):
                k = ck_desc.load([at, g * D])
                v = cv_desc.load([at, g * D])
                s = tl.dot(q, k.T, input_precision=PRECISION) * scale2
                p = tl.exp2(s - lse[:, None])
                ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + out_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _backward_keys(
    q_desc, ck_desc, cv_desc, do_desc, lse_desc, delta_desc, dck_ptr, dcv_ptr, anchors_ptr, starts_ptr, plan_ptr,
    count, tokens, scale, scale2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    g, place = tl.program_id(0), tl.program_id(1)
    plan_ptr += place * 5
    tile = tl.load(plan_ptr) * KEYS
    t = tile + tl.arange(0, KEYS)
    low = tl.load(plan_ptr + 1)
    before = low + tl.load(plan_ptr + 2) * STEP
    full = before + tl.load(plan_ptr + 3) * STEP
    after = full + tl.load(plan_ptr + 4) * STEP
    d = tl.arange(0, D)
    step = tl.arange(0, STEP)
    inside = (t < tokens)[:, None]
    k = ck_desc.load([tile, g * D])
    v = cv_desc.load([tile, g * D])
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    for part in tl.static_range(2):
        masked_low = low if part == 0 else full
        masked_high = before if part == 0 else after
        for at in range(masked_low, masked_high, STEP):
            token = (at + step) // GROUP
            real = token < count
            q = q_desc.load([at // GROUP, g * GROUP, 0]).reshape(STEP, D)
            do = do_desc.load([at // GROUP, g * GROUP, 0]).reshape(STEP, D)
            lse = lse_desc.load([g, at]).reshape(STEP)
            delta = delta_desc.load([g, at]).reshape(STEP)
            anchor = tl.load(anchors_ptr + token // B, mask=real, other=0)
            start = tl.load(starts_ptr + token // B, mask=real, other=0)
            seen = (t[:, None] < anchor[None, :]) & (t[:, None] >= start[None, :])
            if WINDOW > 0:
                seen = seen & ((anchor + token % B)[None, :] - t[:, None] < WINDOW)
            s = tl.dot(k, q.T, input_precision=PRECISION) * scale2
            p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if part == 0:
            for at in range(before, full, STEP):
                q = q_desc.load([at // GROUP, g * GROUP, 0]).reshape(STEP, D)
                do = do_desc.load([at // GROUP, g * GROUP, 0]).reshape(STEP, D)
                lse = lse_desc.load([g, at]).reshape(STEP)
                delta = delta_desc.load([g, at]).reshape(STEP)
                s = tl.dot(k, q.T, input_precision=PRECISION) * scale2
                p = tl.exp2(s - lse[None, :])
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    at = (t * (HEADS // GROUP) + g)[:, None] * D + d[None, :]
    tl.store(dck_ptr + at, (dk * scale).to(dck_ptr.dtype.element_ty), mask=inside)
    tl.store(dcv_ptr + at, dv.to(dcv_ptr.dtype.element_ty), mask=inside)


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _common(q: Tensor, k: Tensor, block_size: int, window: int) -> dict:
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return {
        "GROUP": heads // kv_heads,
        "HEADS": heads,
        "D": head_dim,
        "B": block_size,
        "WINDOW": window,
        "PRECISION": precision,
    }


def _row_sizes(q: Tensor, k: Tensor, block_size: int) -> dict:
    blocks = blocks_per_tile(q.shape[1], k.shape[1], block_size)
    own = max(16, _next_power(blocks * block_size))
    return {
        "BLOCKS": blocks,
        "OWN": own,
        "ROWS": max(16, _next_power(blocks * block_size * (q.shape[1] // k.shape[1]))),
    }


def _tiles_of(context: tuple[Tensor, Tensor], tokens: int) -> list[TensorDescriptor]:
    """Descriptors of [T, g, d] keys and values, seen as [T, g * d], for the copy engine: one head, `tokens` tokens a load."""
    head_dim = context[0].shape[2]
    return [
        TensorDescriptor(x, [x.shape[0], x.shape[1] * head_dim], [x.stride(0), 1], [tokens, head_dim]) for x in context
    ]


def _packed(x: Tensor) -> Tensor:
    """Heads have to lie side by side, rows at multiples of 16 bytes; a slice of a wider projection is fine as it is."""
    good = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) * x.element_size() % 16 == 0
    return x if good else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, anchors: Tensor, starts: Tensor,
    plan: Tensor, block_size: int, window: int, tiles: Tiles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [N, h, d], log2-sum-exp [g, N * h/g] float32). `plan` is `row_plan` with steps of `tiles.keys`; window 0: none."""
    q, k, v, context_k, context_v = map(_packed, (q, k, v, context_k, context_v))
    count, heads, head_dim = q.shape
    out = torch.empty((count, heads, head_dim), dtype=q.dtype, device=q.device)
    rows = -(-count * heads // k.shape[1] // 4) * 4  # the copy engine wants strides of 16 bytes
    lse = torch.empty((k.shape[1], rows), dtype=torch.float32, device=q.device)
    _forward[(len(plan), k.shape[1])](
        q, k, v, *_tiles_of((context_k, context_v), tiles.keys), out, lse, anchors, starts, plan,
        q.stride(0), k.stride(0), v.stride(0), rows, count, head_dim**-0.5 * LOG2E,
        KEYS=tiles.keys, **_row_sizes(q, k, block_size), **_common(q, k, block_size, window),
        num_warps=tiles.row_warps, num_stages=tiles.row_stages,
    )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, out: Tensor, lse: Tensor,
    anchors: Tensor, starts: Tensor, rows: Tensor, keys: Tensor, block_size: int, window: int, tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, context_k, context_v, contiguous. `rows` is `row_plan` with steps of `tiles.back_keys`."""
    q, k, v, context_k, context_v = map(_packed, (q, k, v, context_k, context_v))
    grad_out = grad_out.contiguous()
    dq, dk, dv, dck, dcv = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, context_k, context_v)
    )
    delta = torch.empty_like(lse)
    count, heads, head_dim = q.shape
    scale = head_dim**-0.5
    common = _common(q, k, block_size, window)
    _backward_rows[(len(rows), k.shape[1])](
        q, k, v, *_tiles_of((context_k, context_v), tiles.back_keys), out, grad_out, lse, delta, dq, dk, dv,
        anchors, starts, rows, q.stride(0), k.stride(0), v.stride(0), lse.stride(0), count, scale, scale * LOG2E,
        KEYS=tiles.back_keys, **_row_sizes(q, k, block_size), **common,
        num_warps=tiles.row_warps, num_stages=tiles.back_stages,
    )  # fmt: skip
    group, step = heads // k.shape[1], tiles.step_rows
    packed = [TensorDescriptor.from_tensor(x, [step // group, group, head_dim]) for x in (q, grad_out)]
    sums = [TensorDescriptor.from_tensor(x, [1, step]) for x in (lse, delta)]
    _backward_keys[(k.shape[1], len(keys))](
        packed[0], *_tiles_of((context_k, context_v), tiles.tile_keys), packed[1], *sums, dck, dcv,
        anchors, starts, keys, count, len(context_k), scale, scale * LOG2E,
        KEYS=tiles.tile_keys, STEP=tiles.step_rows, **common, num_warps=tiles.key_warps, num_stages=tiles.key_stages,
    )  # fmt: skip
    return dq, dk, dv, dck, dcv
