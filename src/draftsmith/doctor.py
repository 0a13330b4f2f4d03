"""`draftsmith doctor`: proves a recipe in the topology of the real run before it is paid for.

The recipe's own workers (threads or processes, all devices) run a few units in a directory that is thrown away, are
watched meanwhile, and look at themselves afterwards (doctor_run.py). One verdict a line; exit code 1 if any fails.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from draftsmith.config import Config
from draftsmith.console import Console, size
from draftsmith.doctor_checks_device import check_allocator, check_peers, check_space, compiler_settings
from draftsmith.doctor_checks_target import check_words
from draftsmith.doctor_run import Findings, Order, steps_needed
from draftsmith.doctor_verdict import Verdict, failed, judge, merge, render
from draftsmith.errors import UserError, first_line
from draftsmith.host import run_host
from draftsmith.job import Job, open_job, topology_of
from draftsmith.mailbox import MailError, PeerLost
from draftsmith.options import DoctorOptions, TrainOptions
from draftsmith.plan_advice import disk_of
from draftsmith.plan_facts import compute_of, corpus_facts, place_of
from draftsmith.plan_memory import PROCESS, Budget, Role, budget, target_size
from draftsmith.run import EXIT_DONE, EXIT_FAILED, RunDirectory, provenance, write_json
from draftsmith.step_modes import any_number_of_variants
from draftsmith.topology import Topology
from draftsmith.unit import UnitSequence


def main(options: DoctorOptions, config: Config) -> int:
    """`draftsmith doctor`."""
    path = options.run or Path("runs") / options.recipe.stem
    verdicts, figures = examine(config, path, options.recipe, Console())
    return finish(verdicts, figures, path, options.json)


def finish(verdicts: list[Verdict], figures: dict[str, dict], path: Path, as_json: bool) -> int:
    """Write RUN/doctor.json, print, and say by the exit code whether anything failed."""
    report = {"verdicts": [asdict(v) for v in verdicts], "figures": figures, "provenance": provenance()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "doctor.json", report)
    except OSError as error:
        raise UserError(f"{path / 'doctor.json'}: cannot be written: {error}") from None
    print(json.dumps(report, indent=1) if as_json else render(verdicts))
    return EXIT_FAILED if any(v.failed for v in verdicts) else EXIT_DONE


def quick(config: Config, path: Path) -> list[Verdict]:
    """What can be said in a second, before any worker starts; `train` asks for it."""
    job, topology = open_job(config), topology_of(config)
    return quick_checks(job, topology, path, budgets(job, topology))


def refuse_unfit(config: Config, path: Path) -> None:
    """UserError for the first line of the quick half that fails."""
    bad = [verdict for verdict in quick(config, path) if verdict.failed]
    if bad:
        v = bad[0]
        raise UserError(f"{v.name}: {v.figure}: {v.cause}; {v.remedy} (--unchecked trains all the same)")


def examine(config: Config, path: Path, recipe: Path, console: Console) -> tuple[list[Verdict], dict[str, dict]]:
    """All verdicts, and the smoke figures of every worker. UserError for what is wrong with the recipe itself."""
    job, topology = open_job(config), topology_of(config)
    needed = budgets(job, topology)
    before = quick_checks(job, topology, path, needed)
    short = shortened(config, topology)
    scratch = path.parent / f".{path.name}.doctor.{os.getpid()}"
    run = RunDirectory(scratch, 0)
    try:
        order_of(needed, topology).write(run)
    except OSError as error:
        raise UserError(f"{scratch}: cannot be written: {error}") from None
    trouble: list[Verdict] = []
    try:
        trouble = run_workers(short, topology, scratch, recipe, console)
        findings = Findings.read_all(scratch)
    finally:
        if not trouble:
            shutil.rmtree(scratch, ignore_errors=True)
    verdicts = before + trouble + merge([(f.worker, f.verdicts) for f in findings])
    return in_order(verdicts), {f.worker: f.figures for f in findings}


def quick_checks(job: Job, topology: Topology, path: Path, needed: dict[str, Budget]) -> list[Verdict]:
    """Words, settings, space and the prediction of memory."""
    disk = disk_of(job.config, job.drafter)
    allocator = check_allocator(topology, job.config.topology.transport, os.environ)
    verdicts = [*check_words(job), allocator, check_peers(topology)]
    verdicts.append(check_space(path, disk.checkpoint, disk.kept // disk.checkpoint))
    room = place_of(job.config, None, None).memory
    for device in dict.fromkeys(topology.devices):
        roles = [role_of(topology, i) for i, d in enumerate(topology.devices) if d == device]
        total = sum(needed[role].total for role in roles)
        verdicts.append(
            judge(
                f"memory, {device}",
                total <= room,
                f"{size(total)} predicted for {' + '.join(roles)} of {size(room)} that may be filled",
                "the workers of this device need more than it has",
                "fewer unit.anchors or unit.tokens, run.checkpoint_activations, or another topology: see draftsmith plan",
            )
        )
    return verdicts


def role_of(topology: Topology, local: int) -> Role:
    """Of a local worker."""
    return "both" if not topology.targets else "target" if local < topology.targets else "trainer"


def budgets(job: Job, topology: Topology) -> dict[str, Budget]:
    """Predicted memory of the topology's roles."""
    config = job.config
    whole = target_size(job.directory, job.drafter.taps, job.config.target.trust_remote_code)
    compute = compute_of(config, "cpu" if topology.devices[0] == "cpu" else "cuda")
    on_cpu = compute.device == "cpu"
    chunks = corpus_facts(job, UnitSequence(job.corpus, job.shape, config.run.seed)).chunk_keys if on_cpu else 0
    roles = {role_of(topology, i) for i in range(topology.workers)}
    slots = config.topology.slots
    return {r: budget(r, job.drafter, job.shape, whole, compute, slots, chunks) for r in roles}


