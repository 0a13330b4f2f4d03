"""Position-weighted cross-entropy of draft blocks over the target's frozen head. Returns sums and counts, never means.

The head's weight gets no gradient, so the gradient of the input is formed while the logits of a chunk of blocks are at
hand: two head GEMMs in all, no recompute, no whole logits. The anchors' own slots (slot 0) are never projected.
Shapes: A anchors, B block size, S = B - 1 scored slots, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ROWS = {"cuda": 4096, "cpu": 2048}  # head rows at a time: that many x V logits exist at once


class Head(NamedTuple):
    """The target's frozen output head. logits = softcap(x @ weight.T * scale); softcap 0 means none."""

    weight: Tensor  # [V, H]
    scale: float = 1.0
    softcap: float = 0.0


class BlockLoss(NamedTuple):
    """Sums over one unit."""

    loss: Tensor  # scalar float32, sum of weight * cross-entropy
    denominator: Tensor  # scalar float32: sum of weights (decay) or number of scored slots (dpace)
    correct: Tensor  # [A, S] bool: the slot's most likely token is the label, and the slot is scored
    gradient: Tensor | None  # [A, S, H] in the states' dtype: d loss / d states, where asked for


def decay_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k-1)/gamma) for slots k = 1..B-1, [S] float32 (paper section 4). gamma 0 means no decay."""
    k = torch.arange(block_size - 1, dtype=torch.float32, device=device)
    return torch.exp(-k / gamma) if gamma > 0 else torch.ones_like(k)


def dpace_weights(confidence: Tensor, scored: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): suffix sums of the running product of (1-alpha)*q+alpha over a block's scored slots.

    confidence [a, S] float32 is the probability of the label, scored [a, S] bool -> [a, S] float32, 0 where unscored.
    """
    product = torch.where(scored, (1 - alpha) * confidence + alpha, 1.0).cumprod(-1)
    product = product * scored
    return product.flip(-1).cumsum(-1).flip(-1) * scored


def block_cross_entropy(
    states: Tensor,
    head: Head,
    labels: Tensor,
    scored: Tensor,
    slot_weights: Tensor,
    dpace_alpha: float | None,
    gradient: bool = True,
) -> BlockLoss:
    """states [A, S, H] after the final norm, labels [A, S] int64, scored [A, S] bool, slot_weights [S] float32.

    With `dpace_alpha` None the weights are `slot_weights` where scored and the denominator is their sum; else they are
    D-PACE's (`slot_weights` unused) and the denominator is the number of scored slots, since the weights grow with
    confidence. Weights carry no gradient. Nothing here is part of an autograd graph: the caller runs backward from
    `states` with `gradient`.
    """
    with torch.no_grad():
        rows, flat_labels = states.flatten(0, 1), labels.flatten()
        count, slots = rows.shape[0], labels.shape[1]
        chunks = max(1, round(count / CHUNK_ROWS.get(states.device.type, 2048)))
        size = -(-labels.shape[0] // chunks) * slots  # whole blocks
        one_chunk = _fused_chunk if states.is_cuda else plain_chunk
        grad = torch.empty_like(rows) if gradient else None
        parts = []
        for i in range(0, count, size):
            at = slice(i, i + size)
            parts.append(one_chunk(rows[at], head, flat_labels[at], None if grad is None else grad[at]))
        cross_entropy = torch.cat([p[0] for p in parts]).view_as(labels)
        correct = torch.cat([p[1] for p in parts]).view_as(scored) & scored
        if dpace_alpha is None:
            weights = slot_weights * scored
            denominator = weights.sum()
        else:
            weights = dpace_weights(torch.exp(-cross_entropy), scored, dpace_alpha)
            denominator = scored.sum(dtype=torch.float32)
        if grad is not None:
            grad.mul_(weights.view(-1, 1))
            grad = grad.view_as(states)
        return BlockLoss((weights * cross_entropy).sum(), denominator, correct, grad)


def plain_chunk(x: Tensor, head: Head, labels: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [R, H], labels [R] -> (cross-entropy [R] float32, label is the most likely token [R]); d cross-entropy / d x goes
    into `grad` [R, H]. The CPU path and the reference of the fused kernel."""
    logits = (x @ head.weight.T).float() * head.scale  # [R, V]
    if head.softcap:
        squashed = torch.tanh(logits / head.softcap)
        logits = squashed * head.softcap
    log_z = logits.logsumexp(-1)
    picked = logits.gather(-1, labels[:, None])[:, 0]
    correct = logits.argmax(-1) == labels
    if grad is not None:
        grad_logits = torch.exp(logits - log_z[:, None])  # softmax
        grad_logits.scatter_add_(-1, labels[:, None], torch.full_like(picked, -1.0)[:, None])
        if head.softcap:
            grad_logits *= 1 - squashed.square()
        torch.mm((grad_logits * head.scale).to(x.dtype), head.weight, out=grad)
    return log_z - picked, correct


def _fused_chunk(x: Tensor, head: Head, labels: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """`plain_chunk` on CUDA: the logits become their own gradient in place, in the compute dtype."""
    from draftsmith.loss_triton import cross_entropy_

    logits = x @ head.weight.T
    loss, correct = cross_entropy_(logits, labels, head.scale, head.softcap, gradient=grad is not None)
    if grad is not None:
        torch.mm(logits, head.weight, out=grad)
    return loss, correct
