"""The doctor's roles: what trainers and targets do in a real topology when they are examined instead of trained.

A trainer is set up as for training and goes through the same loop over the recipe's first units, with sums over all
trainers and real updates (of weights that are thrown away), while it is watched. Then each worker looks at itself alone.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from draftsmith import checkpoint
from draftsmith.console import size
from draftsmith.doctor_checks import (
    Exhibit,
    check_addresses,
    check_compilations,
    check_graph_breaks,
    check_host_reads,
    check_inputs,
    check_isolation,
    check_numbers,
    guarded,
    kept_state,
    uncompiled,
)
from draftsmith.doctor_checks_device import (
    check_growth,
    check_links,
    check_mode,
    check_peak,
    check_replay,
    check_time,
    time_copy,
    wait,
)
from draftsmith.doctor_checks_target import check_packed, check_taps
from draftsmith.doctor_probe import (
    CompileWatch,
    Growth,
    Launches,
    addresses,
    count_launches,
    graph_breaks,
    peak_bytes,
    recompile_reasons,
)
from draftsmith.doctor_verdict import Verdict, judge, not_checked
from draftsmith.events import EventLog
from draftsmith.host import Worker
from draftsmith.loop import Interval, Loader
from draftsmith.prefill import target_role
from draftsmith.run import EXIT_DONE, RunDirectory
from draftsmith.step import TrainStep, learning_rate
from draftsmith.target import Target
from draftsmith.topology import Place
from draftsmith.train import Workshop, accumulate, evaluate_held_out, save, set_up, take

UNITS = 20  # different units that a trainer is watched over, after the first two
WINDOW = 5  # of them, twice: what these keep until the end is growth


@dataclass
class Findings:
    """Of one worker."""

    worker: str
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def write(self, run: Path) -> None:
        """RUN/doctor/WORKER.json."""
        place = run / "doctor"
        place.mkdir(exist_ok=True)
        (place / f"{self.worker.replace(' ', '_')}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, run: Path) -> "list[Findings]":
        """What the workers of a host wrote, targets first."""
        found = [json.loads(path.read_text()) for path in (run / "doctor").glob("*.json")]
        found.sort(key=lambda f: (not f["worker"].startswith("target"), f["worker"]))
        return [cls(f["worker"], [Verdict(**v) for v in f["verdicts"]], f["figures"]) for f in found]


@dataclass(frozen=True)
class Order:
    """What `draftsmith doctor` leaves for the workers (RunDirectory.examination)."""

    predicted: dict[str, int]
    """plan's peak bytes of a role's tensors."""
    process: int
    """Bytes of a process without its tensors, where they are counted as well: on the CPU."""
    settings: dict[str, str]
    """The compiler's settings as the launcher's main thread sees them."""

    def peak(self, place: Place) -> int:
        """What this worker should find: its own tensors, or those of all that share its memory."""
        return self.process + sum(self.predicted[sharer.role] for sharer in place.sharers)

    def write(self, run: RunDirectory) -> None:
        run.logs.parent.mkdir(parents=True, exist_ok=True)
        run.examination.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run: RunDirectory) -> "Order":
        return cls(**json.loads(run.examination.read_text()))


def steps_needed(per_step: int, trainers: int) -> int:
    """Optimizer steps until every trainer has seen UNITS different units after its warm-up."""
    return warm_up(per_step, trainers) + -(-UNITS * trainers // per_step)


def warm_up(per_step: int, trainers: int) -> int:
    """Steps until every trainer has seen two units."""
    return max(2, -(-2 * trainers // per_step))


def examine_trainer(worker: Worker) -> int:
    """The role `trainer` or `both` under examination."""
    findings, order = Findings(worker.place.name), Order.read(worker.run)
    begin, broken = time.monotonic(), graph_breaks().total()
    with (
        CompileWatch() as watch,
        EventLog(worker.run.path, worker.place.role, worker.run.attempt, worker.place.number) as events,
    ):
        try:
            shop = set_up(worker, events)
        except RuntimeError as error:  # the compiler's errors are
            findings.verdicts.append(uncompiled(error))
            findings.write(worker.run.path)
            raise
        findings.verdicts.append(check_graph_breaks(shop.step.mode, graph_breaks().total() - broken))
        findings.verdicts += check_mode(shop.step.mode, worker.place.topology.threads, order.settings)
        try:
            with Loader(shop.units.unit, shop.plan.all_units()) as loader:
                examine(shop, loader, watch, begin, order.peak(worker.place), findings)
            shop.taps.close()
        finally:
            findings.write(worker.run.path)
            if shop.writer is not None:
                shop.writer.close()
    return EXIT_DONE


def examine(
    shop: Workshop, loader: Loader[int], watch: CompileWatch, begin: float, predicted: int, findings: Findings
) -> None:
    """Everything about a set-up trainer: the watched loop with its peers, then the checks alone."""
    exhibits = watched_steps(shop, loader, watch, begin, predicted, findings)
    evaluate_held_out(shop, shop.plan.total)
    shared_checks(shop, findings)
    for _ in shop.worker.member.turns():  # profiler, sync warnings and launches are the whole process's
        checks_alone(shop.step, exhibits, findings)
        if shop.target is not None:
            findings.verdicts += target_checks(shop.target, shop.worker)


def watched_steps(
    shop: Workshop, loader: Loader[int], watch: CompileWatch, begin: float, predicted: int, findings: Findings
) -> list[Exhibit]:
    """The training loop over all of the plan's steps; returns copies of the first two units."""
    worker, plan, step = shop.worker, shop.plan, shop.step
    exhibits: list[Exhibit] = []
    settled = plan.start + warm_up(plan.per_step, plan.trainers)
    interval, units, first, moved = Interval(), 0, 0.0, dict[str, None]()
    growth = Growth(step.device, alone=len(worker.place.sharers) == 1)
    for number in range(plan.start, plan.total):
        if number == settled:
            before, compiled = addresses(step), len(watch.seen)
            growth.mark()
            since = time.monotonic()
        for u in plan.units(number):
            unit = take(shop, loader, interval, u)
            accumulate(shop, unit)
            if len(exhibits) < 2:
                exhibits.append(Exhibit.take(step.static))
            shop.taps.ahead(number)
            if number >= settled:
                units += 1  # looked at after every unit: an allocator may hand the old address out again
                moved.update((n, None) for n, address in addresses(step).items() if address != before[n])
                if units in (WINDOW, 2 * WINDOW):
                    wait(step.device)  # what is queued counts as training, looking does not
                    looked = time.monotonic()
                    growth.mark()
                    since += time.monotonic() - looked
        worker.member.add_up(step.flat.reduced)
        step.update(learning_rate(number, plan.total, worker.job.config.optim))
        shop.taps.ahead(number + 1)
        if number == plan.start:
            shop.taps.settle()
            step.read()
            wait(step.device)
            first = time.monotonic() - begin
    step.read()
    wait(step.device)
    steady = (time.monotonic() - since) / (plan.total - settled)
    peak = peak_bytes(step.device)
    late = watch.seen[compiled:]
    findings.verdicts += check_compilations(watch.seen[:compiled], late, units, step.mode, recompile_reasons())
    findings.verdicts.append(check_addresses(len(before), list(moved), units))
    findings.verdicts.append(check_growth(growth.left(), WINDOW, units))
    findings.verdicts.append(check_peak("peak memory", worker.place, peak, predicted))
    findings.verdicts.append(check_time(first, steady))
    findings.figures |= {"first_step_seconds": first, "step_seconds": steady, peak_figure(worker.place): peak}
    return exhibits


