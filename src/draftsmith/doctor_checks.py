"""Checks on a trainer's step: one shape, one compilation, one replay, and the right numbers.

Every check takes the real step, with a unit loaded through its static buffers, and returns verdicts. Numbers are
compared with a plain eager micro-step put together here from the same public parts, over the same buffers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftsmith.attention import BlockAttention
from draftsmith.doctor_probe import Compilation, host_reads
from draftsmith.doctor_verdict import Verdict, failed, judge, not_checked
from draftsmith.errors import first_line
from draftsmith.loss import block_cross_entropy
from draftsmith.static import FIELDS, StaticUnit
from draftsmith.step import TrainStep, draft_states

SCALE_LIMIT = 2e-3  # |<g, g_ref> / <g_ref, g_ref> - 1| of a parameter group
NOISE_LIMIT = 8e-3  # at most, where eager does not repeat itself or a tiny model's gradients feel rounding
COSINE_LIMIT = {4: 0.9999, 2: 0.99}  # of a parameter group, by bytes of the compute dtype
SIGN_LIMIT = 0.8  # cosine of a single parameter: rounding in half precision stays above, a wrong sign far below
SAME_LOSS = {4: 1e-5, 2: 2e-3}  # relative, between two ways to compute the same
SAME_GRADIENT = {4: 1e-3, 2: 5e-2}
LEAK_LIMIT = {4: 1e-5, 2: 5e-3}  # relative change of gradients by what should not matter at all


@dataclass(frozen=True)
class Exhibit:
    """A copy of a loaded unit with its taps, to be put back into the static buffers as often as needed."""

    tensors: dict[str, Tensor]

    @classmethod
    def take(cls, static: StaticUnit) -> Self:
        return cls({name: getattr(static, name).clone() for name in ("number", *FIELDS, "taps")})

    def put(self, static: StaticUnit, **changed: Tensor) -> None:
        """Fill the static buffers in place, some of them with other values."""
        for name, value in {**self.tensors, **changed}.items():
            getattr(static, name).copy_(value)


def check_graph_breaks(mode: str, breaks: int) -> Verdict:
    """`breaks` were counted while everything was compiled; the step itself is compiled with fullgraph."""
    name = "graph breaks"
    if mode == "eager" and not breaks:
        return not_checked(name, "mode eager compiles nothing")
    return judge(
        name,
        not breaks,
        f"{breaks} while setting up; the step's body is compiled as one graph or not at all",
        "the compiler gave up in the middle of something and went on in Python",
        "TORCH_LOGS=graph_breaks names the line",
    )


def uncompiled(error: RuntimeError) -> Verdict:
    """The set-up of a worker failed in the compiler or on the device."""
    return failed(
        "graph breaks",
        f"set-up raised {type(error).__name__}",
        first_line(error),
        'run.mode = "eager" shows whether it is the compiler; the worker\'s log has the whole message',
    )


def check_compilations(
    seen: list[Compilation], late: list[Compilation], units: int, mode: str, reasons: list[str]
) -> list[Verdict]:
    """`seen` while setting up, `late` over `units` different units afterwards."""
    name = "compiled once"
    if mode == "eager" and not seen and not late:
        return [
            not_checked(name, "mode eager compiles nothing"),
            not_checked("compile lock", "mode eager compiles nothing"),
        ]
    figure = f"{len(seen)} compilations at start, {len(late)} over {units} different units"
    cause = f"compiled again at {late[0].place}" + (f": {reasons[-1]}" if reasons else "") if late else ""
    remedy = "keep every shape fixed: no tensor's size may depend on what is in the unit"
    verdicts = [judge(name, not late and bool(seen), figure, cause or "nothing was compiled at all", remedy)]
    bare = [c for c in (*seen, *late) if not c.locked]
    verdicts.append(
        judge(
            "compile lock",
            not bare,
            f"{len(seen) + len(late) - len(bare)} of {len(seen) + len(late)} compilations under the lock",
            f"thread {bare[0].thread} compiled at {bare[0].place} without COMPILE_LOCK" if bare else "",
            "torch.compile is not thread-safe: compile under step_modes.COMPILE_LOCK, before any worker trains",
        )
    )
    return verdicts


def check_addresses(count: int, moved: list[str], units: int) -> Verdict:
    """`moved`: which of `count` buffers were at another address after one of `units` units."""
    return judge(
        "input pointers",
        not moved,
        f"{count - len(moved)} of {count} addresses unchanged over {units} units",
        f"{', '.join(moved[:3])}: a new tensor took the place of the buffer, and a replayed graph reads the old one",
        "write into the buffer (copy_), never replace it",
    )


def check_host_reads(step: TrainStep, exhibit: Exhibit) -> Verdict:
    """A whole step (micro-step and update without learning) may not wait for the device."""
    name, device = "host syncs", step.device

    def run() -> None:
        step.accumulate()
        step.update(0.0)

    step.clear()
    exhibit.put(step.static)
    with kept_state(step):
        places = host_reads(run, device)
    what = "waits for the device" if device.type == "cuda" else "reads of values on the host"
    return judge(
        name,
        not places,
        f"{len(places)} {what} in a micro-step and an update",
        f"{places[0]}" if places else "",
        "leave the value on the device (torch.where, a device scalar); read it at log steps",
    )


@contextmanager
def kept_state(step: TrainStep) -> Iterator[None]:
    """Weights, moments and counters are as before at the end."""
    tensors = [step.flat.masters, step.adamw.exp_avg, step.adamw.exp_avg_sq, step.adamw.count, step.skips, step.norm]
    saved = [t.to("cpu", copy=True) for t in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        step.flat.publish()
        step.clear()


def fingerprint(step: TrainStep) -> Tensor:
    """Host copy of the loaded unit's whole gradient [P]: unlike the loss it feels every input strongly, also at random
    weights. Leaves the flat buffer empty."""
    step.clear()
    step.accumulate()
    gradient = step.flat.gradient.to("cpu", copy=True)
    step.clear()
    return gradient


def distance(step: TrainStep, reference: Tensor) -> float:
    """|g - r| / |r| of the loaded unit's gradient g, in the parameter group where it is largest; infinite for NaN."""
    step.clear()
    step.accumulate()
    apart: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    flat = step.flat
    for name, g, r in zip(flat.names, flat.views(flat.gradient), flat.views(reference), strict=True):
        r = r.to(g.device)
        apart[kind_of(name)] += torch.stack(((g - r).norm().double() ** 2, r.norm().double() ** 2)).cpu()
    step.clear()
    shares = [float((d / n).sqrt()) if n != 0 else float(d != 0) for d, n in apart.values()]
    return max(share if share == share else float("inf") for share in shares)


