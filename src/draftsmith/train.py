"""The trainer, top to bottom: the file to read first.

    corpus -> unit(u) -> target prefills taps -> drafter step -> update -> log, evaluate, save -> next

Every unit is a pure function of its number (unit.py), so a run is a loop over integers and resuming is one integer.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from draftsmith import checkpoint, models
from draftsmith.config import Config, config_hash
from draftsmith.console import Console
from draftsmith.data.shards import Corpus
from draftsmith.data.template import check_matches
from draftsmith.drafters.dflash import DFlash, init_random, useful_flops
from draftsmith.drafters.init import init_from_target
from draftsmith.drafters.shape import drafter_shape
from draftsmith.errors import UserError
from draftsmith.events import EvaluationRecord, EventLog, StepRecord
from draftsmith.loop import Interval, Loader, Plan, StopRequest
from draftsmith.options import TrainOptions
from draftsmith.run import EXIT_DONE, EXIT_STOPPED, RunDirectory, open_run, provenance
from draftsmith.step import TrainStep, learning_rate
from draftsmith.target import Target, load_tables
from draftsmith.unit import UNIT_LAW, PlanCache, Unit, UnitSequence, UnitShape, evaluation_chunks, plan_epoch
from draftsmith.walk import Walk, walk_row


def main(options: TrainOptions, config: Config) -> int:
    """`draftsmith train`."""
    return train(config, options.run or Path("runs") / options.recipe.stem, options.resume)


@dataclass(frozen=True)
class Workshop:
    """What a colocated worker holds: data, frozen target, drafter with its step, logs."""

    config: Config
    run: RunDirectory
    units: UnitSequence
    held_out: list[list[Unit]]
    target: Target
    step: TrainStep
    events: EventLog
    console: Console


def train(config: Config, run_path: Path, resume: bool = False, console: Console | None = None) -> int:
    """Train as the recipe says, in `run_path`. Returns an exit code of run.py; UserError for the user's mistakes."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    shop, plan = set_up(config, run_path, resume, console or Console())
    every, interval = config.run, Interval()
    with StopRequest() as stop, shop.events, Loader(shop.units, plan) as loader:
        for number in range(plan.start, plan.total):
            for unit in loader.step(number):
                accumulate(shop, unit)
                interval.count(unit)
            shop.step.update(learning_rate(number, plan.total, config.optim))
            done = number + 1
            last = done == plan.total
            stopping = not last and (stop.requested or done == every.stop_after)
            interval.steps += 1
            if done % every.log_every == 0 or last or stopping:
                log(shop, plan, done, interval)
            shop.step.clear()
            acceptance = None
            if last or (every.evaluate_every and done % every.evaluate_every == 0):
                acceptance = evaluate_held_out(shop, done)
            if done % every.save_every == 0 or last or stopping:
                save(shop, done, acceptance)
            if stopping:
                shop.console.note(f"stopped after step {done} of {plan.total}; go on with --resume")
                return EXIT_STOPPED
    return EXIT_DONE


def set_up(config: Config, run_path: Path, resume: bool, console: Console) -> tuple[Workshop, Plan]:
    """Open and check everything before the first step; the run directory is made only once all of it fits."""
    device, dtype = device_and_dtype(config)
    directory = models.resolve(config.target.model, config.target.revision)
    corpus, held_out = (Corpus.open(Path(config.data.corpus), split) for split in ("train", "held_out"))
    check_matches(corpus.manifest, directory, config.target.chat_template, config.target.template_options)
    shape = UnitShape(config.unit.tokens, config.unit.anchors, config.drafter.block, config.unit.anchor_rate)
    drafter = make_drafter(config, directory)
    try:
        units = UnitSequence(corpus, shape, config.run.seed, PlanCache(run_path / "plans"))
        evaluation = held_out_units(held_out, shape, config.run.evaluate_units)
    except ValueError as error:
        raise UserError(f"{config.data.corpus}: {error}") from None
    found = checkpoint.list_checkpoints(run_path) if resume else []
    run = open_run(run_path, config, resume)
    target = Target.load(directory, drafter.shape.taps, dtype, device)
    for line in target.report():
        console.note(line)
    step = TrainStep(
        drafter, load_tables(directory, dtype, device), shape, config.loss, config.optim, dtype, device,
        checkpoint_activations=config.run.checkpoint_activations,
    )  # fmt: skip
    if found:
        check_unit_law(found[-1])
        checkpoint.restore(found[-1], step)
        console.note(f"resumed from {found[-1].path}")
    plan = Plan(found[-1].step if found else 0, total_steps(config, units), config.unit.per_step)
    console.note(
        f"{plan.total} steps of {plan.per_step} x {shape.tokens} tokens and {shape.anchors} blocks of "
        f"{shape.block_size}; {step.flat.total / 1e6:.1f} M trained parameters on {device}"
    )
    events = EventLog(run.path, role="both", attempt=run.attempt, total_steps=plan.total)
    return Workshop(config, run, units, evaluation, target, step, events, console), plan


def check_unit_law(found: checkpoint.Checkpoint) -> None:
    """A run goes on only under the unit law it began with, else it would see other units."""
    law = found.state.get("unit_law")
    if law != UNIT_LAW:
        raise UserError(f"{found.path}: was trained under unit law {law}, this version has {UNIT_LAW}; start a new run")