def order_of(needed: dict[str, Budget], topology: Topology) -> Order:
    """What the workers are told: a GPU counts tensors, a CPU the whole process."""
    process = next(line.bytes for b in needed.values() for line in b.lines if line.name == PROCESS)
    on_cpu = topology.devices[0] == "cpu"
    with any_number_of_variants():  # as in the watched workers: what draftsmith sets itself is no difference
        settings = compiler_settings()
    return Order({role: b.tensors for role, b in needed.items()}, process if on_cpu else 0, settings)


def shortened(config: Config, topology: Topology) -> Config:
    """The recipe with as many steps as the examination takes, one held-out row, and no logs or saves on the way."""
    steps = steps_needed(config.unit.per_step, topology.trainers)
    run = replace(
        config.run,
        evaluate_every=0,
        evaluate_units=1,
        save_every=steps + 1,
        save_minutes=0.0,
        stop_after=0,
        time_limit=0.0,
    )
    return replace(config, run=run, optim=replace(config.optim, steps=steps))


def run_workers(config: Config, topology: Topology, scratch: Path, recipe: Path, console: Console) -> list[Verdict]:
    """Run them to their end; a worker that breaks down is a verdict of its own."""
    from draftsmith.launch import supervise

    name, cause = "workers", ""
    try:
        if topology.processes == 1:
            code = run_host(config, scratch, False, console)
        else:
            code = supervise(TrainOptions(recipe, run=scratch), config, topology, scratch, (1, 1))
    except (RuntimeError, MailError, PeerLost) as error:
        code, cause = EXIT_FAILED, first_line(error)
    if code == EXIT_DONE:
        return []
    where = f"their logs are in {scratch / 'logs'}"
    return [failed(name, f"the workers ended with exit code {code}", cause or f"see above; {where}", where)]


ORDER = (
    "layer ids", "mask token", "chat template", "allocator settings", "peer access", "disk space", "memory, ", "workers",
    "mode", "compiler settings", "graph breaks", "compiled once", "compile lock", "graph replay", "input pointers",
    "stale inputs", "repeatable", "loss against eager", "gradients against eager", "taps", "packed document",
    "host syncs", "memory growth", "peak memory", "step time", "link", "checkpoint",
)  # fmt: skip


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same order every time; equal lines (peer access is looked at by everybody) once."""
    once = list(dict.fromkeys(replace(v, worker="") if v.name == "peer access" else v for v in verdicts))
    return sorted(once, key=lambda v: next((i for i, name in enumerate(ORDER) if v.name.startswith(name)), len(ORDER)))