def kind_of(parameter: str) -> str:
    """layers.3.qkv_proj.weight -> qkv_proj: the group that a parameter belongs to."""
    return parameter.removesuffix(".weight").rpartition(".")[2]


def check_inputs(step: TrainStep, exhibit: Exhibit, other: Exhibit) -> list[Verdict]:
    """The stale-input test: every input, changed alone, changes the gradients; a repeated unit gives the same ones."""
    static, first = step.static, exhibit.tensors
    vocabulary = step.tables.embedding.shape[0]
    blocks = torch.arange(len(first["anchors"]), device=step.device)[:, None]
    changes: dict[str, dict[str, Tensor]] = {
        "taps": {"taps": first["taps"].roll(1, 0)},
        "ids": {"ids": (first["ids"] + 1) % vocabulary},
        "positions": {"positions": first["positions"] * 3},
        "anchors": {"anchors": other.tensors["anchors"], "starts": other.tensors["starts"]},
        "labels": {"labels": (first["labels"] + 1) % vocabulary},
        "scored": {"scored": first["scored"] & (blocks % 2 == 0)},
    }
    exhibit.put(static)
    reference = fingerprint(step)
    again = distance(step, reference)
    moved = {}
    for name, change in changes.items():
        exhibit.put(static, **change)
        moved[name] = distance(step, reference)
    exhibit.put(static)
    dead = [name for name, share in moved.items() if share <= max(1e-6, 4 * again)]
    figure = "changed alone, they move the gradients by " + ", ".join(f"{n} {share:.1e}" for n, share in moved.items())
    return [
        judge(
            "stale inputs",
            not dead,
            figure,
            f"the step does not see its {' and '.join(dead)}: other values give the same gradients",
            "the compiled or captured step reads an old copy, or the input is not connected",
        ),
        judge(
            "repeatable",
            again <= LEAK_LIMIT[step.static.taps.element_size()],
            f"the same unit again: gradients differ by {again:.1e}",
            "the step keeps something from one unit to the next",
            "look for a buffer that is added to and not cleared",
        ),
    ]


