"""Norm with rotation of queries and keys, and SwiGLU, as operators that save only their inputs: kernels on CUDA.

On CPU the drafter uses plain modules and autograd (drafters/dflash.py); the `plain_` functions here are the operators'
arithmetic on any device, the reference of fused_triton.py.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def fits(x: Tensor, head_dim: int) -> bool:
    """Whether the kernels take it: CUDA, head size a power of two."""
    return x.is_cuda and head_dim & (head_dim - 1) == 0 and head_dim >= 16


@torch.library.custom_op("draftsmith::norm_rotate", mutates_args=())
def norm_rotate(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, queries + 2 * keys, d] -> (q, k, v): RMSNorm over d and rotation of q and k, v as it is. cos, sin [N, d]."""
    from draftsmith.fused_triton import rotate

    q = rotate(x, 0, queries, q_weight, cos, sin, eps) if queries else x.new_empty((x.shape[0], 0, x.shape[2]))
    k = rotate(x, queries, keys, k_weight, cos, sin, eps)
    return q, k, x[:, queries + keys :].clone(memory_format=torch.contiguous_format)


@norm_rotate.register_fake
def _(x, q_weight, k_weight, cos, sin, queries, keys, eps):
    n, _, d = x.shape
    return x.new_empty((n, queries, d)), x.new_empty((n, keys, d)), x.new_empty((n, keys, d))


@torch.library.custom_op("draftsmith::norm_rotate_backward", mutates_args=())
def norm_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, q_weight and k_weight."""
    from draftsmith.fused_triton import rotate_backward

    queries, keys = dq.shape[1], dk.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dq_weight = rotate_backward(dq, x, dx, 0, q_weight, cos, sin, eps) if queries else torch.zeros_like(q_weight)
    dk_weight = rotate_backward(dk, x, dx, queries, k_weight, cos, sin, eps)
    dx[:, queries + keys :] = dv
    return dx, dq_weight, dk_weight


@norm_rotate_backward.register_fake
def _(dq, dk, dv, x, q_weight, k_weight, cos, sin, eps):
    return x.new_empty(x.shape), torch.empty_like(q_weight), torch.empty_like(k_weight)


def _save(ctx, inputs, output):
    x, q_weight, k_weight, cos, sin, _, _, ctx.eps = inputs
    ctx.save_for_backward(x, q_weight, k_weight, cos, sin)


def _backward(ctx, dq, dk, dv):
    dx, dq_weight, dk_weight = norm_rotate_backward(dq, dk, dv, *ctx.saved_tensors, ctx.eps)
    return dx, dq_weight, dk_weight, *(None,) * 5


norm_rotate.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("draftsmith::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """[N, 2I], gate then up -> silu(gate) * up [N, I]. No gradient: linear.GatedLinear has the backward pass."""
    if x.is_cuda:
        from draftsmith import fused_triton

        return fused_triton.swiglu(x.contiguous())
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@swiglu.register_fake
def _(x):
    return x.new_empty((x.shape[0], x.shape[1] // 2))


@torch.library.custom_op("draftsmith::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """grad [N, I], x [N, 2I] -> (gradient of x, swiglu(x) once more)."""
    if x.is_cuda:
        from draftsmith import fused_triton

        return fused_triton.swiglu_backward(grad.contiguous(), x.contiguous())
    gate, up = x.float().chunk(2, -1)
    s = torch.sigmoid(gate)
    d_gate = grad * up * (s + gate * s * (1 - s))
    return torch.cat((d_gate, grad * gate * s), -1).to(x.dtype), (gate * s * up).to(x.dtype)


@swiglu_backward.register_fake
def _(grad, x):
    return x.new_empty(x.shape), grad.new_empty(grad.shape)
