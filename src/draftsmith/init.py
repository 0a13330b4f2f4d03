"""Writes a recipe for a target and a prepared corpus, with the reason beside each choice (`draftsmith init`)."""

from dataclasses import dataclass

import numpy as np

from draftsmith.unit import UnitShape

MAX_BLOCK_TOKENS = 16384  # A*B of one unit: enough to fill a large GPU, small enough for its memory


@dataclass(frozen=True)
class UnitProposal:
    """A shape with the sentences that explain it."""

    shape: UnitShape
    reasons: tuple[str, ...]


def propose_unit(lengths: np.ndarray, anchor_counts: np.ndarray, block_size: int, device: str = "cpu") -> UnitProposal:
    """Choose T, A and the anchor rate from a corpus's lengths and valid anchors [documents].

    T holds the longest document and, for little waste at row ends, several mean ones. A is about half of a row's
    valid anchors (the paper draws up to 512 of a response each epoch), within MAX_BLOCK_TOKENS block tokens.
    """
    longest, mean = int(lengths.max()), float(lengths.mean())
    floor = 2048 if device == "cpu" else 4096
    tokens = max(longest, floor, int(12 * mean))
    tokens = min(-(-tokens // 128) * 128, (1 << 24) - 1)
    supervised = tokens * float(anchor_counts.sum()) / float(lengths.sum())  # valid anchors of a full row
    anchors = min(0.5 * supervised, MAX_BLOCK_TOKENS / block_size)
    anchors = max(8, int(anchors) // 8 * 8)
    # A row of average mix asks for 80 % of A: richer mixes still fit (measured: 99.5 % of the tokens, all anchors used).
    rate = min(1.0, max(1e-3, 0.8 * anchors / supervised))
    return UnitProposal(
        UnitShape(tokens, anchors, block_size, round(rate, 4)),
        (
            f"T = {tokens}: the longest document has {longest} tokens, the mean one {mean:.0f}",
            f"A = {anchors}: a full row has about {supervised:.0f} valid anchors; {anchors} blocks of {block_size} "
            f"make {anchors * block_size} block tokens",
        ),
    )
