"""Position-weighted cross-entropy of draft blocks over the target's frozen head. Returns sums and counts, never means.

The head's weight gets no gradient, so the gradient of the input can be formed while the logits of a chunk of blocks
are at hand: two head GEMMs in all, no recompute, no whole logits. Slot 0 (the anchor itself) is never projected.
Shapes: A anchors, B block size, S = B - 1 scored slots, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ROWS = 2048  # head rows at a time: 2048 x V logits exist at once


class Head(NamedTuple):
    """The target's frozen output head. logits = softcap(x @ weight.T * scale); softcap 0 means none."""

    weight: Tensor  # [V, H]
    scale: float = 1.0
    softcap: float = 0.0


class BlockLoss(NamedTuple):
    """Sums over one unit; `loss` alone carries a gradient, towards the block states."""

    loss: Tensor  # scalar float32, sum of weight * cross-entropy
    denominator: Tensor  # scalar float32: sum of weights (decay) or number of scored slots (dpace)
    correct: Tensor  # [A, S] bool: the slot's most likely token is the label, and the slot is scored


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
    states: Tensor, head: Head, labels: Tensor, scored: Tensor, slot_weights: Tensor, dpace_alpha: float | None
) -> BlockLoss:
    """states [A, B, H] after the final norm, labels [A, S] int64, scored [A, S] bool, slot_weights [S] float32.

    With `dpace_alpha` None the weights are `slot_weights` where scored and the denominator is their sum; else they are
    D-PACE's (`slot_weights` unused) and the denominator is the number of scored slots, since the weights grow with confidence.
    """
    loss, denominator, correct = _BlockCrossEntropy.apply(states, head, labels, scored, slot_weights, dpace_alpha)
    return BlockLoss(loss, denominator, correct)


class _BlockCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, head, labels, scored, slot_weights, dpace_alpha):
        blocks = max(1, CHUNK_ROWS // labels.shape[1])
        grad = torch.zeros_like(states)
        loss = states.new_zeros((), dtype=torch.float32)
        denominator = torch.zeros_like(loss)
        correct = []
        for i in range(0, states.shape[0], blocks):
            at = slice(i, i + blocks)
            part = _chunk(states[at, 1:], head, labels[at], scored[at], slot_weights, dpace_alpha)
            grad[at, 1:] = part[0]
            loss += part[1]
            denominator += part[2]
            correct.append(part[3])
        ctx.save_for_backward(grad)
        correct = torch.cat(correct)
        ctx.mark_non_differentiable(denominator, correct)
        return loss, denominator, correct

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None


def _chunk(x, head, labels, scored, slot_weights, dpace_alpha):
    """x [a, S, H] -> (d loss / d x, loss, denominator, correct) of one chunk of blocks."""
    logits = (x @ head.weight.T).float() * head.scale  # [a, S, V]
    if head.softcap:
        squashed = torch.tanh(logits / head.softcap)
        logits = squashed * head.softcap
    log_z = logits.logsumexp(-1)
    picked = logits.gather(-1, labels[..., None])[..., 0]
    cross_entropy = log_z - picked
    if dpace_alpha is None:
        weights = slot_weights * scored
        denominator = weights.sum()
    else:
        weights = dpace_weights(torch.exp(-cross_entropy), scored, dpace_alpha)
        denominator = scored.sum(dtype=torch.float32)
    loss = (weights * cross_entropy * scored).sum()
    correct = (logits.argmax(-1) == labels) & scored
    grad = torch.exp(logits - log_z[..., None])  # softmax
    grad.scatter_add_(-1, labels[..., None], torch.full_like(picked, -1.0)[..., None])
    grad *= weights[..., None]
    if head.softcap:
        grad *= 1 - squashed.square()
    grad = (grad * head.scale).to(x.dtype) @ head.weight
    return grad, loss, denominator, correct