def shared_checks(shop: Workshop, findings: Findings) -> None:
    """What the trainers do together, each the same number of times: the sum of gradients, a copy of taps, a checkpoint."""
    worker, step = shop.worker, shop.step
    reduce = None
    if not worker.member.alone:
        seconds = []
        for _ in range(3):
            wait(step.device)
            begin = time.perf_counter()
            worker.member.add_up(step.flat.reduced)
            wait(step.device)
            seconds.append(time.perf_counter() - begin)
        reduce = (min(seconds), step.flat.reduced.numel() * 4)
    pull = None
    slot = shop.taps.slot()
    if slot is not None:
        pull = (time_copy(slot, step.static.taps), slot.numel() * slot.element_size())
    findings.verdicts += check_links(worker.place, pull, reduce)
    if shop.writer is not None:
        findings.verdicts.append(check_checkpoint(shop))


def check_checkpoint(shop: Workshop) -> Verdict:
    """A real checkpoint of the whole state, and how long training stands still for it."""
    begin = time.monotonic()
    save(shop, shop.plan.total, None)
    stall = time.monotonic() - begin
    shop.writer.finish()
    whole = time.monotonic() - begin
    found = checkpoint.list_checkpoints(shop.worker.run.path)
    written = sum(f.stat().st_size for f in found[-1].path.iterdir()) if found else 0
    return judge(
        "checkpoint",
        bool(found),
        f"{size(written)} in {whole:.1f} s, training stands still for {stall * 1e3:.0f} ms",
        "no complete checkpoint was found afterwards",
        "look at the run directory's file system",
    )


