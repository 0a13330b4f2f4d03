"""Teacher-forced walk: the acceptance length of greedy decoding, from the accepted lengths at every anchor of a text.

Decoding visits some anchors only: from anchor a it goes on at a + n + 1, where n drafts were right. Averaging over all
anchors is biased, since visited ones follow rejections; the walk visits what decoding visits. On text that the target
itself would write greedily, in the same arithmetic, the walk's lengths equal those of the real loop (decode.py), cycle
by cycle, as long as the text did not end at a length limit (near a limit the real loop drafts shorter blocks).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np


class WalkSummary(TypedDict):
    """Figures over many walks; all acceptance lengths include the bonus token."""

    acceptance_length: float  # mean over responses of the mean over their cycles (z-lab's definition)
    acceptance_length_micro: float  # tokens / cycles over everything
    acceptance_per_position: list[float]  # [B-1], share of cycles that accept at least k = 1..B-1 drafts
    responses: int
    cycles: int


@dataclass(frozen=True)
class Walk:
    """The cycles of one response."""

    accepted: tuple[int, ...]
    """Right drafts of each cycle, counted up to the end of the response."""
    lengths: tuple[int, ...]
    """Tokens each cycle commits: accepted + 1, cut at the end of the response."""

    @staticmethod
    def summary(walks: Sequence["Walk"], block_size: int) -> WalkSummary:
        """Responses of one token have no cycle and do not count. Without any cycle the lengths are 1.0."""
        walked = [w for w in walks if w.lengths]
        accepted = np.array([n for w in walked for n in w.accepted], np.int64)
        tokens = sum(sum(w.lengths) for w in walked)
        means = [sum(w.lengths) / len(w.lengths) for w in walked]
        return WalkSummary(
            acceptance_length=float(np.mean(means)) if means else 1.0,
            acceptance_length_micro=tokens / len(accepted) if len(accepted) else 1.0,
            acceptance_per_position=per_position(accepted, block_size),
            responses=len(walked),
            cycles=len(accepted),
        )


def per_position(accepted: np.ndarray, block_size: int) -> list[float]:
    """Share of cycles that accept at least k drafts, k = 1..B-1; accepted [cycles] int."""
    if not len(accepted):
        return [0.0] * (block_size - 1)
    return [float((accepted >= k).mean()) for k in range(1, block_size)]


def spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs [start, end) of supervised tokens of one document, loss_mask [n] of 0 and 1."""
    edges = np.diff(np.concatenate(([0], (np.asarray(loss_mask) != 0).astype(np.int8), [0])))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


def walk(accepted: np.ndarray | Mapping[int, int], start: int, end: int) -> Walk:
    """Walk the response at positions [start, end); accepted[a] is n(a), asked for start <= a <= end - 2.

    The first token comes from the prompt's prefill: it is the first anchor and no cycle's work.
    """
    anchor, lengths, counts = start, [], []
    while anchor < end - 1:
        room = end - 1 - anchor
        n = min(int(accepted[anchor]), room)
        counts.append(n)
        lengths.append(min(n + 1, room))
        anchor += lengths[-1]
    return Walk(tuple(counts), tuple(lengths))


def walk_row(accepted: Mapping[int, int]) -> list[Walk]:
    """Walk every response of a packed row, in order; `accepted` maps EVERY valid anchor's row position to its n.

    An anchor is valid if it and its successor are supervised tokens of one document, so each run of consecutive
    anchors a..b is one response at [a, b + 2), and two responses never touch.
    """
    anchors = np.array(sorted(accepted), np.int64)
    breaks = np.flatnonzero(np.diff(anchors) != 1) + 1
    return [walk(accepted, int(run[0]), int(run[-1]) + 2) for run in np.split(anchors, breaks) if len(run)]
