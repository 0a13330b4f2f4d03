"""Which context tokens each tile of the attention kernels reads, by a few tensor operations on the sorted anchors."""

import torch
from torch import Tensor


def _context(anchors: Tensor, starts: Tensor, block_size: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per block: first token that any slot sees, first that all slots see, end; empty contexts are (T', T', T')."""
    first = all_see = starts
    if window:
        first = torch.maximum(starts, anchors + 1 - window)
        all_see = torch.maximum(starts, anchors + block_size - window)
    return first, torch.minimum(all_see, anchors), anchors


def row_plan(anchors: Tensor, starts: Tensor, block_size: int, window: int, blocks: int, step: int) -> Tensor:
    """Context run of every row tile of `blocks` blocks, in steps of `step` tokens: [tiles, 4] int32 of
    (first token, masked steps, full steps, masked steps). anchors, starts [A] ascending; window 0: none."""
    first, all_see, end = _context(anchors, starts, block_size, window)
    pad = -anchors.numel() % blocks
    far = 1 << 30
    some = end > first
    low = torch.where(some, first, far)
    high = torch.where(some, end, 0)
    full_low = torch.where(some, all_see, far)
    full_high = torch.where(some, end, 0)

    def tiles(x: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, pad), value=value).view(-1, blocks)

    low, high = tiles(low, far).amin(1), tiles(high, 0).amax(1)
    full_low, full_high = tiles(full_low, 0).amax(1), tiles(full_high, far).amin(1)
    low = torch.minimum(low, high)
    steps = (high - low + step - 1) // step
    before = torch.minimum((full_low - low + step - 1) // step, steps)
    full = ((full_high - low).clamp(min=0) // step - before).clamp(min=0)
    full = torch.minimum(full, steps - before)
    return torch.stack((low, before, full, steps - before - full), 1).int()


def key_plan(
    anchors: Tensor, starts: Tensor, tokens: int, block_size: int, window: int, group: int, tile: int, step: int
) -> Tensor:
    """Rows that see each tile of `tile` context tokens, in steps of `step` packed rows (token * group + head), longest
    first: [tiles, 5] int32 of (tile, first row, masked steps, full steps, masked steps)."""
    begin = torch.arange(0, tokens, tile, device=anchors.device)[:, None]
    end = begin + tile
    first, all_see, stop = _context(anchors, starts, block_size, window)
    seen = (first < end) & (stop > begin) & (stop > first)  # [tiles, A]
    full = (all_see <= begin) & (stop >= end) & (stop > first)
    block = torch.arange(anchors.numel(), device=anchors.device)
    far = anchors.numel()

    def run(mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(mask, block, far).amin(1), torch.where(mask, block + 1, 0).amax(1)

    rows = block_size * group
    (low, high), (full_low, full_high) = run(seen), run(full)
    low = torch.minimum(low, high) * rows
    steps = (high * rows - low + step - 1) // step
    before = torch.minimum((full_low * rows - low + step - 1) // step, steps)
    inside = ((full_high * rows - low).clamp(min=0) // step - before).clamp(min=0)
    inside = torch.minimum(inside, steps - before)
    plan = torch.stack((begin[:, 0] // tile, low, before, inside, steps - before - inside), 1)
    return plan[torch.argsort(steps, descending=True, stable=True)].int()