def automatic_device() -> str:
    """What run.device = "auto" means here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    """auto: CUDA with bfloat16 where there is a device, else the CPU with float32."""
    cuda = torch.cuda.is_available()
    if config.run.device == "cuda" and not cuda:
        raise UserError('run.device = "cuda": this torch sees no CUDA device; use "cpu" or "auto"')
    device = torch.device("cuda" if cuda and config.run.device != "cpu" else "cpu")
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, {"auto": automatic, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.target.dtype]


def make_drafter(config: Config, directory: Path) -> DFlash:
    """The drafter of a recipe with its first weights (float32, CPU)."""
    drafter = DFlash(drafter_shape(config, directory))
    init_random(drafter, config.run.seed)
    if config.drafter.init == "target":
        init_from_target(drafter, directory)
    return drafter


def total_steps(config: Config, units: UnitSequence) -> int:
    """optim.steps, or what optim.epochs of the corpus come to."""
    if config.optim.steps:
        return config.optim.steps
    epochs = config.optim.epochs
    rows = sum(units.rows_in_epoch(e) for e in range(ceil(epochs))) * epochs / ceil(epochs)
    return max(1, round(rows / config.unit.per_step))


def held_out_units(corpus: Corpus, shape: UnitShape, count: int) -> list[list[Unit]]:
    """The first `count` rows of the held-out split, each as the chunks of its valid anchors (unit.py)."""
    rows = plan_epoch(corpus, shape, seed=0, epoch=0) if len(corpus.lengths) else []
    return [evaluation_chunks(corpus, row, shape, number) for number, row in enumerate(rows[:count])]


def accumulate(shop: Workshop, unit: Unit) -> None:
    """One micro-step: unit in, taps in, forward and backward into the flat buffer."""
    static = shop.step.static
    static.load(unit)
    with shop.events.span("prefill", unit=unit.number):
        shop.target.prefill(static.ids, static.positions, static.documents, static.taps)
    with shop.events.span("step", unit=unit.number):
        shop.step.accumulate()


def log(shop: Workshop, plan: Plan, done: int, interval: Interval) -> None:
    """One step record from the interval's counts and the device's sums; ends the run if updates keep being skipped."""
    stats, seconds, shape = shop.step.read(), interval.seconds(), shop.units.shape
    block_tokens = interval.units * shape.anchors * shape.block_size
    flops = useful_flops(shop.step.drafter.shape, shape.tokens, shape.anchors) * interval.units
    record = StepRecord(
        step=done,
        loss=stats.loss,
        block_acceptance=stats.block_acceptance,
        slot_accuracy=list(stats.slot_accuracy),
        lr=learning_rate(done - 1, plan.total, shop.config.optim),
        gradient_norm=stats.gradient_norm,
        skipped_updates=stats.skipped_total,
        steps=interval.steps,
        seconds=seconds,
        tokens_per_second=interval.tokens / seconds,
        block_tokens_per_second=block_tokens / seconds,
        useful_tflops=flops / seconds / 1e12,
        tokens_used_share=interval.tokens / (interval.units * shape.tokens),
        anchors_used_share=interval.anchors / (interval.units * shape.anchors),
    )
    shop.events.step(record)
    shop.console.step(record, plan.total)
    if stats.skipped_in_row >= shop.config.optim.max_skipped:
        raise UserError(
            f"{shop.run.path}: the last {stats.skipped_in_row} updates were skipped for non-finite gradients, step {done}"
            + (f", last in unit {stats.bad_unit}" if stats.bad_unit >= 0 else "")
            + "; lower optim.lr or look at that unit's documents, then --resume"
        )
    interval.begin()


def evaluate_held_out(shop: Workshop, done: int) -> float | None:
    """Teacher-forced walk over the held-out units: the acceptance length of greedy decoding on this text (walk.py)."""
    walks: list[Walk] = []
    static = shop.step.static
    with shop.events.span("evaluate", step=done):
        for chunks in shop.held_out:
            accepted: dict[int, int] = {}
            for unit in chunks:
                static.load(unit)
                if unit is chunks[0]:
                    shop.target.prefill(static.ids, static.positions, static.documents, static.taps)
                lengths = shop.step.accepted_lengths()[: unit.anchors_used].tolist()
                accepted.update(zip(unit.anchors.tolist(), lengths, strict=False))
            walks += walk_row(accepted)
    if not walks:
        return None
    summary = Walk.summary(walks, shop.units.shape.block_size)
    shop.events.evaluation(EvaluationRecord(step=done, **summary))
    shop.console.note(f"step {done}: held-out acceptance length {summary['acceptance_length']:.3f}")
    return summary["acceptance_length"]


def save(shop: Workshop, done: int, acceptance: float | None) -> None:
    """Write a checkpoint and drop those no longer kept."""
    state = {
        "acceptance_length": acceptance,
        "unit_law": UNIT_LAW,
        "recipe": shop.config.to_dict(),
        "recipe_hash": config_hash(shop.config),
        "provenance": provenance(),
    }
    with shop.events.span("checkpoint", step=done):
        written = checkpoint.save(shop.run.path, done, shop.step, state)
        checkpoint.prune(shop.run.path, shop.config.run.keep_last)
    shop.console.note(f"saved {written.path}")
