"""`draftsmith plan`: what a recipe will take, by arithmetic: memory of each role, disk, steps, time, the best topology.

With a device that holds both roles, these are timed for a few units (plan_measure.py). Without one, or for another card
(`--device h200 --count 8`), nothing is loaded: the built-in rates are used, and the answer says so.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from draftsmith.config import Config
from draftsmith.console import size
from draftsmith.errors import UserError
from draftsmith.job import Job, open_job, total_steps
from draftsmith.options import PlanOptions
from draftsmith.plan_advice import Disk, Proposal, disk_of, imbalance, largest_target, propose, smallest_card
from draftsmith.plan_facts import CorpusFacts, Place, compute_of, corpus_facts, place_of
from draftsmith.plan_memory import Budget, Compute, TargetSize, budget, parameter_count, target_size
from draftsmith.plan_speed import Layout, Prediction, Times, Work, layouts, predict, rank, times_by_rates, work_of
from draftsmith.plan_text import render
from draftsmith.rates import rates_of
from draftsmith.unit import UnitSequence

SCATTER = 1.5  # slowest / fastest measured unit from which on a plan says that it may be wrong


@dataclass(frozen=True)
class Plan:
    """The whole answer; `--json` prints it."""

    place: Place
    recipe_shape: dict[str, int]
    parameters: int
    corpus: CorpusFacts
    proposal: Proposal
    steps: int
    tokens_seen: int
    blocks_seen: int
    work: Work
    budgets: tuple[Budget, ...]
    disk: Disk
    times: Times | None
    ranking: tuple[Prediction, ...]
    seconds: float | None
    """Of the whole run in the best topology that fits, evaluation included."""
    device_hours: float | None
    smallest_card: str | None
    largest_target: str | None
    notes: tuple[str, ...]


def main(options: PlanOptions, config: Config) -> int:
    """`draftsmith plan`."""
    plan = make_plan(config, options.device, options.count, options.measure)
    print(json.dumps(asdict(plan), indent=1) if options.json else render(plan))
    return 0


def make_plan(config: Config, device: str | None = None, count: int | None = None, measure: bool = True) -> Plan:
    """UserError for what is wrong with the recipe or the named device."""
    job, place = open_job(config), place_of(config, device, count)
    compute = compute_of(config, place.kind)
    units = UnitSequence(job.corpus, job.shape, config.run.seed)
    corpus = corpus_facts(job, units)
    target = target_size(job.directory, job.drafter.taps, config.target.trust_remote_code)
    needs = Needs(job, target, compute, corpus.chunk_keys)
    work = work_of(job.drafter, job.shape, needs.size, corpus.mean_context, corpus.squared_lengths, compute.item)
    times, notes = times_of(job, units, place, compute, work, measure, needs.most(Layout("colocated", 1, 1)))
    ranking: list[Prediction] = []
    if times is not None:
        G, T = config.unit.per_step, job.shape.tokens
        ranking = rank([predict(x, times, G, T, needs.most, place.memory) for x in layouts(place.count)])
    steps = total_steps(config, units)
    seconds = run_seconds(job, ranking, times, steps) if times is not None and ranking[0].fits else None
    shown = [
        Layout("colocated", 1, 1),
        *([Layout("split", 1, 1)] if place.count > 1 or config.topology.targets else []),
    ]
    return Plan(
        place=place,
        recipe_shape=dict(zip("TABG", (*job.shape[:3], config.unit.per_step), strict=True)),
        parameters=parameter_count(job.drafter),
        corpus=corpus,
        proposal=propose(job, config, place, corpus),
        steps=steps,
        tokens_seen=int(steps * config.unit.per_step * job.shape.tokens * corpus.tokens_used),
        blocks_seen=int(steps * config.unit.per_step * job.shape.anchors * corpus.anchors_used),
        work=work,
        budgets=tuple(b for layout in shown for b in needs.of(layout)),
        disk=disk_of(config, job.drafter),
        times=times,
        ranking=tuple(ranking),
        seconds=seconds,
        device_hours=seconds * place.count / 3600 if seconds is not None else None,
        smallest_card=smallest_card(config, job, needs.size),
        largest_target=largest_target(job, place.memory, compute),
        notes=tuple(notes + imbalance(ranking, config.unit.per_step)),
    )


@dataclass(frozen=True)
class Needs:
    """Memory of the recipe's workers."""

    job: Job
    size: TargetSize
    compute: Compute
    chunk_keys: int

    def of(self, layout: Layout) -> list[Budget]:
        """One budget for each role of a layout."""
        job, slots = self.job, self.job.config.topology.slots
        roles = ("both",) if layout.kind == "colocated" else ("target", "trainer")
        return [budget(r, job.drafter, job.shape, self.size, self.compute, slots, self.chunk_keys) for r in roles]

    def most(self, layout: Layout) -> int:
        """On the fullest device."""
        return max(b.total for b in self.of(layout))


