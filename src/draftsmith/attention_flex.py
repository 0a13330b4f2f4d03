"""Draft-block attention by flex_attention with a closed-form BlockMask; the contract is attention.py's.

Keys are laid out as [context T | block tokens A*B]. Every query sees two runs of keys, one of the context and one of
its own block, so whether a 128 x 128 tile is full, partial or absent is interval arithmetic on the sorted anchors: a
few tensor operations of fixed shape, no evaluation of the mask over the whole grid, nothing read on the host.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafters.dflash import Attend, DFlashShape

TILE = 128
_compiled_flex = torch.compile(flex_attention, dynamic=False)  # nothing is compiled before the first call


def flex_over(anchors: Tensor, starts: Tensor, tokens: int, shape: DFlashShape) -> Attend:
    """`attend` for one unit. Compiled code only: uncompiled, flex_attention forms all scores, so it is compiled here."""
    masks = {w: block_mask(anchors, starts, tokens, shape.block_size, w) for w in dict.fromkeys(shape.windows)}
    options = kernel_options(anchors.device, shape.head_dim)
    run = flex_attention if torch.compiler.is_compiling() else _compiled_flex

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys, values = torch.cat((context_k, k)), torch.cat((context_v, v))
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        mask = masks[shape.windows[layer]]
        out = run(q, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)
        return out[0].transpose(0, 1)

    return attend


def kernel_options(device: torch.device, head_dim: int) -> dict:
    """The Triton backend (the automatic choice may take a decoding kernel that does not suit these masks), and tiles that
    fit where a block may use less than 100 KiB of shared memory (RTX 30/40, A6000)."""
    options: dict = {"BACKEND": "TRITON"}
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024
        if shared < 160 and head_dim > 64:
            options |= {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32}
            options |= {"num_stages": 2, "num_warps": 4}
    return options


def block_mask(anchors: Tensor, starts: Tensor, tokens: int, block_size: int, window: int | None) -> BlockMask:
    """The BlockMask of one unit, equal to `create_block_mask` with `mask_function` on every row of anchors and starts."""
    queries = anchors.numel() * block_size
    seen = visible_keys(anchors, starts, tokens, block_size, window)  # [query tiles, key tiles]
    full = seen == TILE * TILE
    tables = (*_table(_partial(seen, full)), *_table(full), *_table(_partial(seen, full).T), *_table(full.T))
    kv_count, kv_at, full_kv_count, full_kv_at, q_count, q_at, full_q_count, full_q_at = tables
    return BlockMask(
        (queries, tokens + queries), kv_count, kv_at, full_kv_count, full_kv_at, q_count, q_at, full_q_count, full_q_at,
        BLOCK_SIZE=(TILE, TILE), mask_mod=mask_function(anchors, starts, tokens, block_size, window),
    )  # fmt: skip


def _partial(seen: Tensor, full: Tensor) -> Tensor:
    return (seen > 0) & ~full


def _table(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean [rows, columns] -> (how many a row has, their columns first), as flex_attention reads them."""
    tiles = tiles.int().contiguous()  # the kernels take the columns of a row to lie side by side
    order = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int().contiguous()[None, None]


def visible_keys(anchors: Tensor, starts: Tensor, tokens: int, block_size: int, window: int | None) -> Tensor:
    """How many (query, key) pairs of each tile are visible, [query tiles, key tiles] int32."""
    queries = anchors.numel() * block_size
    tiles = -(-queries // TILE)
    # The last tile may have rows that are no queries: they see nothing.
    q = torch.arange(tiles * TILE, device=anchors.device)
    real, q = q < queries, q.clamp(max=queries - 1)
    block, slot = q // block_size, q % block_size
    low, high = starts[block], anchors[block]
    own_low = tokens + block * block_size
    own_high = own_low + block_size
    if window is not None:
        low = torch.maximum(low, anchors[block] + slot - window + 1)
        own_high = tokens + q + 1
        own_low = torch.maximum(own_low, own_high - window)
    first = torch.arange(0, -(-(tokens + queries) // TILE) * TILE, TILE, device=anchors.device)

    def overlap(a: Tensor, b: Tensor) -> Tensor:
        inside = torch.minimum(b[:, None], first + TILE) - torch.maximum(a[:, None], first)
        return inside.clamp(min=0) * real[:, None]

    seen = overlap(low, high) + overlap(own_low, own_high)
    return seen.view(tiles, TILE, -1).sum(1, dtype=torch.int32)


def mask_function(anchors: Tensor, starts: Tensor, tokens: int, block_size: int, window: int | None):
    """flex_attention's mask_mod over the given buffers: whether query q sees key kv."""

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        context = (kv < tokens) & (kv >= starts[block]) & (kv < anchors[block])
        own = (kv >= tokens) & ((kv - tokens) // block_size == block)
        if window is not None:
            back = slot - (kv - tokens) % block_size
            context = context & (anchors[block] + slot - kv < window)
            own = own & (back >= 0) & (back < window)
        return context | own

    return visible
