"""One training step: static inputs, forward + loss + backward per unit, and the update of float32 masters by the sum law.

Sum law: backward runs on sum(weight * loss) times a constant; gradients and sums of every unit and trainer of a step
are added up in one flat float32 buffer [gradients | sums]; only the update divides, by the step's one denominator. So
the same units give the same step however they are spread over micro-batches and trainers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.attention import reference_attention
from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.loss import BlockLoss, Head, block_cross_entropy, decay_weights
from draftsmith.unit import Unit, UnitShape


@dataclass(frozen=True)
class Tables:
    """The target's frozen embedding and head, in the compute dtype, as the trainer needs them."""

    embedding: Tensor  # [V, H]
    embed_scale: float
    head: Head


class StaticUnit:
    """Preallocated device buffers that hold one unit; `load` copies into them, so their addresses never change."""

    def __init__(self, shape: UnitShape, taps_width: int, dtype: torch.dtype, device: torch.device):
        T, A, S = shape.tokens, shape.anchors, shape.block_size - 1

        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.number = integers()
        self.ids, self.positions, self.documents = integers(T), integers(T), integers(T)
        self.anchors, self.starts = integers(A), integers(A)
        self.labels = integers(A, S)
        self.scored = torch.zeros(A, S, dtype=torch.bool, device=device)
        self.taps = torch.zeros(T, taps_width, dtype=dtype, device=device)

    def load(self, unit: Unit) -> None:
        """Copy everything but the taps, which the target writes itself."""
        self.number.fill_(unit.number)
        for name in ("ids", "positions", "documents", "anchors", "starts", "labels", "scored"):
            getattr(self, name).copy_(torch.from_numpy(getattr(unit, name)), non_blocking=True)