def best_topology(config: Config, plan: Plan | None = None) -> Config:
    """The recipe with the topology that `plan` ranks first on this machine's devices.

    Without a plan one is made in a process of its own, so that no device memory stays behind.
    """
    fitting = [p.layout for p in plan.ranking if p.fits] if plan is not None else _measured_elsewhere(config)
    if not fitting:
        raise UserError("no topology of this machine's devices is known to fit; `draftsmith plan` says why")
    best = fitting[0]
    targets = 0 if best.kind == "colocated" else best.targets
    chosen = replace(config.topology, targets=targets, trainers=best.trainers, workers=best.workers)
    return replace(config, topology=chosen)


def _measured_elsewhere(config: Config) -> list[Layout]:
    """Layouts that fit, the fastest first, by `draftsmith plan --json`."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.json"
        recipe.write_text(json.dumps({"recipe": config.to_dict()}))
        command = [sys.executable, "-m", "draftsmith", "plan", str(recipe), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise UserError("--topology auto: `draftsmith plan` failed, see above; name a topology in the recipe instead")
    ranking = json.loads(done.stdout)["ranking"]
    return [Layout(**entry["layout"]) for entry in ranking if entry["fits"]]


def times_of(
    job: Job, units: UnitSequence, place: Place, compute: Compute, work: Work, measure: bool, need: int
) -> tuple[Times | None, list[str]]:
    """Measured where the devices are here and one holds both roles (`need` bytes), else by the table; and what has to be
    said about it."""
    notes = []
    if place.here and not measure:
        notes.append("not measured here (--no-measure)")
    elif place.here and need > place.memory:
        notes.append(f"not measured: target and trainer together need {size(need)}, a device has {size(place.memory)}")
    elif place.here:
        from draftsmith.plan_measure import measure_times

        try:
            times = measure_times(job, units, place.card, work)
            if times.scatter > SCATTER:
                notes.append(f"measured times scatter by a factor of {times.scatter:.1f}: is the machine busy?")
            return times, notes
        except torch.OutOfMemoryError:
            notes.append(f"not measured: {place.name} ran out of memory; does another process hold some of it?")
    if place.card is None:
        return None, [*notes, f"no rates are known for {place.name}: times are left out; name a card with --device"]
    if compute.item != 2:
        notes.append("the rates are bfloat16's: in float32 expect several times longer")
    return times_by_rates(work, rates_of(place.card)), notes


def run_seconds(job: Job, ranking: Sequence[Prediction], times: Times, steps: int) -> float:
    """All steps of the best topology and the evaluations: each row one prefill and a forward pass for each chunk of anchors."""
    best, run = ranking[0], job.config.run
    evaluations = 1 + (steps // run.evaluate_every if run.evaluate_every else 0)
    rows = -(-len(job.rows) // best.layout.trainers)
    chunks = 2.0  # `propose_unit` asks for about half of a row's valid anchors
    evaluation = evaluations * rows * (times.prefill + chunks * times.unit / 3)
    return steps * best.step_seconds + evaluation
