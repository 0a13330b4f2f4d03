"""The trainer, top to bottom: the file to read first.

    corpus -> unit(u) -> taps of the frozen target -> drafter step -> sum over trainers -> update -> log, evaluate, save

Every unit is a pure function of its number (unit.py), so a run is a loop over integers and resuming is one integer.
Trainer r of R takes the units u with u mod R = r. Where the taps come from (its own target, or other workers) and who
the other trainers are (none, threads, processes, other hosts) changes nothing in this loop: taps.py, team.py, host.py.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith import checkpoint
from draftsmith.checkpoint import Checkpoint
from draftsmith.config import Config, config_hash
from draftsmith.console import Console
from draftsmith.device_spans import open_log
from draftsmith.drafters.dflash import useful_flops
from draftsmith.errors import UserError
from draftsmith.events import EvaluationRecord, EventLog, StepRecord
from draftsmith.gauges import Gauges
from draftsmith.host import Worker, run_host
from draftsmith.job import Job, dtype_of
from draftsmith.loop import Interval, Loader, Plan, Waits
from draftsmith.mailbox import cell_items
from draftsmith.options import TrainOptions
from draftsmith.profile import StepProfiler
from draftsmith.run import EXIT_DONE, EXIT_STOPPED, provenance
from draftsmith.sinks import SinkProcesses
from draftsmith.step import StepStats, Tables, TrainStep, learning_rate
from draftsmith.step_modes import COMPILE_LOCK
from draftsmith.taps import MailedTaps, OwnTaps, Taps
from draftsmith.target import Target
from draftsmith.unit import UNIT_LAW, Unit, UnitSequence
from draftsmith.walk import Walk, walk_row


def main(options: TrainOptions, config: Config) -> int:
    """`draftsmith train`."""
    from draftsmith.launch import launch

    return launch(options, config)


def train(config: Config, run_path: Path, resume: bool = False, console: Console | None = None) -> int:
    """Train in this process, with the recipe's workers as threads if there are several. Returns an exit code of run.py;
    UserError for the user's mistakes."""
    return run_host(config, run_path, resume, console or Console())


@dataclass(frozen=True)
class Workshop:
    """What a trainer works with."""

    worker: Worker
    plan: Plan
    units: UnitSequence
    held_out: dict[int, list[Unit]]
    step: TrainStep
    taps: Taps
    events: EventLog
    writer: checkpoint.Writer | None
    """The first trainer's."""
    about: dict[str, Any]
    """What every checkpoint's state.json says besides its step."""
    target: Target | None
    """A colocated trainer's."""
    gauges: Gauges | None
    """The first trainer's."""


def trainer(worker: Worker) -> int:
    """The role `trainer` or `both`, from set-up to the last step. Returns EXIT_DONE or EXIT_STOPPED."""
    events = open_log(worker.run, worker.place)
    sinks = worker.job.config.run.sinks if worker.place.is_first else ()
    with SinkProcesses(worker.run.path, sinks, worker.console.note), events:
        shop = set_up(worker, events)
        try:
            with Loader(shop.units.unit, shop.plan.all_units()) as loader:
                done = train_steps(shop, loader)
            if shop.writer is not None:
                say_saved(shop, shop.writer.finish())
        finally:
            if shop.writer is not None:
                shop.writer.close()
    if done == shop.plan.total:
        return EXIT_DONE
    worker.console.note(f"stopped after step {done} of {shop.plan.total}; go on with --resume")
    return EXIT_STOPPED