class FlatParameters:
    """Float32 masters, compute weights and gradients of a drafter as flat buffers; the module's parameters are views.

    Matrices come first, then vectors (which never decay). Where the compute dtype is float32 masters and compute
    weights are one buffer and autograd adds straight into the flat gradient.
    """

    SUMS = 4  # denominator, loss, units with a non-finite loss, stop requests

    def __init__(self, drafter: DFlash, dtype: torch.dtype, device: torch.device):
        named = sorted(drafter.named_parameters(), key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.sizes = [p.numel() for _, p in named]
        self.shapes = [p.shape for _, p in named]
        self.total = sum(self.sizes)
        self.matrices = sum(p.numel() for _, p in named if p.ndim >= 2)
        self.masters = torch.cat([p.detach().float().flatten() for _, p in named]).to(device)
        self.compute = self.masters if dtype == torch.float32 else self.masters.to(dtype)
        slots = drafter.shape.block_size - 1
        self.reduced = torch.zeros(self.total + self.SUMS + 2 + 2 * slots, device=device)  # what an all-reduce adds up
        self.gradient = self.reduced[: self.total]
        self.sums = self.reduced[self.total :]
        drafter.to(device)
        self.parameters = [p for _, p in named]
        for p, view in zip(self.parameters, self.views(self.compute), strict=True):
            p.data = view
        self.direct = dtype == torch.float32
        if self.direct:
            for p, view in zip(self.parameters, self.views(self.gradient), strict=True):
                p.grad = view

    def views(self, flat: Tensor) -> list[Tensor]:
        return [x.view(s) for x, s in zip(flat[: self.total].split(self.sizes), self.shapes, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self.views(flat), strict=True))

    def collect(self) -> None:
        """Add the unit's compute-dtype gradients to the flat float32 buffer."""
        if not self.direct:
            torch._foreach_add_(self.views(self.gradient), [p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def publish(self) -> None:
        """Masters -> compute weights, after an update."""
        if not self.direct:
            self.compute.copy_(self.masters)


@dataclass(frozen=True)
class StepStats:
    """Host copy of one optimizer step's sums over all trainers."""

    loss: float  # weighted mean cross-entropy
    denominator: float
    gradient_norm: float  # before clipping
    skipped: bool  # non-finite gradients or denominator 0: weights unchanged
    skipped_total: int  # since the process began
    skipped_in_row: int
    bad_unit: int  # the last unit of this trainer whose loss was not finite, or -1
    stop: bool
    block_acceptance: float  # mean accepted length of the step's blocks, bonus included (anchors at random places)
    slot_accuracy: tuple[float, ...]  # per slot 1..B-1, among scored slots


class TrainStep:
    """Everything that happens on the trainer's device for one step. `accumulate` once a unit, then `update`."""

    def __init__(
        self,
        drafter: DFlash,
        tables: Tables,
        shape: UnitShape,
        loss: LossConfig,
        optim: OptimConfig,
        dtype: torch.dtype,
        device: torch.device,
        checkpoint_activations: bool = False,
    ):
        self.drafter, self.tables, self.shape, self.optim = drafter, tables, shape, optim
        self.device = device
        self.flat = FlatParameters(drafter, dtype, device)
        self.static = StaticUnit(shape, drafter.fc.in_features, dtype, device)
        self.slot_weights = decay_weights(shape.block_size, loss.gamma, device)
        self.dpace_alpha = loss.alpha if loss.weighting == "dpace" else None
        self.constant = 1.0 / (shape.anchors * (shape.block_size - 1))  # keeps gradients near 1 whatever the shape
        self.checkpoint_activations = checkpoint_activations
        self.lr = torch.tensor(0.0, device=device)
        self.norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skips = torch.zeros(2, device=device)  # total, in a row
        self.bad_unit = torch.full((), -1, dtype=torch.int64, device=device)
        self.optimizer = self._make_optimizer(optim)

    def _make_optimizer(self, optim: OptimConfig) -> torch.optim.AdamW:
        flat, n = self.flat, self.flat.matrices
        groups = []
        for at, decay in ((slice(0, n), optim.weight_decay), (slice(n, flat.total), 0.0)):
            master = torch.nn.Parameter(flat.masters[at], requires_grad=False)
            master.grad = flat.gradient[at]
            groups.append({"params": [master], "weight_decay": decay})
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=optim.betas, eps=optim.eps, fused=True)
        optimizer.found_inf = self.skipped  # the fused kernel leaves weights and moments alone where this is 1
        optimizer.grad_scale = None
        for group in groups:
            (p,) = group["params"]
            optimizer.state[p] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return optimizer

    def block_states(self) -> Tensor:
        """Forward of the loaded unit: normed states of every slot [A, B, H]."""
        s, B = self.static, self.shape.block_size
        slot = torch.arange(B, device=self.device)
        ids = torch.where(slot == 0, s.ids[s.anchors][:, None], self.drafter.shape.mask_token)  # [A, B]
        positions = s.positions[s.anchors][:, None] + slot
        x = F.embedding(ids.flatten(), self.tables.embedding) * self.tables.embed_scale
        windows = self.drafter.shape.windows

        def attend(layer, q, k, v, context_k, context_v):
            return reference_attention(q, k, v, context_k, context_v, s.anchors, s.starts, B, windows[layer])

        f = self.drafter.fuse(s.taps)
        states = self.drafter(x, f, positions.flatten(), s.positions, attend)
        return states.view(-1, B, states.shape[-1])

    def loss(self) -> BlockLoss:
        s = self.static
        return block_cross_entropy(
            self.block_states(), self.tables.head, s.labels, s.scored, self.slot_weights, self.dpace_alpha
        )

    def accumulate(self) -> None:
        """Forward, loss and backward of the loaded unit, added to the flat buffer."""
        result = self.loss()
        (result.loss * self.constant).backward()
        self.flat.collect()
        self._add_sums(result)

    @torch.no_grad()
    def _add_sums(self, result: BlockLoss) -> None:
        scored = self.static.scored
        slots = scored.shape[1]
        accepted = result.correct.cumprod(-1).sum()
        blocks = scored[:, 0].sum()
        loss = result.loss.detach()
        self.bad_unit.copy_(torch.where(loss.isfinite(), self.bad_unit, self.static.number))
        head = torch.stack((result.denominator, loss, (~loss.isfinite()).float(), torch.zeros_like(loss)))
        self.flat.sums[:4] += head
        self.flat.sums[4] += accepted
        self.flat.sums[5] += blocks
        self.flat.sums[6 : 6 + slots] += result.correct.sum(0)
        self.flat.sums[6 + slots :] += scored.sum(0)

    def request_stop(self) -> None:
        """Travels with the gradients, so that every trainer learns of it in the same step."""
        self.flat.sums[3] += 1

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Divide by the denominator, clip, AdamW, publish. Skipped on the device where gradients are not finite."""
        flat, sums = self.flat, self.flat.sums
        self.lr.fill_(lr)
        denominator = sums[0]
        empty = denominator <= 0
        scale = torch.where(empty, 1.0, 1.0 / (denominator * self.constant))
        flat.gradient.mul_(scale)
        self.norm.copy_(torch.linalg.vector_norm(flat.gradient))
        self.skipped.copy_((~self.norm.isfinite() | empty | (sums[2] > 0)).float())
        self.skips.copy_((self.skips + self.skipped) * torch.stack((torch.ones_like(self.norm), self.skipped)))
        if self.optim.clip > 0:
            flat.gradient.mul_((self.optim.clip / (self.norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        flat.publish()

    def read(self) -> StepStats:
        """Copy the step's sums to the host; waits for the device, so only at log steps. Call after `update`."""
        sums = self.flat.sums.tolist()
        slots = self.shape.block_size - 1
        correct, scored = sums[6 : 6 + slots], sums[6 + slots :]
        return StepStats(
            loss=sums[1] / sums[0] if sums[0] > 0 else float("nan"),
            denominator=sums[0],
            gradient_norm=float(self.norm),
            skipped=bool(self.skipped),
            skipped_total=int(self.skips[0]),
            skipped_in_row=int(self.skips[1]),
            bad_unit=int(self.bad_unit),
            stop=sums[3] > 0,
            block_acceptance=1 + sums[4] / max(1.0, sums[5]),
            slot_accuracy=tuple(c / n if n else 0.0 for c, n in zip(correct, scored, strict=True)),
        )

    def clear(self) -> None:
        """Zero the flat buffer for the next step."""
        self.flat.reduced.zero_()

    @torch.no_grad()
    def accepted_lengths(self) -> Tensor:
        """Greedy accepted drafts of every block of the loaded unit, [A] int64 (bonus not included)."""
        return self.loss().correct.cumprod(-1).sum(-1)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """AdamW's (exp_avg, exp_avg_sq) as flat [P] copies and the step count."""
        states = [self.optimizer.state[g["params"][0]] for g in self.optimizer.param_groups]
        return (
            torch.cat([s["exp_avg"] for s in states]),
            torch.cat([s["exp_avg_sq"] for s in states]),
            states[0]["step"].clone(),
        )

    @torch.no_grad()
    def restore(self, masters: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float) -> None:
        """Put back what `flat.masters` and `moments` gave, in place."""
        n = self.flat.matrices
        self.flat.masters.copy_(masters)
        for group, at in zip(self.optimizer.param_groups, (slice(0, n), slice(n, None)), strict=True):
            state = self.optimizer.state[group["params"][0]]
            state["exp_avg"].copy_(exp_avg[at])
            state["exp_avg_sq"].copy_(exp_avg_sq[at])
            state["step"].fill_(step)
        self.flat.publish()


def learning_rate(step: int, total: int, optim: OptimConfig) -> float:
    """Rate of optimizer step `step` (0-based) of `total`: linear warm-up, then cosine or warm-up-stable-decay."""
    from math import cos, pi

    warmup = round(optim.warmup * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    floor = optim.lr * optim.min_lr_ratio
    if optim.schedule == "cosine":
        done = (step - warmup) / max(1, total - warmup)
        return floor + (optim.lr - floor) * 0.5 * (1 + cos(pi * done))
    decay = round(optim.decay * total)
    left = total - step
    return optim.lr if left > decay else floor + (optim.lr - floor) * left / max(1, decay + 1)