def checks_alone(step: TrainStep, exhibits: list[Exhibit], findings: Findings) -> None:
    """What one trainer can see by itself."""
    first, second = exhibits
    verdicts = findings.verdicts
    verdicts += guarded("host syncs", lambda: [check_host_reads(step, first)])
    verdicts += guarded("graph replay", lambda: [check_replay(step.mode, launches(step, first), 3, 1)])
    verdicts += guarded("stale inputs", lambda: check_inputs(step, first, second))
    verdicts += guarded("gradients against eager", lambda: check_numbers(step, first))
    verdicts += guarded("packed document, step", lambda: check_isolation(step, first))


def launches(step: TrainStep, exhibit: Exhibit) -> Launches | None:
    """Of three micro-steps and one update; None without a CUDA device."""
    if step.device.type != "cuda":
        return None
    exhibit.put(step.static)
    with kept_state(step):
        with count_launches(step.device) as seen:
            for _ in range(3):
                step.accumulate()
            step.update(0.0)
        return seen()


def examine_target(worker: Worker) -> int:
    """The role `target` under examination: first alone, then at work for the trainers."""
    findings = Findings(worker.place.name)

    def look(target: Target) -> None:
        findings.verdicts += target_checks(target, worker)
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)

    code = target_role(worker, look)
    name, trainers = "peak memory, target", [p.name for p in worker.place.sharers if p.role == "trainer"]
    if trainers:  # whose checks after the steps are in the count by now
        findings.verdicts.append(not_checked(name, f"counted with {trainers[0]}, a thread on the same device"))
    else:
        peak = peak_bytes(torch.device(worker.place.device))
        findings.figures[peak_figure(worker.place)] = peak
        findings.verdicts.append(check_peak(name, worker.place, peak, Order.read(worker.run).peak(worker.place)))
    findings.write(worker.run.path)
    return code


def peak_figure(place: Place) -> str:
    """The name of the peak among the figures."""
    return "peak_bytes" if len(place.sharers) == 1 else "peak_bytes_with_threads_on_the_device"


def target_checks(target: Target, worker: Worker) -> list[Verdict]:
    """Taps and packing on the recipe's first unit."""
    unit = worker.job.units(worker.run.path).unit(0)
    verdicts = guarded("taps", lambda: check_taps(target, worker.job, unit))
    return verdicts + guarded("packed document, taps", lambda: check_packed(target, unit))
