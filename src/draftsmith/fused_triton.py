"""Two pieces of a draft layer as Triton kernels, forward and backward: per-head norm with rotation, and SwiGLU.

Both only move memory, and a compiler reads their inputs two or three times (halves that are put side by side are both
evaluated everywhere): 12 ms of a 262 ms step at Qwen3-8B's shape. The references are the plain forms in fused.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, count, x_stride, out_stride, table_stride, eps,
    FIRST: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[:, head] = rotate(norm(x[:, FIRST + head]) * weight) for one run of heads, a tile of ROWS tokens a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    inside = (row < count)[:, None]
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    at = row.to(tl.int64)[:, None] * x_stride + (FIRST + head) * D + d
    left = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
    left = left * r * tl.load(weight_ptr + d).to(tl.float32)
    right = right * r * tl.load(weight_ptr + HALF + d).to(tl.float32)
    table = row[:, None] * table_stride + d
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    to = row.to(tl.int64)[:, None] * out_stride + head * D + d
    tl.store(out_ptr + to, (left * cos - right * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + to + HALF, (right * cos + left * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_backward(
    grad_ptr, x_ptr, dx_ptr, weight_ptr, partial_ptr, cos_ptr, sin_ptr, count, grad_stride, x_stride, dx_stride,
    table_stride, eps, FIRST: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx[:, FIRST + head], and this tile's share of the weight's gradient in partial[tile, head]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < count)[:, None]
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    table = row[:, None] * table_stride + d
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * grad_stride + head * D + d
    gl = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gr = tl.load(grad_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    dl, dr = gl * cos + gr * sin, gr * cos - gl * sin
    at = row.to(tl.int64)[:, None] * x_stride + (FIRST + head) * D + d
    left = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
    left, right = left * r, right * r
    share = partial_ptr + (tile * tl.num_programs(1) + head) * D + tl.arange(0, HALF)
    tl.store(share, tl.sum(dl * left, 0))
    tl.store(share + HALF, tl.sum(dr * right, 0))
    dl = dl * tl.load(weight_ptr + d).to(tl.float32)
    dr = dr * tl.load(weight_ptr + HALF + d).to(tl.float32)
    mean = ((tl.sum(dl * left, 1) + tl.sum(dr * right, 1)) / D)[:, None]
    to = row.to(tl.int64)[:, None] * dx_stride + (FIRST + head) * D + d
    tl.store(dx_ptr + to, (r * (dl - left * mean)).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + to + HALF, (r * (dr - right * mean)).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(x_ptr, h_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + at, mask=inside).to(tl.float32)
    tl.store(h_ptr + row * width + at, (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad_ptr, x_ptr, dx_ptr, h_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + at, mask=inside).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    d_gate = grad * up * (s + silu * (1 - s))
    tl.store(dx_ptr + row * 2 * width + at, d_gate.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + (row * 2 + 1) * width + at, (grad * silu).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(h_ptr + row * width + at, (silu * up).to(h_ptr.dtype.element_ty), mask=inside)


ROWS, BLOCK = 32, 2048


def rotate(x: Tensor, first: int, heads: int, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [N, all heads, d] contiguous heads, cos and sin [N, d] -> [N, heads, d] of heads first..first+heads."""
    count, _, D = x.shape
    out = torch.empty((count, heads, D), dtype=x.dtype, device=x.device)
    _rotate[(triton.cdiv(count, ROWS), heads)](
        x, out, weight, cos, sin, count, x.stride(0), out.stride(0), cos.stride(0), eps, FIRST=first, D=D, ROWS=ROWS
    )
    return out


def rotate_backward(
    grad: Tensor, x: Tensor, dx: Tensor, first: int, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Fills dx[:, first : first + heads] and returns the gradient of `weight` [d]."""
    grad = grad.contiguous()
    count, heads, D = grad.shape
    tiles = triton.cdiv(count, ROWS)
    partial = torch.empty((tiles * heads, D), dtype=torch.float32, device=x.device)
    _rotate_backward[(tiles, heads)](
        grad, x, dx, weight, partial, cos, sin, count, grad.stride(0), x.stride(0), dx.stride(0), cos.stride(0), eps,
        FIRST=first, D=D, ROWS=ROWS,
    )  # fmt: skip
    return partial.sum(0).to(weight.dtype)


def swiglu(x: Tensor) -> Tensor:
    """[N, 2I] contiguous, gate then up -> silu(gate) * up [N, I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    h = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _swiglu[(rows, triton.cdiv(width, BLOCK))](x, h, width, BLOCK=BLOCK, num_warps=8)
    return h


def swiglu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """grad [N, I] contiguous -> (gradient of x [N, 2I], silu(gate) * up once more [N, I])."""
    rows, width = x.shape[0], x.shape[1] // 2
    dx, h = torch.empty_like(x), torch.empty_like(grad)
    _swiglu_backward[(rows, triton.cdiv(width, BLOCK))](grad, x, dx, h, width, BLOCK=BLOCK, num_warps=8)
    return dx, h
