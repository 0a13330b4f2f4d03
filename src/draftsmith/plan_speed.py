"""How long a step takes and which topology is fastest: arithmetic of the roles' work over measured or built-in rates.

Colocated, a device alternates: ceil(G/R) x (prefill + micro-step), then the all-reduce and the update. Split N:M, both
sides work at once and the slower one decides: targets G/N prefills, trainers ceil(G/M) micro-steps and the update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from draftsmith.drafters.dflash import DFlashShape, useful_flops
from draftsmith.plan_memory import TargetSize, parameter_count
from draftsmith.rates import Rates
from draftsmith.unit import UnitShape

# Bytes that pass through device memory a parameter: a micro-step reads and writes the float32 gradient; an update reads
# it for its norm, then reads four float32 and writes four and a bfloat16 in one pass.
UNIT_TRAFFIC, UPDATE_TRAFFIC = 8, 38
BACKWARD = 3.5  # forward and backward of attention, in forwards
LAUNCH = 5e-4  # seconds that no device can be quicker in: a graph's launch, copies of the unit, the loop itself


@dataclass(frozen=True)
class Work:
    """Arithmetic of one unit, whatever does it."""

    prefill: float
    """FLOP of the target's layers up to the last tap."""
    step: float
    """Useful FLOP of the drafter's forward and backward without attention."""
    attention: float
    """FLOP of the draft blocks' attention, forward and backward."""
    parameters: int
    taps_bytes: int


def work_of(
    shape: DFlashShape, unit: UnitShape, target: TargetSize, mean_context: float, squared_lengths: float, item: int
) -> Work:
    """`mean_context`: tokens of its document before an anchor. `squared_lengths`: sum of length^2 over a row's documents.
    `item`: bytes of the compute dtype."""
    T, N = unit.tokens, unit.anchors * unit.block_size
    heads = shape.num_heads * shape.head_dim
    return Work(
        prefill=2.0 * T * target.active + 4.0 * target.layers * target.head_width * squared_lengths / 2,
        step=useful_flops(shape, T, unit.anchors),
        attention=BACKWARD * shape.num_layers * 4.0 * heads * N * (mean_context + unit.block_size),
        parameters=parameter_count(shape),
        taps_bytes=T * len(shape.taps) * shape.hidden_size * item,
    )


@dataclass(frozen=True)
class Times:
    """Seconds of each part on one device, and where they are from."""

    source: str
    estimate: bool
    prefill: float
    unit: float
    update: float
    pull: float
    """A trainer's copy of a unit's taps from another device, while the current unit is trained."""
    copy: float
    """From the staging buffer into the step's input, between two units."""
    reduce: float
    """All-reduce of the gradients between two trainers; among R it takes 2(R-1)/R of this."""
    scatter: float = 1.0
    """The slowest measured unit's time over the fastest's."""


def times_by_rates(work: Work, rates: Rates) -> Times:
    """Predict from a table row (rates.py)."""
    tera, giga = 1e12, 1e9
    return Times(
        source=rates.source,
        estimate=rates.estimate,
        prefill=work.prefill / (rates.prefill * tera) + LAUNCH,
        unit=LAUNCH
        + work.step / (rates.step * tera)
        + work.attention / (rates.attention * tera)
        + work.parameters * UNIT_TRAFFIC / (rates.traffic * giga),
        update=work.parameters * UPDATE_TRAFFIC / (rates.traffic * giga) + LAUNCH,
        pull=work.taps_bytes / (rates.pull * giga),
        copy=2 * work.taps_bytes / (rates.traffic * giga),
        reduce=4 * work.parameters / (rates.reduce * giga),
    )


@dataclass(frozen=True)
class Layout:
    """Who does what: colocated over `trainers` devices, or `targets` devices that feed `trainers` devices."""

    kind: Literal["colocated", "split"]
    targets: int
    trainers: int
    workers: Literal["processes", "threads"] = "processes"

    @property
    def devices(self) -> int:
        return self.trainers if self.kind == "colocated" else self.targets + self.trainers

    @property
    def name(self) -> str:
        shape = f"colocated x {self.trainers}" if self.kind == "colocated" else f"split {self.targets}:{self.trainers}"
        return shape + (", threads" if self.workers == "threads" else "")


def layouts(devices: int) -> list[Layout]:
    """Every way to use exactly `devices` devices of one host."""
    both = [Layout("colocated", devices, devices)]
    both += [Layout("split", n, devices - n) for n in range(1, devices)]
    if devices > 1:
        both += [Layout(x.kind, x.targets, x.trainers, "threads") for x in both]
    return both


@dataclass(frozen=True)
class Prediction:
    """One topology's speed."""

    layout: Layout
    step_seconds: float
    units_per_second: float
    tokens_per_second: float
    target_busy: float
    """Share of the time that a target's device works on prefill."""
    trainer_busy: float
    bound_by: Literal["targets", "trainers", "both"]
    fits: bool
    bytes_needed: int
    """On the fullest device."""


def predict(
    layout: Layout, times: Times, per_step: int, tokens: int, needed: Callable[[Layout], int], room: int
) -> Prediction:
    """Speed of a layout with G = `per_step`. `needed` gives the bytes on its fullest device, `room` those a device has."""
    R = layout.trainers
    end = times.update + (2 * (R - 1) / R * times.reduce if R > 1 else 0.0)
    mine = -(-per_step // R)  # the trainer with the most units
    if layout.kind == "colocated":
        prefill, train = mine * times.prefill, mine * times.unit + end
        seconds, bound = prefill + train, "both"
    else:
        prefill = per_step / layout.targets * times.prefill
        train = mine * (max(times.unit, times.pull) + times.copy) + end
        seconds = max(prefill, train)
        bound = "targets" if prefill > train else "trainers"
    need = needed(layout)
    return Prediction(
        layout=layout,
        step_seconds=seconds,
        units_per_second=per_step / seconds,
        tokens_per_second=per_step * tokens / seconds,
        target_busy=prefill / seconds,
        trainer_busy=train / seconds,
        bound_by=bound,
        fits=need <= room,
        bytes_needed=need,
    )


def rank(predictions: list[Prediction]) -> list[Prediction]:
    """Those that fit first, then the faster ones, then the simpler ones."""
    return sorted(
        predictions,
        key=lambda p: (not p.fits, -round(p.units_per_second, 9), p.layout.workers, p.layout.kind != "colocated"),
    )
