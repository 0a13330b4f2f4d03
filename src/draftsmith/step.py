"""One training step: static inputs, forward + loss + backward per unit, and the update of float32 masters by the sum law.

Sum law: backward runs on sum(weight * loss) times a constant; gradients and sums of every unit and trainer of a step
are added up in one flat float32 buffer [gradients | sums]; only the update divides, by the step's one denominator. So
the same units give the same step however they are spread over micro-batches and trainers.

Everything has one shape for the whole run and reads and writes fixed buffers, so that each half of a step (micro-step,
update) can be one CUDA graph: it launches once, allocates nothing and never waits for the host (step_modes.py).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.attention import BlockAttention
from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.loss import BlockLoss, Head, block_cross_entropy, decay_weights
from draftsmith.optimizer import AdamW, FlatParameters
from draftsmith.static import PinnedRing, StaticUnit
from draftsmith.step_modes import (
    WARM_UP,
    Graph,
    compiled,
    compiling,
    on_side_stream,
    resolve_mode,
)
from draftsmith.unit import UnitShape


@dataclass(frozen=True)
class Tables:
    """The target's frozen embedding and head, in the compute dtype, as the trainer needs them."""

    embedding: Tensor  # [V, H]
    embed_scale: float
    head: Head

    def describe(self) -> str:
        """One sentence for a run's start."""
        head = self.head
        tied = "tied" if head.weight is self.embedding else "apart"
        cap = f"soft-capped at {head.softcap:g}" if head.softcap else "without soft-cap"
        return (
            f"embedding x {self.embed_scale:g}, head {tied}, logits x {head.scale:g}, {cap}: as measured on its classes"
        )


@dataclass(frozen=True)
class StepStats:
    """Host copy of one optimizer step's sums over all trainers."""

    loss: float  # weighted mean cross-entropy
    gradient_norm: float  # before clipping
    skipped_total: int  # updates that left the weights, since the step was made: non-finite gradients, denominator 0
    skipped_in_row: int
    bad_unit: int  # the last unit of this trainer whose loss was not finite, or -1
    stop: bool
    block_acceptance: float  # mean accepted length of the step's blocks, bonus included (anchors at random places)
    slot_accuracy: tuple[float, ...]  # per slot 1..B-1, among scored slots


