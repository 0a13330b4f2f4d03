"""Mixtures of experts: how transformers computes them, and whether a CUDA graph can hold that.

A graph replays fixed shapes. How many tokens an expert gets depends on the data, so a graph can hold only kernels that
read those counts on the device.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

# transformers' ways that never read counts on the host, with the weights' dtypes for which that holds under torch.compile.
ON_DEVICE = {
    "grouped_mm": (torch.bfloat16,),
    "batched_mm": (torch.bfloat16, torch.float16, torch.float32),
}
OWN = "own code"
WHY_NOT = {
    "eager": "a loop over the experts that tokens chose",
    OWN: "which may loop over the experts that tokens chose",
}


@dataclass(frozen=True)
class Experts:
    """The experts of the layers that are loaded."""

    count: int
    """In one layer."""
    way: str
    """transformers' name for how they are computed; "eager" is a loop over the experts that tokens chose, OWN is code that
    transformers cannot switch."""
    dtype: torch.dtype

    def describe(self, mode: str) -> tuple[str, str]:
        """(mode to run in, sentence): graph becomes compile where a graph cannot hold the experts."""
        head = f"mixture of {self.count} experts, {self.way} in {str(self.dtype).removeprefix('torch.')}: "
        if self.dtype in ON_DEVICE.get(self.way, ()):
            return mode, head + "their shapes do not depend on the routing, so a CUDA graph can hold them"
        why = WHY_NOT.get(self.way, "when compiled, tokens are counted on the host")
        if mode not in ("graph", "reduce-overhead"):
            return mode, f"{head}{why}, so no CUDA graph could hold them; mode {mode} needs none"
        return "compile", f"{head}{why}, so no CUDA graph can hold them; runs in mode compile"


def experts_of(decoder: nn.Module) -> Experts | None:
    """None where no loaded layer has experts."""
    found = [m for n, m in decoder.named_modules() if n.rpartition(".")[2] == "experts"]
    if not found:
        return None
    experts = found[0]
    # A class that transformers can switch has these; lists of modules and quantizers' or foreign classes have not.
    switched = hasattr(experts, "is_concatenated") and hasattr(experts, "num_experts")
    way = experts.config._experts_implementation if switched else OWN
    count = experts.num_experts if switched else sum(1 for _ in experts.children())
    return Experts(count, way, next(chain(experts.parameters(), experts.buffers())).dtype)
