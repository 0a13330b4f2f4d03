"""A plan as people read it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftsmith.console import duration, number, size
from draftsmith.rates import GIB

if TYPE_CHECKING:
    from draftsmith.plan import Plan

SHOWN = 8  # topologies


def render(plan: "Plan") -> str:
    """All of it, for a terminal."""
    return "\n".join([*_head(plan), *_shape(plan), *_memory(plan), *_disk(plan), *_topologies(plan), *_advice(plan)])


def _head(plan: "Plan") -> Iterator[str]:
    p = plan.place
    where = "in this machine" if p.here else "not in this machine, by its datasheet"
    yield f"plan for {p.count} x {p.name} ({p.memory / GIB:.1f} GiB each that may be filled; {where})"
    if plan.times is not None:
        yield f"times: {plan.times.source}"
    yield ""
    c = plan.corpus
    yield (
        f"corpus    {c.documents:,} documents, {number(c.tokens)} tokens, mean {c.mean_length:.0f}, longest {c.longest}; "
        f"an epoch is {c.rows_in_epoch:,} rows, {c.tokens_used:.1%} of their tokens and {c.anchors_used:.1%} of their "
        "anchors used"
    )
    yield (
        f"run       {plan.steps:,} steps, {number(plan.tokens_seen)} tokens, {number(plan.blocks_seen)} blocks; "
        f"{plan.parameters / 1e6:.1f} M trained parameters; {plan.work.step / 1e12:.3g} TFLOP of training and "
        f"{plan.work.prefill / 1e12:.3g} of prefill a unit"
    )


def _shape(plan: "Plan") -> Iterator[str]:
    p, r = plan.proposal, plan.recipe_shape
    yield (
        f"shape     recipe T = {r['T']}, A = {r['A']}, G = {r['G']}; "
        f"proposed T = {p.tokens}, A = {p.anchors}, anchor_rate = {p.anchor_rate:.4g}, G = {p.per_step}"
    )
    yield from (f"          {reason}" for reason in p.reasons)


def _memory(plan: "Plan") -> Iterator[str]:
    yield ""
    for budget in plan.budgets:
        fits = "fits" if budget.total <= plan.place.memory else "DOES NOT FIT"
        name = {"both": "colocated worker", "target": "target worker", "trainer": "trainer"}[budget.role]
        yield f"memory    {name}: {size(budget.total)}, {fits}"
        for line in budget.lines:
            if line.bytes:
                yield f"          {size(line.bytes):>10}  {line.name}"


def _disk(plan: "Plan") -> Iterator[str]:
    d = plan.disk
    yield f"disk      {size(d.checkpoint)} a checkpoint, {size(d.kept)} at most"


def _topologies(plan: "Plan") -> Iterator[str]:
    yield ""
    if not plan.ranking:
        return
    width = max(len(p.layout.name) for p in plan.ranking)
    yield f"          {'topology':<{width}}  s/step  units/s  tokens/s  target busy  trainer busy  memory"
    for p in plan.ranking[:SHOWN]:
        yield (
            f"          {p.layout.name:<{width}}  {digits(p.step_seconds):>6}  {digits(p.units_per_second):>7}  "
            f"{number(p.tokens_per_second):>8}  {p.target_busy:11.0%}  {p.trainer_busy:12.0%}  {size(p.bytes_needed)}"
            + ("" if p.fits else "  does not fit")
        )
    if len(plan.ranking) > SHOWN:
        yield f"          and {len(plan.ranking) - SHOWN} slower ones"
    if plan.seconds is not None and plan.device_hours is not None:
        best = plan.ranking[0]
        yield (
            f"time      {duration(plan.seconds)} with {best.layout.name}: {digits(plan.device_hours)} device-hours"
            + (" (an estimate)" if plan.times is not None and plan.times.estimate else "")
        )


def _advice(plan: "Plan") -> Iterator[str]:
    yield f"card      smallest that holds target and trainer: {plan.smallest_card or 'none in the table; split the roles'}"
    yield (
        f"target    largest of the known dense ones that one {plan.place.name} holds colocated with this T and A: "
        + (plan.largest_target or "none")
    )
    yield from (f"note      {note}" for note in plan.notes)


def digits(value: float) -> str:
    """At least three of them: 0.0133, 1.00, 123, 1,340."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
