"""Sibling projections as one matmul: q, k, v and gate, up of a frozen model, by replacing modules after loading."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined(nn.Module):
    """The siblings' weights under each other, and the result for the input that is being worked on."""

    def __init__(self, linears: list[nn.Linear]):
        super().__init__()
        self.sizes = [m.out_features for m in linears]
        self.weight = nn.Parameter(torch.cat([m.weight for m in linears]), requires_grad=False)
        biased = linears[0].bias is not None
        self.bias = nn.Parameter(torch.cat([m.bias for m in linears]), requires_grad=False) if biased else None
        self.source: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()


class Sibling(nn.Module):
    """One of the joined projections. The first computes all of them, the others take their part if the input is the same."""

    def __init__(self, joined: Joined, index: int):
        super().__init__()
        self.joined, self.index = joined, index
        start = sum(joined.sizes[:index])
        self.rows = slice(start, start + joined.sizes[index])
        self.last = index == len(joined.sizes) - 1

    def forward(self, x: Tensor) -> Tensor:
        joined = self.joined
        if self.index == 0:
            joined.source, joined.parts = x, F.linear(x, joined.weight, joined.bias).split(joined.sizes, -1)
        if joined.source is not x:  # a family that feeds its siblings differently
            return F.linear(x, joined.weight[self.rows], joined.bias[self.rows] if joined.bias is not None else None)
        part = joined.parts[self.index]
        if self.last:
            joined.source, joined.parts = None, ()
        return part


def fuse_siblings(model: nn.Module) -> int:
    """Join every group of plain sibling `nn.Linear`s in place; returns how many groups. Quantised ones stay as they are."""
    count = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            found = [m for m in (getattr(parent, n, None) for n in names) if type(m) is nn.Linear]
            if len(found) != len(names) or len({(m.in_features, m.bias is None) for m in found}) != 1:
                continue
            joined = Joined(found)
            for index, name in enumerate(names):
                setattr(parent, name, Sibling(joined, index))
            count += 1
    return count