def train_steps(shop: Workshop, loader: Loader[int]) -> int:
    """The loop. Returns how many optimizer steps of the run are done."""
    plan, worker, step = shop.plan, shop.worker, shop.step
    every, interval, saves = worker.job.config.run, Interval(), Saves(worker.job.config.run.save_minutes)
    profiler = StepProfiler(worker.run.path, shop.events.worker, worker.profile)
    for number in range(plan.start, plan.total):
        profiler.before(number + 1)
        for u in plan.units(number):
            accumulate(shop, take(shop, loader, interval, u))
            shop.taps.ahead(number)
        # A stop is agreed on a step late: what the step before has summed is known by now, and nobody waits for it.
        agreed = number > plan.start and step.read().stop
        if worker.stop.watch():
            step.request_stop()
        with shop.events.work("wait_peers", step=number + 1):
            worker.member.add_up(step.flat.reduced)
        with shop.events.work("update", step=number + 1):
            step.update(learning_rate(number, plan.total, worker.job.config.optim))
        shop.taps.ahead(number + 1)
        done = number + 1
        interval.steps += 1
        if number == plan.start:
            shop.taps.settle()
        last = done == plan.total
        stopping = not last and (agreed or done == every.stop_after)
        if done % every.log_every == 0 or last or stopping:
            log(shop, done, interval)
        acceptance = evaluate_held_out(shop, done) if plan.evaluates(done) else None
        if last or stopping:
            shop.taps.close()  # the targets need not wait for the disk
        if done % every.save_every == 0 or last or stopping or saves.due():
            save(shop, done, acceptance)
            saves.begin()
        if last or stopping:
            profiler.close()
            if (missed := profiler.missed()) is not None:
                worker.console.note(missed)
            return done
    shop.taps.close()  # the run was at its end
    return plan.total


class Saves:
    """Checkpoints by the clock; only the first trainer's counts, since it alone writes them."""

    def __init__(self, minutes: float):
        self._seconds = minutes * 60
        self.begin()

    def begin(self) -> None:
        self._since = time.monotonic()

    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._since


def set_up(worker: Worker, events: EventLog) -> Workshop:
    """Model, step and taps of one trainer; its state is that of the newest checkpoint any trainer finds, or the start."""
    job, place, run = worker.job, worker.place, worker.run
    device, colocated = torch.device(place.device), place.role == "both"
    dtype, c = dtype_of(job.config.target.dtype, device), job.config
    with COMPILE_LOCK:  # loading and compiling are not made for several threads
        target = job.load_target(device, worker.console.progress) if colocated else None
        tables = job.load_tables(device)
        step = TrainStep(
            job.make_drafter(), tables, job.shape, c.loss, c.optim, dtype, device,
            checkpoint_activations=c.run.checkpoint_activations, mode=c.run.mode,
        )  # fmt: skip
        if not step.prepared:
            worker.console.note(f"compiling the step for mode {step.mode}")
        step.prepare()
    worker.all_set_up.wait(may_compile=target is not None and target.may_compile)
    for line in (*(target.report() if target is not None else ()), *(report(job, tables) if place.is_first else ())):
        worker.console.note(line)
    units = job.units(run.path)
    plan = job.plan(units, place, restore(worker, step))
    gauges = Gauges(device, dtype) if place.is_first else None
    events.plan(plan.total, gauges.about(job.corpus.manifest) if gauges else None)
    events.note(f"starts at step {plan.start} of {plan.total}")
    worker.console.note(
        f"{plan.total} steps of {plan.per_step} x {job.shape.tokens} tokens and {job.shape.anchors} blocks of "
        f"{job.shape.block_size}; {step.flat.total / 1e6:.1f} M trained parameters; {place.topology.describe()}"
    )
    if plan.per_step % place.trainers:
        worker.console.note(
            f"unit.per_step = {plan.per_step} over {place.trainers} trainers is uneven: some wait for others"
        )
    about = {
        "unit_law": UNIT_LAW, "corpus": job.corpus_identity, "recipe": c.to_dict(), "recipe_hash": config_hash(c),
        "provenance": provenance(),
    }  # fmt: skip
    s = step.static
    if target is not None:
        taps: Taps = OwnTaps(lambda: target.prefill(s.ids, s.positions, s.documents, s.taps), events)
    else:
        cell = place.cell()
        items = (item for item in cell_items(plan, cell) if item.trainer == place.index)
        taps = MailedTaps(worker.mail.as_trainer(plan.start), items, s.taps, events)
    held_out = {row: job.held_out_row(row) for row in plan.held_out()}
    worker.member.exchange(None)  # the targets of every host are there: a first sum waits for topology.patience alone
    writer = checkpoint.Writer(run.path, c.run.keep_last, step) if place.is_first else None
    return Workshop(worker, plan, units, held_out, step, taps, events, writer, about, target, gauges)


