"""One attention function for packed rows, registered with transformers under the name PACKED.

Every document of a row [1, T] attends causally to itself alone. Where documents begin is known to a `Kernel`, which
`attach` puts on the modules, since not every family hands keywords through to its attention. Families build no mask of
their own: no mask function is registered under the name, so transformers hands None on.

Shapes: q [T, h, d], k [T, g, d], v [T, g, dv] -> [T, h, dv], with h a multiple of g.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PACKED = "draftsmith_packed"
CHUNK = 512  # queries whose scores exist at once where SDPA cannot be used
# Keywords that families hand through and that do not change the scores.
IGNORED = frozenset(
    "position_ids use_cache cache_position output_attentions output_hidden_states output_router_logits return_dict "
    "past_key_values cache".split()
)


@dataclass(frozen=True)
class Scores:
    """How a layer turns dot products into weights: softmax(softcap(q k * scale)) over keys with query - key < window."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [h]: logits of one more column per head, which takes weight and gives nothing


class Kernel(Protocol):
    """Attention over packed rows."""

    name: str

    def load(self, documents: Tensor) -> None:
        """Take the boundaries of the next row; documents [T] int64, equal inside a document, ascending."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor: ...


def register() -> None:
    """Make PACKED known to transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


def attach(model: nn.Module, kernel: Kernel) -> None:
    """Make `kernel` known to every module that may call the attention function."""
    for module in model.modules():
        module.packed_kernel = kernel


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [1, h, T, d] and so on -> ([1, T, h, dv], None).

    TypeError for anything that would change the result and is not understood here.
    """
    unknown = sorted({k for k, v in others.items() if v is not None and v is not False} - IGNORED)
    if unknown:
        raise TypeError(f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which is not known here")
    if attention_mask is not None or is_causal is False or dropout:
        raise TypeError(f"{type(module).__name__} asks for {'dropout' if dropout else 'a mask other than causal'}")
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scores = Scores(scale, sliding_window or None, softcap or None, s_aux)
    return module.packed_kernel.attend(q, k, v, scores)[None], None


class DocumentLoop:
    """Document by document with SDPA, or with explicit scores where a family needs what SDPA lacks. Exact, any device.

    Reads the boundaries on the host: right for CPUs, and the reference of the fixed-shape kernels.
    """

    name = "SDPA, document by document"

    def __init__(self) -> None:
        self.edges: list[int] = []  # row positions where documents start, and T

    def load(self, documents: Tensor) -> None:
        starts = (torch.diff(documents).nonzero()[:, 0] + 1).tolist()
        self.edges = [0, *starts, documents.numel()]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for start, end in pairwise(self.edges):
            part = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            out[start:end] = _document(*part, scores)[0].transpose(0, 1)
        return out


def _document(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Causal attention of one document, [1, h, n, dv]."""
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    window = scores.window if scores.window and scores.window < length else None
    if scores.softcap is None and scores.sinks is None:
        mask = _visible(0, length, length, window, q.device) if window else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=group > 1
        )
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.cat([_rows(q, k, v, scores, window, i, min(i + CHUNK, length)) for i in range(0, length, CHUNK)], 2)


def _rows(q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None, start: int, end: int) -> Tensor:
    """Queries start..end-1 with their scores written out, in float32 as the families' own eager attention does."""
    logits = (q[:, :, start:end] @ k[:, :, :end].transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~_visible(start, end, end, window, q.device), float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.float().reshape(1, -1, 1, 1).expand(-1, -1, end - start, 1)
        logits = torch.cat((logits, column), -1)
    return logits.softmax(-1)[..., :end].to(v.dtype) @ v[:, :, :end]


def _visible(start: int, end: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[end - start, keys] bool: key <= query, and query - key < window."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0
