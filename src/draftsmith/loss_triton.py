"""Cross-entropy of bf16 logits and its gradient in place, as one Triton kernel; the reference is loss.py's `plain_chunk`.

One program owns one row: a first pass finds maximum and sum, a second turns the row into softmax - onehot. At most
some hundred rows are in flight, so much of the second pass reads the cache instead of device memory. Each row of a
program's [ROWS, 32] tile keeps its own running maximum, within one warp, so that no step waits for the other warps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


@triton.jit
def _base2(x, factor, cap, SOFTCAP: tl.constexpr):
    """Raw logits -> the model's, times log2(e). factor = scale * log2(e), or -2 * scale / softcap * log2(e) with a
    soft-cap, where cap = softcap * log2(e)."""
    x = x.to(tl.float32) * factor
    if SOFTCAP:
        x = cap * (2 / (1 + tl.exp2(x)) - 1)  # tanh
    return x


@triton.jit
def _sums(x, top, total):
    """One step of the running log-sum-exp of every tile row."""
    new = tl.maximum(top, tl.max(x, 1))
    return new, total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new[:, None]), 1)


@triton.jit
def _replace(
    at_ptr, x, at, top, log_z, label, beaten, scale, cap, inside, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr
):
    """Gradient of one tile into memory; counts lower ids that have the top logit."""
    beaten = beaten | ((x >= top) & (at < label)).to(tl.int32)
    if GRADIENT:
        grad = tl.exp2(x - log_z)
        grad = tl.where(at == label, grad - 1.0, grad) * scale
        if SOFTCAP:
            t = x / cap
            grad = grad * (1 - t * t)
        tl.store(at_ptr, grad.to(at_ptr.dtype.element_ty), mask=inside)
    return beaten


@triton.jit
def _cross_entropy(
    logits_ptr, labels_ptr, loss_ptr, correct_ptr, vocab, stride, scale, factor, cap,
    SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    BLOCK: tl.constexpr = ROWS * 32
    at = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    whole = vocab // BLOCK * BLOCK
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for i in range(0, whole, BLOCK):
        top, total = _sums(_base2(tl.load(logits_ptr + i + at), factor, cap, SOFTCAP), top, total)
    rest = whole + at
    x = _base2(tl.load(logits_ptr + rest, mask=rest < vocab, other=0.0), factor, cap, SOFTCAP)
    top, total = _sums(tl.where(rest < vocab, x, -1e30), top, total)
    highest = tl.max(top, 0)
    log_z = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
    picked = _base2(tl.load(logits_ptr + label), factor, cap, SOFTCAP)
    tl.store(loss_ptr + row, (log_z - picked) * 0.6931471805599453)
    # Greedy picks the lowest of equal logits: the label is right if it has the top and no lower id has it too.
    beaten = tl.zeros((ROWS, 32), tl.int32)
    tl.debug_barrier()  # the label's logit is read before the second pass overwrites the row
    for i in range(0, whole, BLOCK):
        x = _base2(tl.load(logits_ptr + i + at), factor, cap, SOFTCAP)
        beaten = _replace(
            logits_ptr + i + at, x, i + at, highest, log_z, label, beaten, scale, cap, at >= 0, SOFTCAP, GRADIENT
        )
    x = _base2(tl.load(logits_ptr + rest, mask=rest < vocab, other=0.0), factor, cap, SOFTCAP)
    beaten = _replace(
        logits_ptr + rest, x, rest, highest, log_z, label, beaten, scale, cap, rest < vocab, SOFTCAP, GRADIENT
    )
    tl.store(correct_ptr + row, (picked >= highest) & (tl.max(tl.max(beaten, 1), 0) == 0))


def cross_entropy_(
    logits: Tensor, labels: Tensor, scale: float, softcap: float, gradient: bool, rows: int = 64, warps: int = 4
) -> tuple[Tensor, Tensor]:
    """logits [R, V], labels [R] int64 -> (cross-entropy [R] float32, label is the most likely token [R] bool).

    With `gradient` the logits are replaced by d cross-entropy / d (x @ weight.T), else they are left as they are.
    `rows` x 32 logits are at hand at a time.
    """
    count, vocab = logits.shape
    loss = torch.empty(count, dtype=torch.float32, device=logits.device)
    correct = torch.empty(count, dtype=torch.bool, device=logits.device)
    factor = (-2 * scale / softcap if softcap else scale) * LOG2E
    _cross_entropy[(count,)](
        logits, labels, loss, correct, vocab, logits.stride(0), scale, factor, softcap * LOG2E,
        SOFTCAP=softcap > 0, GRADIENT=gradient, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return loss, correct
