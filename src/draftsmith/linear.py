"""A linear layer whose weight gradient is added straight into a float32 buffer by the GEMM that computes it.

Autograd would write a gradient in the compute dtype, read it again and add it to the float32 sum: two more passes over
every weight and one rounding more. Here the sum is the GEMM's own accumulator, so G micro-steps round nothing to bf16.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.fused import swiglu, swiglu_backward


class Linear(nn.Linear):
    """No bias. With `gradient` set ([out, in] float32), backward adds to it and autograd sees no weight gradient."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.gradient: Tensor | None = None

    def forward(self, x: Tensor, first_row: int = 0) -> Tensor:
        """x [..., in] -> [..., out - first_row]: the layer, or only its output rows from `first_row` on."""
        if self.gradient is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight[first_row:])
        return _AccumulatingLinear.apply(x, self.weight, self.gradient, first_row)


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gradient, first_row):
        ctx.save_for_backward(x, weight)
        # Not a saved tensor: autograd refuses those that changed since, and changing it is the point.
        ctx.gradient, ctx.first_row = gradient, first_row
        return F.linear(x, weight[first_row:])

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        add_weight_gradient(ctx.gradient, grad_out, x, ctx.first_row)
        grad_x = grad_out @ weight[ctx.first_row :] if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


class GatedLinear(Linear):
    """SwiGLU and the projection after it: silu(gate) * up, times the weight. Training saves gate and up alone."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2 * in], gate then up -> [..., out]."""
        if self.gradient is None or not torch.is_grad_enabled() or not gate_up.is_cuda:
            gate, up = gate_up.chunk(2, dim=-1)
            return super().forward(F.silu(gate) * up)
        return _GatedLinear.apply(gate_up, self.weight, self.gradient)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight, gradient):
        ctx.save_for_backward(gate_up, weight)
        ctx.gradient = gradient
        h = swiglu(gate_up.flatten(0, -2))
        return F.linear(h, weight).unflatten(0, gate_up.shape[:-1])

    @staticmethod
    def backward(ctx, grad_out):
        gate_up, weight = ctx.saved_tensors
        grad_out = grad_out.flatten(0, -2)
        grad, h = swiglu_backward(grad_out @ weight, gate_up.flatten(0, -2))
        add_weight_gradient(ctx.gradient, grad_out, h, 0)
        return grad.view(gate_up.shape), None, None


@torch.library.custom_op("draftsmith::add_weight_gradient", mutates_args=("gradient",))
def add_weight_gradient(gradient: Tensor, grad_out: Tensor, x: Tensor, first_row: int) -> None:
    """gradient[first_row:] += grad_out.T @ x, in float32. grad_out [..., out - first_row], x [..., in], any float dtype."""
    part = gradient[first_row:]
    rows, columns = grad_out.flatten(0, -2).T, x.flatten(0, -2)
    if x.dtype == gradient.dtype:
        part.addmm_(rows, columns)
    elif x.is_cuda:
        torch.ops.aten.addmm.dtype_out(part, rows, columns, torch.float32, out=part)
    else:
        part.addmm_(rows.float(), columns.float())


@add_weight_gradient.register_fake
def _(gradient, grad_out, x, first_row):
    return None
