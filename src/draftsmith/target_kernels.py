"""Fixed-shape attention over packed rows for CUDA: nothing is read on the host, so a CUDA graph can hold it.

`FlexBlocks` understands every kind of scores and any mix of documents; `VarlenFlash` is the flash kernel for ragged
batches, for plain softmax in half precision. Both keep a row's boundaries in static buffers that `load` fills.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from draftsmith.target_attention import Scores

BLOCK = 128  # rows and columns of a tile of the block mask


def document_starts(documents: Tensor) -> Tensor:
    """documents [T] -> row position of the first token of each token's document, [T] int32."""
    at = torch.arange(documents.numel(), device=documents.device)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[1:] = documents[1:] != documents[:-1]
    return torch.where(first, at, 0).cummax(0).values.int()


class FlexBlocks:
    """flex_attention with a block mask in closed form: O((T/128)^2) work a row instead of T^2."""

    name = "flex_attention with document blocks"

    def __init__(self, tokens: int, windows: set[int | None], device: torch.device, options: dict | None = None):
        """`windows`: every window that a layer may ask for; None is full attention. `options`: the kernel's own."""
        self._options = options
        self.starts = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.masks = {w: _empty_mask(tokens, self._rule(w), device) for w in windows}
        self._flex = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def load(self, documents: Tensor) -> None:
        self.starts.copy_(document_starts(documents))
        for window, mask in self.masks.items():
            partial, full = block_tables(self.starts, window)
            for number, order, table in (
                (mask.kv_num_blocks, mask.kv_indices, partial),
                (mask.full_kv_num_blocks, mask.full_kv_indices, full),
            ):
                number.copy_(table.sum(-1, dtype=torch.int32)[None, None])
                order.copy_(table.int().argsort(dim=-1, descending=True, stable=True).int()[None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        cap = scores.softcap

        def squash(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.tanh(score / cap) * cap

        out = self._flex(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            score_mod=squash if cap is not None else None,
            block_mask=self.masks[scores.window],
            scale=scores.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=self._options,
            return_aux=AuxRequest(lse=True) if scores.sinks is not None else None,
        )
        if scores.sinks is not None:
            out, log_z = out[0], out[1].lse  # [1, h, T, dv], [1, h, T]
            out = out * torch.sigmoid(log_z - scores.sinks.float()[None, :, None])[..., None].to(out.dtype)
        return out[0].transpose(0, 1)

    def _rule(self, window: int | None) -> Any:
        starts = self.starts

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (key >= starts[query])
            return seen & (query - key < window) if window else seen

        return visible


def block_tables(starts: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """starts [T] (non-decreasing) -> (partial, full) [T/128, T/128] bool: tiles with some, and with only, visible pairs.

    A document's tokens are contiguous, so the pair (query, key) is visible iff max(starts[query], query - window + 1)
    <= key <= query, and both bounds grow with the query: a tile's first and last queries decide.
    """
    tokens, device = starts.numel(), starts.device
    first = torch.arange(0, tokens, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=tokens - 1)
    lowest, highest = starts[first], starts[last]  # smallest key of the tile's first and last query
    if window:
        lowest, highest = torch.maximum(lowest, first - window + 1), torch.maximum(highest, last - window + 1)
    some = (first <= last[:, None]) & (last >= lowest[:, None])
    full = (last <= first[:, None]) & (first >= highest[:, None])
    return some & ~full, full


def _empty_mask(tokens: int, rule: Any, device: torch.device) -> BlockMask:
    """A BlockMask over buffers that `load` fills."""
    n = -(-tokens // BLOCK)
    number, order = (torch.zeros(1, 1, *s, dtype=torch.int32, device=device) for s in ((n,), (n, n)))
    return BlockMask.from_kv_blocks(
        number, order, number.clone(), order.clone(), BLOCK, rule, seq_lengths=(tokens, tokens), compute_q_blocks=False
    )


class VarlenFlash:
    """torch's flash attention for ragged batches: float16 and bfloat16, heads up to 256, no soft-cap.

    The number of documents a row may hold and the longest one are fixed, since they are the kernel's launch grid.
    """

    name = "flash attention over ragged documents"

    def __init__(self, tokens: int, documents: int, longest: int, device: torch.device):
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        self.tokens, self.documents, self.longest = tokens, documents, min(longest, tokens)
        self.edges = torch.full((documents + 1,), tokens, dtype=torch.int32, device=device)
        self.edges[0] = 0
        self._varlen, self._lse = varlen_attn, AuxRequest(lse=True)
        # torch 2.11 groups query heads without being asked; later releases want to be told.
        self._grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def load(self, documents: Tensor) -> None:
        """Unused edges stay T: empty documents. A row with more documents than planned stops the device, loudly."""
        number = (documents[1:] != documents[:-1]).cumsum(0)
        torch._assert_async((number[-1] < self.documents).all())
        lengths = torch.zeros(self.documents, dtype=torch.int64, device=documents.device)
        lengths.scatter_add_(0, F.pad(number, (1, 0)), torch.ones_like(documents))
        self.edges[1:].copy_(lengths.cumsum(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        width = v.shape[2]
        v = F.pad(v, (0, q.shape[2] - width)) if width < q.shape[2] else v
        out = self._varlen(
            q, k, v, self.edges, self.edges, self.longest, self.longest, scale=scores.scale,
            window_size=((scores.window or 0) - 1, 0),
            return_aux=self._lse if scores.sinks is not None else None, **self._grouped,
        )  # fmt: skip
        if scores.sinks is not None:
            out, log_z = out  # [T, h, d], [h, T]
            out = out * torch.sigmoid(log_z - scores.sinks.float()[:, None]).T[..., None].to(out.dtype)
        return out[..., :width]

    @staticmethod
    def suits(dtype: torch.dtype, head_dim: int, softcap: bool) -> bool:
        return dtype in (torch.float16, torch.bfloat16) and head_dim <= 256 and not softcap


@torch.library.custom_op("draftsmith::cudnn_ragged", mutates_args=())
def cudnn_ragged(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float) -> Tensor:
    """Causal attention of ragged documents by cuDNN; shapes as everywhere here, edges [N+1] int32."""
    found = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, edges, edges, longest, longest, False, 0.0, True, False, scale=scale
    )
    return found[0]


@cudnn_ragged.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


class VarlenCudnn(VarlenFlash):
    """cuDNN's attention for ragged batches: plain causal softmax without windows or sinks."""

    name = "cuDNN attention over ragged documents"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if scores.window or scores.sinks is not None or scores.softcap:
            raise TypeError("cuDNN's ragged attention knows no window, sinks or soft-cap")
        return cudnn_ragged(q.contiguous(), k.contiguous(), v.contiguous(), self.edges, self.longest, scores.scale)
