"""One attention function for packed rows, registered with transformers under the name PACKED.

Every document of a row [1, T] attends causally to itself alone; boundaries come from the `Packing` that `attach` put on
the modules, since not every family hands keywords through.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PACKED = "draftsmith_packed"
# Keywords that families hand through and that say nothing about the scores.
IGNORED = frozenset(
    "position_ids use_cache cache_position output_attentions output_hidden_states output_router_logits return_dict "
    "past_key_values cache".split()
)


class Packing:
    """Document boundaries of the row that is being prefilled."""

    def __init__(self) -> None:
        self.edges: list[int] = []  # row positions where documents start, and T

    def load(self, documents: Tensor) -> None:
        starts = (torch.diff(documents).nonzero()[:, 0] + 1).tolist()
        self.edges = [0, *starts, documents.numel()]


def attach(model: nn.Module, packing: Packing) -> None:
    """Make `packing` known to every module that may call the attention function."""
    for module in model.modules():
        module.packing = packing


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [1, h, T, d], key [1, g, T, d], value [1, g, T, dv] -> ([1, T, h, dv], None)."""
    unknown = {k for k, v in others.items() if v is not None} - IGNORED
    if unknown or attention_mask is not None or is_causal is False or dropout:
        raise TypeError(f"{type(module).__name__} asks its attention for {sorted(unknown) or 'a mask of its own'}")
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for start, end in pairwise(module.packing.edges):
        part = (x[:, :, start:end] for x in (query, key, value))
        out[:, start:end] = _document(*part, scaling, sliding_window, softcap, s_aux).transpose(1, 2)
    return out, None


def _document(q: Tensor, k: Tensor, v: Tensor, scaling, window, softcap, sinks) -> Tensor:
    """Causal attention of one document, [1, h, n, dv]."""
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    if softcap is None and sinks is None:
        if window is None or window >= length:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=group > 1)
        mask = _causal(length, window, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=group > 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)).float() * (scaling if scaling is not None else q.shape[3] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_causal(length, window, q.device), float("-inf"))
    if sinks is not None:  # one more column that takes probability and gives no value
        column = sinks.float().reshape(1, -1, 1, 1).expand(-1, -1, length, 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(-1).to(v.dtype) @ v


def _causal(length: int, window: int | None, device: torch.device) -> Tensor:
    """[n, n] bool: key <= query, and query - key < window."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def register() -> None:
    """Make PACKED known to transformers. No mask function goes with it: models then build no mask and hand None on."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