def report(job: Job, tables: Tables) -> list[str]:
    """What the drafter is trained with besides the taps, one sentence a line."""
    return [job.mask_token_report(), f"chat template: {job.template_report()}", tables.describe()]


def restore(worker: Worker, step: TrainStep) -> int:
    """Give every trainer the newest complete checkpoint that one of them can see; returns its step, or 0."""
    if worker.place.is_first:
        checkpoint.sweep(worker.run.path)
    found = checkpoint.list_checkpoints(worker.run.path) if worker.resumes else []
    steps = worker.member.exchange(found[-1].step if found else 0)
    newest = max(steps)
    source = steps.index(newest)
    if newest and source == worker.place.number:
        check_same_units(found[-1], worker.job)
        checkpoint.restore(found[-1], step)
    if not worker.member.alone:
        adamw = step.adamw
        worker.member.hand_out((step.flat.masters, adamw.exp_avg, adamw.exp_avg_sq, adamw.count), source)
        step.flat.publish()
    if newest:
        worker.console.note(f"resumed from {worker.run.path / 'checkpoints' / f'step_{newest}'}")
    return newest


def check_same_units(found: Checkpoint, job: Job) -> None:
    """A run goes on only under the unit law and on the corpus it began with, else it would see other units."""
    law = found.state.get("unit_law")
    if law != UNIT_LAW:
        raise UserError(f"{found.path}: was trained under unit law {law}, this version has {UNIT_LAW}; start a new run")
    corpus = found.state.get("corpus", job.corpus_identity)  # checkpoints of before this was written have none
    if corpus != job.corpus_identity:
        raise UserError(
            f"{found.path}: was trained on another corpus (identity {corpus}) than {job.config.data.corpus} now holds "
            f"({job.corpus_identity}); point data.corpus at the one the run began with, or start a new run"
        )


def take(shop: Workshop, loader: Loader[int], interval: Interval, number: int) -> Unit:
    """The next unit, built ahead by the loader."""
    with shop.events.span("wait_unit", unit=number):
        begin = time.monotonic()
        unit = loader.take(number)
        interval.count(unit, time.monotonic() - begin)
    return unit


def accumulate(shop: Workshop, unit: Unit) -> None:
    """One micro-step: unit in, taps in, forward and backward into the flat buffer."""
    shop.step.static.load(unit)
    shop.taps.fill("unit", unit.number)
    with shop.events.work("step", unit=unit.number):
        shop.step.accumulate()


def log(shop: Workshop, done: int, interval: Interval) -> None:
    """One step record from all trainers' counts and the device's sums; skipped updates are told."""
    stats, seconds, shape, config = shop.step.read(), interval.seconds(), shop.units.shape, shop.worker.job.config
    everyone = shop.worker.member.exchange(
        {
            "units": interval.units, "tokens": interval.tokens, "anchors": interval.anchors, "bad": stats.bad_unit,
            "waited_units": interval.waited_units, "waited_taps": shop.taps.waited(), "targets": shop.taps.targets_waited(),
        }
    )  # fmt: skip
    total = {key: sum(one[key] for one in everyone) for key in ("units", "tokens", "anchors")}
    mean = {key: sum(one[key] for one in everyone) / len(everyone) for key in ("waited_units", "waited_taps")}
    targets = [one["targets"] for one in everyone if one["targets"] is not None]
    waits = Waits.of(seconds, *mean.values(), sum(targets) / len(targets) if targets else None)
    flops = useful_flops(shop.step.drafter.shape, shape.tokens, shape.anchors) * total["units"] / len(everyone)
    record = StepRecord(
        step=done,
        loss=stats.loss,
        block_acceptance=stats.block_acceptance,
        slot_accuracy=list(stats.slot_accuracy),
        lr=learning_rate(done - 1, shop.plan.total, config.optim),
        gradient_norm=stats.gradient_norm,
        skipped_updates=stats.skipped_total,
        steps=interval.steps,
        seconds=seconds,
        tokens_per_second=total["tokens"] / seconds,
        block_tokens_per_second=total["units"] * shape.anchors * shape.block_size / seconds,
        useful_tflops=flops / seconds / 1e12,
        tokens_used_share=total["tokens"] / (total["units"] * shape.tokens),
        anchors_used_share=total["anchors"] / (total["units"] * shape.anchors),
        trainers_wait_share=waits.trainers,
        targets_wait_share=waits.targets,
        bound_by=waits.bound_by,
        replays=shop.step.replays(),
        **(shop.gauges.read() if shop.gauges else {}),
    )
    if shop.worker.place.is_first:
        shop.events.step(record)
        shop.worker.console.step(record, shop.plan.total)
    else:
        shop.events.flush()
    check_skipped(shop, interval, stats, done, max(one["bad"] for one in everyone))
    if shop.writer is not None:
        say_saved(shop, shop.writer.poll())
    interval.begin()


