"""Key/value caches of batched decoding, for the target and for the drafter.

In both the index of an entry is its token's position in its own row. Rows differ in length, and a position beyond a
row's end may hold leftovers; whoever reads masks them by position. So nothing is ever cropped or shifted.
Shapes: P rows, C capacity, L length in use, n new positions, g key/value heads, d head size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.drafters.dflash import Attend, DFlash, DFlashShape
from draftsmith.errors import UserError


class _Window(NamedTuple):
    """Where a forward pass writes and how far it reads."""

    rows: slice
    positions: Tensor  # [p, n] int64
    length: int


class TargetCache(Cache):
    """transformers' cache interface over rows of different lengths. Call `place` before each forward pass."""

    def __init__(self, rows: int, capacity: int):
        self.size = (rows, capacity)
        self.window = _Window(slice(None), torch.empty(0, dtype=torch.int64), 0)
        super().__init__(layers=[])

    def place(self, rows: slice, positions: Tensor, length: int) -> None:
        """The next forward writes at positions [p, n] of these rows and reads positions [0, length)."""
        self.window = _Window(rows, positions, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values [p, g, n, d] of one layer -> all in use [p, g, length, d]."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer(self.size))
        return self.layers[layer_idx].write(key_states, value_states, self.window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked for by a model that makes its own causal mask, which it does for prompts only."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.size = (len(rows), self.size[1])
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class _Layer(CacheLayerMixin):
    """One layer's keys and values [P, C, g, d], zeros at first, since a masked NaN would still poison a softmax."""

    is_sliding = False

    def __init__(self, size: tuple[int, int]):
        super().__init__()
        self.size = size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (x.new_zeros(*self.size, x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def write(self, key_states: Tensor, value_states: Tensor, window: _Window) -> tuple[Tensor, Tensor]:
        """[p, g, n, d] in, [p, g, length, d] out (views)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        out = []
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            cache = cache[window.rows]
            put(cache, window.positions, new.transpose(1, 2))
            out.append(cache[:, : window.length].transpose(1, 2))
        return out[0], out[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a layer is written through TargetCache.update, which knows the window")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.size[1]


class DraftCache:
    """The drafter's keys and values of context tokens, [P, C, g, d] a layer. A block's own keys and values are written at
    its positions too and replaced by context ones once those tokens are verified."""

    def __init__(self, shape: DFlashShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.windows = shape.windows
        size = (rows, capacity, shape.num_kv_heads, shape.head_dim)
        self.layers = [
            (torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
            for _ in range(shape.num_layers)
        ]

    def absorb(self, rows: slice, drafter: DFlash, f: Tensor, positions: Tensor) -> None:
        """Store context features f [p, n, H] at positions [p, n]; those after a row's anchor stay masked."""
        rope = drafter.rope(positions, f.dtype)
        for layer, (keys, values) in zip(drafter.layers, self.layers, strict=True):
            k, v = layer.context_kv(f, rope)
            put(keys[rows], positions, k)
            put(values[rows], positions, v)

    def attention(self, positions: Tensor, verify: Tensor, length: int) -> Attend:
        """`attend` for one block a row at positions [P, B]: context before the anchor and the block's first `verify` slots,
        all of them in a full layer, those up to its own and within the window in a sliding one."""
        at = torch.arange(length, device=positions.device)
        query = positions[:, :, None]  # [P, B, 1]
        seen = at < (positions[:, 0] + verify)[:, None, None]
        full = seen | (at == query)  # [P, B, L]; a slot past `verify` sees itself: an empty softmax would be NaN
        masks = {w: full if w is None else full & (at <= query) & (query - at < w) for w in set(self.windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
            keys, values = self.layers[layer]
            put(keys, positions, k)
            put(values, positions, v)
            q, k, v = (x.transpose(1, 2) for x in (q, keys[:, :length], values[:, :length]))
            mask = masks[self.windows[layer]][:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        return attend

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]


def put(cache: Tensor, positions: Tensor, new: Tensor) -> None:
    """cache[p, positions[p, i]] = new[p, i], in place."""
    cache[torch.arange(len(cache), device=cache.device)[:, None], positions] = new


def causal_masks(
    config: PreTrainedConfig, positions: Tensor, length: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive masks [P, 1, B, L] for queries at positions [P, B], as the model takes them: one tensor, or one for each kind
    of layer where a model mixes full and sliding layers."""
    at = torch.arange(length, device=positions.device)
    query = positions[:, :, None]
    masks = {}
    for kind, window in attention_kinds(config).items():
        visible = at <= query
        if window is not None:
            visible = visible & (query - at < window)
        hidden = torch.zeros(visible.shape, dtype=dtype, device=at.device)
        masks[kind] = hidden.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_kinds(config: PreTrainedConfig) -> dict[str, int | None]:
    """Kind of layer -> its window. A kind whose cache cannot forget rejected tokens is a UserError."""
    values = config.get_text_config().to_dict()
    window = values.get("sliding_window")
    kinds = set(values.get("layer_types") or ["sliding_attention" if window else "full_attention"])
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange:
        raise UserError(
            f"a target with {', '.join(sorted(strange))} layers cannot take back rejected tokens in batched decoding; "
            "evaluate it in a server that snapshots such states (see docs/serve.md)"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
