"""Fixed-shape attention over packed rows for CUDA: nothing is read on the host, so a CUDA graph can hold it.

A row's boundaries are kept in static buffers that `load` fills. (torch's and cuDNN's kernels for ragged batches were no
faster at the shapes of records/target_h200.md and know no soft-cap.)
"""

from typing import Any

import torch
from torch import Tensor
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

    def __init__(self, tokens: int, windows: set[int | None], device: torch.device):
        """`windows`: every window that a layer may ask for; None is full attention."""
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