def check_skipped(shop: Workshop, interval: Interval, stats: StepStats, done: int, bad: int) -> None:
    """Tell how many updates of the interval were skipped and where; ends the run if they keep being skipped.

    `bad`: the newest unit of any trainer whose loss was not finite, or -1.
    """
    new, per_step = stats.skipped_total - interval.skipped, shop.plan.per_step
    units = f"one of the units {(done - interval.steps) * per_step}..{done * per_step - 1}"
    where = f"unit {bad}" if bad not in (-1, interval.bad) else units
    interval.skipped, interval.bad = stats.skipped_total, bad
    if new and shop.worker.place.is_first:
        text = f"step {done}: {new} of the last {interval.steps} updates skipped (not finite, or nothing scored) in {where}"
        shop.worker.console.note(text)
        shop.events.note(text)
    if stats.skipped_in_row >= shop.worker.job.config.optim.max_skipped:
        raise UserError(
            f"{shop.worker.run.path}: the last {stats.skipped_in_row} updates were skipped (not finite, or nothing scored), "
            f"step {done}, last in {where}; lower optim.lr or look at that unit's documents, then --resume"
        )


def evaluate_held_out(shop: Workshop, done: int) -> float | None:
    """Teacher-forced walk over the held-out units: the acceptance length of greedy decoding on this text (walk.py)."""
    mine: dict[int, tuple[list[Walk], float, float]] = {}  # row -> its responses, their weighted loss and its weight
    static = shop.step.static
    with shop.events.span("evaluate", step=done):
        for row, chunks in shop.held_out.items():
            accepted, loss, weight = dict[int, int](), 0.0, 0.0
            for unit in chunks:
                static.load(unit)
                if unit is chunks[0]:
                    shop.taps.fill("held-out row", row)
                lengths, sums = shop.step.evaluate()
                accepted.update(zip(unit.anchors[: unit.anchors_used].tolist(), lengths.tolist(), strict=False))
                loss, weight = loss + float(sums[0]), weight + float(sums[1])
            mine[row] = walk_row(accepted), loss, weight
            shop.taps.ahead(done)
        everyone = shop.worker.member.exchange(mine)
    by_row = {row: found for one in everyone for row, found in one.items()}
    found = [by_row[row] for row in sorted(by_row)]  # in one order, so that sums do not depend on the topology
    walks = [walk for of_row, _, _ in found for walk in of_row]
    if not walks:
        return None
    summary = Walk.summary(walks, shop.units.shape.block_size)
    loss = sum(loss for _, loss, _ in found) / sum(weight for _, _, weight in found)
    if shop.worker.place.is_first:
        shop.events.evaluation(EvaluationRecord(step=done, **summary, loss=loss))
        shop.worker.console.note(
            f"step {done}: held-out acceptance length {summary['acceptance_length']:.3f}, loss {loss:.4f}"
        )
    return summary["acceptance_length"]


def save(shop: Workshop, done: int, acceptance: float | None) -> None:
    """The first trainer hands its state to the background writer, which drops checkpoints that are no longer kept."""
    if shop.writer is None:
        return
    with shop.events.span("checkpoint", step=done):
        say_saved(shop, shop.writer.finish())
        shop.writer.start(done, {"acceptance_length": acceptance, **shop.about})


def say_saved(shop: Workshop, written: checkpoint.Checkpoint | None) -> None:
    """Tell of a checkpoint that the writer has finished, if any."""
    if written is not None:
        shop.worker.console.note(f"saved {written.path}")
