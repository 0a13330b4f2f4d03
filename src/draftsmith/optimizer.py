"""Flat float32 masters of a drafter and the AdamW update over them.

The update divides by the step's denominator, clips and applies AdamW, all on the device. The plain form is torch's own
fused kernel; on CUDA everything that touches a weight (gradient, moments, master, compute copy, zeroing of the gradient)
is one pass over memory (optimizer_triton.py). Tests hold the two together.
"""

import torch
from torch import Tensor

from draftsmith.config import OptimConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.linear import Linear


class FlatParameters:
    """Masters, compute weights and gradients of a drafter as flat buffers; the module's parameters are views.

    Matrices come first, then vectors (which never decay). Matrices' gradients are added to the flat buffer by the
    backward pass itself (linear.py), vectors' by `collect`. Where the compute dtype is float32 masters and compute
    weights are one buffer.
    """

    SUMS = 4  # denominator, loss, units with a non-finite loss, stop requests

    def __init__(self, drafter: DFlash, dtype: torch.dtype, device: torch.device):
        named = sorted(drafter.named_parameters(), key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.sizes = [p.numel() for _, p in named]
        self.shapes = [p.shape for _, p in named]
        self.total = sum(self.sizes)
        self.matrices = sum(p.numel() for _, p in named if p.ndim >= 2)
        self.masters = torch.cat([p.detach().float().flatten() for _, p in named]).to(device)
        self.compute = self.masters if dtype == torch.float32 else self.masters.to(dtype)
        slots = drafter.shape.block_size - 1
        self.reduced = torch.zeros(self.total + self.SUMS + 2 + 2 * slots, device=device)  # what an all-reduce adds up
        self.gradient = self.reduced[: self.total]
        self.sums = self.reduced[self.total :]
        drafter.to(device)
        for (_, p), view in zip(named, self.views(self.compute), strict=True):
            p.data = view
        gradients = self.named(self.gradient)
        for name, module in drafter.named_modules():
            if isinstance(module, Linear):
                module.gradient = gradients[f"{name}.weight"]
        self._vectors = [(p, gradients[name]) for name, p in named if p.ndim < 2]

    def views(self, flat: Tensor) -> list[Tensor]:
        return [x.view(s) for x, s in zip(flat[: self.total].split(self.sizes), self.shapes, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self.views(flat), strict=True))

    def collect(self) -> None:
        """Add the vectors' gradients of a backward pass to the flat buffer."""
        torch._foreach_add_([view for _, view in self._vectors], [p.grad for p, _ in self._vectors])
        for p, _ in self._vectors:
            p.grad = None

    def publish(self) -> None:
        """Masters -> compute weights."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)


class AdamW:
    """Moments and step count as flat device tensors, and the update in two forms with one meaning."""

    def __init__(self, flat: FlatParameters, optim: OptimConfig):
        self.flat, self.optim = flat, optim
        device = flat.masters.device
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(flat.masters), torch.zeros_like(flat.masters)
        self.count = torch.zeros((), device=device)
        self.lr = torch.zeros((), device=device)
        self._parts = ((slice(0, flat.matrices), optim.weight_decay), (slice(flat.matrices, flat.total), 0.0))

    def plain(self, coefficient: Tensor, skipped: Tensor) -> None:
        """gradient * coefficient -> AdamW by torch's own kernel, unless `skipped` (float, 1 = skip). Gradients become 0."""
        flat, (beta1, beta2) = self.flat, self.optim.betas
        flat.gradient.mul_(coefficient)
        self.count.add_(1)
        for at, decay in self._parts:
            torch._fused_adamw_(
                [flat.masters[at]], [flat.gradient[at]], [self.exp_avg[at]], [self.exp_avg_sq[at]], [], [self.count],
                lr=self.lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=self.optim.eps, amsgrad=False,
                maximize=False, grad_scale=None, found_inf=skipped,
            )  # fmt: skip
        self.count.sub_(skipped)
        flat.publish()
        flat.gradient.zero_()

    def fused(self, coefficient: Tensor, skipped: Tensor) -> None:
        """The same as `plain` in one pass over memory, CUDA only."""
        from draftsmith.optimizer_triton import adamw_

        flat, o = self.flat, self.optim
        self.count.add_(1 - skipped)
        for at, decay in self._parts:
            adamw_(
                flat.masters[at], flat.compute[at], self.exp_avg[at], self.exp_avg_sq[at], flat.gradient[at],
                self.lr, self.count, coefficient, skipped, o.betas, o.eps, decay,
            )  # fmt: skip