class TrainStep:
    """Everything that happens on the trainer's device for one step. `accumulate` once a unit, then `update`.

    The first `accumulate` or `update` prepares (compiles, captures) unless `prepare` was called before.
    """

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
        mode: str = "auto",
        attention: str | None = None,
    ):
        """`mode` as in RunConfig; `attention` names an implementation of attention.py instead of the device's choice."""
        self.drafter, self.tables, self.shape, self.optim = drafter, tables, shape, optim
        self.device = device
        self.mode = resolve_mode(mode, device)
        self.flat = FlatParameters(drafter, dtype, device)
        self.adamw = AdamW(self.flat, optim)
        self.static = StaticUnit(shape, drafter.fc.in_features, dtype, device)
        self.slot_weights = decay_weights(shape.block_size, loss.gamma, device)
        self.dpace_alpha = loss.alpha if loss.weighting == "dpace" else None
        self.constant = 1.0 / (shape.anchors * (shape.block_size - 1))  # keeps gradients near 1 whatever the shape
        self.checkpoint_activations = checkpoint_activations
        self.attention = BlockAttention.choose(drafter.shape, device, dtype, self.mode != "eager", attention)
        self.norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skips = torch.zeros(2, device=device)  # total, in a row
        self.bad_unit = torch.full((), -1, dtype=torch.int64, device=device)
        self.stats = torch.zeros(len(self.flat.sums) + 4, device=device)  # the last update's, for `read`
        self._ring = PinnedRing(self.stats)
        self._dirty = False
        self._states = compiled(draft_states, self.mode)
        self._apply = self.adamw.fused if device.type == "cuda" and self.mode != "eager" else self.adamw.plain
        self._micro, self._finish = self._micro_step, self._update_step
        self.prepared = self.mode == "eager"

    def prepare(self) -> None:
        """Compile forward, backward and update, and capture them in mode graph. Weights and counters stay as they are.

        In threads: call it in every worker before any trains; a lock takes them one after the other.
        """
        if self.prepared:
            return
        with compiling(), self._on_device():
            kept = self.flat.reduced.clone() if self._dirty else None
            saved = [x.clone() for x in self._counters()]
            self.flat.reduced.zero_()
            if self.mode == "graph":
                self._capture()
            else:
                self._micro_step()
                self.flat.reduced.zero_()
                self._update_step()  # a step without units has denominator 0: it is skipped, whatever the weights
            self.evaluate()  # its attention may be a compiled kernel, too
            if kept is not None:
                self.flat.reduced.copy_(kept)
            for x, value in zip(self._counters(), saved, strict=True):
                x.copy_(value)
            self.prepared = True

    def _on_device(self) -> AbstractContextManager:
        """Triton's kernels run on the current device, which need not be this one outside a worker."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _counters(self) -> tuple[Tensor, ...]:
        return self.norm, self.skipped, self.skips, self.bad_unit, self.stats

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device):
            for function, name in ((self._micro_step, "_micro"), (self._update_step, "_finish")):
                for _ in range(WARM_UP):
                    on_side_stream(function, stream)
                    self.flat.reduced.zero_()
                setattr(self, name, Graph(function, stream))

    def accumulate(self) -> None:
        """Forward, loss and backward of the loaded unit, added to the flat buffer."""
        self.prepare()
        self._dirty = True
        with self._on_device():
            self._micro()

    def _micro_step(self) -> None:
        states = self._states(self.drafter, self.static, self.tables, self.attention, self.checkpoint_activations)
        result = self._loss(states.detach(), gradient=True)
        states.backward(result.gradient * self.constant)
        self.flat.collect()
        self._add_sums(result)

    def _loss(self, states: Tensor, gradient: bool) -> BlockLoss:
        s = self.static
        return block_cross_entropy(
            states, self.tables.head, s.labels, s.scored, self.slot_weights, self.dpace_alpha, gradient
        )

    @torch.no_grad()
    def _add_sums(self, result: BlockLoss) -> None:
        scored = self.static.scored
        self.bad_unit.copy_(torch.where(result.loss.isfinite(), self.bad_unit, self.static.number))
        bad = (~result.loss.isfinite()).float()
        accepted, blocks = result.correct.cumprod(-1).sum(), scored[:, 0].sum()
        head = torch.stack((result.denominator, result.loss, bad, torch.zeros_like(bad), accepted, blocks))
        self.flat.sums.add_(torch.cat((head, result.correct.sum(0), scored.sum(0))))

    def request_stop(self) -> None:
        """Travels with the gradients, so that every trainer learns of it in the same step."""
        self.flat.sums[3] += 1
        self._dirty = True

    def update(self, lr: float) -> None:
        """Divide by the denominator, clip, AdamW, publish; the flat buffer is zero afterwards. Skipped on the device
        where gradients are not finite or nothing was scored."""
        self.prepare()
        self.adamw.lr.fill_(lr)
        with self._on_device():
            self._finish()
        self._ring.put()
        self._dirty = False

    @torch.no_grad()
    def _update_step(self) -> None:
        flat, sums = self.flat, self.flat.sums
        empty = sums[0] <= 0
        scale = torch.where(empty, 1.0, 1.0 / (sums[0] * self.constant))
        self.norm.copy_(torch.linalg.vector_norm(flat.gradient) * scale)
        self.skipped.copy_((~self.norm.isfinite() | empty | (sums[2] > 0)).float())
        self.skips.copy_((self.skips + self.skipped) * torch.stack((torch.ones_like(self.norm), self.skipped)))
        clip = (self.optim.clip / (self.norm + 1e-6)).clamp(max=1.0) if self.optim.clip > 0 else 1.0
        rest = torch.stack((self.norm, *self.skips, self.bad_unit.float()))
        self.stats.copy_(torch.cat((sums, rest)))
        self._apply(scale * clip, self.skipped)
        sums.zero_()

    def read(self) -> StepStats:
        """The last update's sums over all trainers; waits for that update, and for nothing enqueued after it."""
        values = self._ring.get()
        count = len(self.flat.sums)
        sums, (norm, total, in_row, bad) = values[:count], values[count:]
        slots = self.shape.block_size - 1
        correct, scored = sums[6 : 6 + slots], sums[6 + slots :]
        return StepStats(
            loss=sums[1] / sums[0] if sums[0] > 0 else float("nan"),
            gradient_norm=norm,
            skipped_total=int(total),
            skipped_in_row=int(in_row),
            bad_unit=int(bad),
            stop=sums[3] > 0,
            block_acceptance=1 + sums[4] / max(1.0, sums[5]),
            slot_accuracy=tuple(c / n if n else 0.0 for c, n in zip(correct, scored, strict=True)),
        )

    def replays(self) -> int | None:
        """Replays of its two CUDA graphs so far; None in other modes."""
        graphs = [g for g in (self._micro, self._finish) if isinstance(g, Graph)]
        return sum(g.replays for g in graphs) if graphs else None

    def clear(self) -> None:
        """Drop what was accumulated since the last update (`update` itself leaves nothing)."""
        if self._dirty:
            self.flat.reduced.zero_()
            self._dirty = False

    @torch.no_grad()
    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Of the loaded unit, without a trace in the step: greedy accepted drafts of every block, [A] int64 (bonus not
        included), and the weighted loss with its denominator, [2] float32."""
        with self._on_device():
            states = draft_states(self.drafter, self.static, self.tables, self.attention, False)
            result = self._loss(states, gradient=False)
        return result.correct.cumprod(-1).sum(-1), torch.stack((result.loss, result.denominator))

    @torch.no_grad()
    def restore(self, masters: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float) -> None:
        """Put back the masters, AdamW's moments (all flat, [P] float32) and its step count, in place."""
        self.flat.masters.copy_(masters)
        self.adamw.exp_avg.copy_(exp_avg)
        self.adamw.exp_avg_sq.copy_(exp_avg_sq)
        self.adamw.count.fill_(step)
        self.flat.publish()


def draft_states(
    drafter: DFlash, unit: StaticUnit, tables: Tables, attention: BlockAttention, recompute: bool
) -> Tensor:
    """Forward of a loaded unit: normed states of the drafted slots [A, B-1, H]. What the modes compile."""
    attend = attention.over(unit.anchors, unit.starts, unit.ids.shape[0])
    anchor = F.embedding(unit.ids[unit.anchors], tables.embedding) * tables.embed_scale  # [A, H]
    mask = tables.embedding[drafter.shape.mask_token] * tables.embed_scale
    slot = torch.arange(drafter.shape.block_size, device=unit.ids.device)
    positions = unit.positions[unit.anchors][:, None] + slot
    return drafter.drafts(anchor, mask, drafter.fuse(unit.taps), positions, unit.positions, attend, recompute)


def learning_rate(step: int, total: int, optim: OptimConfig) -> float:
    """Rate of optimizer step `step` (0-based) of `total`: linear warm-up, then cosine or warm-up-stable-decay."""
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