def plain_micro_step(step: TrainStep) -> float:
    """Forward, loss and backward of the loaded unit, eagerly, into the step's own flat gradient. Returns the loss."""
    static = step.static
    attention = BlockAttention.choose(step.drafter.shape, step.device, static.taps.dtype, compiled=False)
    states = draft_states(step.drafter, static, step.tables, attention, False)
    result = block_cross_entropy(
        states.detach(), step.tables.head, static.labels, static.scored, step.slot_weights, step.dpace_alpha
    )
    states.backward(result.gradient * step.constant)
    step.flat.collect()
    return float(result.loss)


@dataclass(frozen=True)
class Agreement:
    """Of one gradient g with its reference r."""

    scale: float  # <g, r> / <r, r>
    cosine: float


def check_numbers(step: TrainStep, exhibit: Exhibit) -> list[Verdict]:
    """Loss and gradients of the mode against eager on the same unit, after eager against eager."""
    exhibit.put(step.static)
    item = step.static.taps.element_size()
    loss_ref, reference = _eager(step)
    loss_again, again = _eager(step)
    noise_scale = _furthest(_groups(step, again, reference))
    exhibit.put(step.static, taps=_last_bits_flipped(exhibit.tensors["taps"]))
    _, again = _eager(step)
    rounding = _furthest(_groups(step, again, reference))
    del again
    exhibit.put(step.static)
    step.clear()
    step.accumulate()
    loss, mine = float(step.flat.sums[1]), step.flat.gradient
    groups = _groups(step, mine, reference)
    single = _agreements(step, mine, reference)
    step.clear()
    limit = max(SCALE_LIMIT, min(max(4 * noise_scale, 2 * rounding), NOISE_LIMIT))
    worst = max(groups, key=lambda g: abs(groups[g].scale - 1))
    coldest = min(groups, key=lambda g: groups[g].cosine)
    flipped = [name for name, a in single.items() if not a.cosine > SIGN_LIMIT]
    off = [g for g, a in groups.items() if not abs(a.scale - 1) <= limit or not a.cosine >= COSINE_LIMIT[item]]
    difference = abs(loss - loss_ref) / abs(loss_ref)
    noise = abs(loss_again - loss_ref) / abs(loss_ref)
    return [
        judge(
            "loss against eager",
            difference <= max(SAME_LOSS[item], 4 * noise),
            f"mode {step.mode} {loss:.6g}, eager {loss_ref:.6g}: {difference:.1e} relative (eager twice: {noise:.1e})",
            "the step in this mode computes another loss",
            'train with run.mode = "eager" or "compile" until the cause is found',
        ),
        judge(
            "gradients against eager",
            not off and not flipped,
            f"{len(groups)} parameter groups: scale within {abs(groups[worst].scale - 1):.1e} of 1 ({worst}), cosine >= "
            f"{groups[coldest].cosine:.6f} ({coldest}); eager twice: {noise_scale:.1e}, taps rounded otherwise: {rounding:.1e}",
            _blame(groups, single, off, flipped),
            'train with run.mode = "eager" or "compile" until the cause is found',
        ),
    ]


def _blame(groups: dict[str, Agreement], single: dict[str, Agreement], off: list[str], flipped: list[str]) -> str:
    if flipped:
        a = single[flipped[0]]
        return f"{flipped[0]} points another way: cosine {a.cosine:.3f}, scale {a.scale:.3f}"
    if len(off) == len(groups):
        scales = [a.scale for a in groups.values()]
        return f"all gradients are off, scales {min(scales):.4f} to {max(scales):.4f}"
    return "; ".join(f"{g}: scale {groups[g].scale:.4f}, cosine {groups[g].cosine:.5f}" for g in off[:3])


def _furthest(groups: dict[str, Agreement]) -> float:
    return max(abs(a.scale - 1) for a in groups.values())


def _last_bits_flipped(taps: Tensor) -> Tensor:
    """Every value moved by one unit in its last place: what this moves the gradients by, rounding may, too."""
    kind = torch.int16 if taps.element_size() == 2 else torch.int32
    return (taps.view(kind) ^ 1).view(taps.dtype)


def _eager(step: TrainStep) -> tuple[float, Tensor]:
    """Loss and a host copy of the gradient [P] of a plain eager micro-step."""
    step.flat.reduced.zero_()
    loss = plain_micro_step(step)
    gradient = step.flat.gradient.to("cpu", copy=True)
    step.flat.reduced.zero_()
    return loss, gradient


def _products(step: TrainStep, mine: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Parameter -> float64 (<g, r>, <r, r>, <g, g>)."""
    products = {}
    for name, g, r in zip(step.flat.names, step.flat.views(mine), step.flat.views(reference), strict=True):
        g, r = (x.to(step.device).double().flatten() for x in (g, r))
        products[name] = torch.stack((g @ r, r @ r, g @ g)).cpu()
    return products


def _agreements(step: TrainStep, mine: Tensor, reference: Tensor) -> dict[str, Agreement]:
    """Of each parameter; those without a gradient in both agree."""
    return {name: _agreement(p) for name, p in _products(step, mine, reference).items()}


def _groups(step: TrainStep, mine: Tensor, reference: Tensor) -> dict[str, Agreement]:
    """Of each kind of parameter over all layers."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for name, product in _products(step, mine, reference).items():
        sums[kind_of(name)] += product
    return {name: _agreement(p) for name, p in sums.items()}


def _agreement(products: Tensor) -> Agreement:
    gr, rr, gg = products.tolist()
    if rr == 0 and gg == 0:
        return Agreement(1.0, 1.0)
    return Agreement(gr / rr if rr else float("inf"), gr / (rr * gg) ** 0.5 if rr and gg else 0.0)


def check_isolation(step: TrainStep, exhibit: Exhibit) -> list[Verdict]:
    """One document of a packed row: other neighbours change nothing, and alone in a row it has the same gradients."""
    name = "packed document, step"
    tensors, static = exhibit.tensors, step.static
    starts = tensors["starts"][tensors["scored"].any(-1)].unique()
    if not len(starts):
        return [not_checked(name, "the unit has no scored block")]
    start = int(starts[len(starts) // 2])  # with neighbours before it, where the row holds several documents
    inside = tensors["documents"] == tensors["documents"][start]  # [T]
    own = (tensors["starts"] == start) & tensors["scored"].any(-1)  # [A]
    scored = tensors["scored"] & own[:, None]
    exhibit.put(static, scored=scored)
    packed = fingerprint(step)
    taps = torch.where(inside[:, None], tensors["taps"], tensors["taps"].roll(7, 0) * 2)
    ids = torch.where(inside, tensors["ids"], tensors["ids"].roll(7))
    exhibit.put(static, scored=scored, taps=taps, ids=ids)
    moved = distance(step, packed)
    exhibit.put(static, **_alone(tensors, start, inside, own))
    apart = distance(step, packed)
    item = tensors["taps"].element_size()
    leak, same = LEAK_LIMIT[item], SAME_GRADIENT[item]
    return [
        judge(
            name,
            moved <= leak and apart <= same,
            f"other neighbours move its gradients by {moved:.1e}, packed against alone {apart:.1e} (limit {same:.0e})",
            "a neighbour leaks into the document" if moved > leak else "its place in the row changes its gradients",
            "blocks may see only their own document, before their anchor: look at the attention's mask",
        )
    ]


def _alone(tensors: dict[str, Tensor], start: int, inside: Tensor, own: Tensor) -> dict[str, Tensor]:
    """The buffers of a row that holds one document at its beginning and nothing else."""
    length, count = int(inside.sum()), int(own.sum())
    T = len(inside)
    changed = {}
    for name in ("ids", "taps"):
        changed[name] = torch.zeros_like(tensors[name])
        changed[name][:length] = tensors[name][inside]
    rest = torch.arange(T, device=inside.device)
    changed["documents"] = (rest >= length).long()
    changed["positions"] = torch.where(rest < length, rest, rest - length)
    for name in ("anchors", "starts"):
        changed[name] = torch.full_like(tensors[name], T - 1)
        changed[name][:count] = tensors[name][own] - start
    for name in ("labels", "scored"):
        changed[name] = torch.zeros_like(tensors[name])
        changed[name][:count] = tensors[name][own]
    return changed


def guarded(name: str, check: Callable[[], list[Verdict]]) -> list[Verdict]:
    """A check whose step itself breaks is a failure with torch's own words."""
    try:
        return check()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raised = f"raised {type(error).__name__}"
        return [failed(name, raised, first_line(error), "see the worker's log for the whole message")]
