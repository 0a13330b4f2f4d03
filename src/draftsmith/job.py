"""A recipe with everything it needs opened and checked, before any worker loads a model or writes a file.

Every worker of a run opens its own Job; what it holds is a pure function of the recipe and of files that do not change.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import torch

from draftsmith import models
from draftsmith.config import Config
from draftsmith.console import ShowProgress, no_progress
from draftsmith.data.shards import Corpus, identity
from draftsmith.data.template import check_matches
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random
from draftsmith.drafters.init import init_from_target
from draftsmith.drafters.shape import drafter_shape
from draftsmith.errors import UserError
from draftsmith.loop import Plan
from draftsmith.mask_token import check_mask_token
from draftsmith.sinks import require
from draftsmith.step import Tables
from draftsmith.step_modes import resolve_mode
from draftsmith.tables import load_tables
from draftsmith.target import RowPlan, Target
from draftsmith.topology import Place, Topology, resolve_topology
from draftsmith.unit import (
    PlanCache,
    Unit,
    UnitSequence,
    UnitShape,
    check_documents,
    check_lengths,
    evaluation_chunks,
    fitting_anchor_rate,
    longest_document,
    plan_epoch,
)


@dataclass(frozen=True)
class Job:
    """What is to be done, the same in every worker."""

    config: Config
    directory: Path
    """The target's."""
    corpus: Corpus
    held_out: Corpus
    rows: list[list[int]]
    """Held-out rows that are evaluated, each as its documents."""
    shape: UnitShape
    drafter: DFlashShape

    @cached_property
    def corpus_identity(self) -> str:
        """The same wherever the corpus lies (shards.py)."""
        return identity(self.corpus, self.held_out)

    def units(self, run: Path) -> UnitSequence:
        """The training sequence; plans are kept in `run`. Not for several threads at once: one for each."""
        plans = PlanCache(run / "plans" / self.corpus_identity)
        return UnitSequence(self.corpus, self.shape, self.config.run.seed, plans)

    def plan(self, units: UnitSequence, place: Place, start: int) -> Plan:
        """The steps that are left; a target's trainer number means nothing."""
        c = self.config
        trainer = place.number if place.role != "target" else 0
        total = total_steps(c, units)
        return Plan(start, total, c.unit.per_step, trainer, place.trainers, c.run.evaluate_every, len(self.rows))

    def held_out_row(self, number: int) -> list[Unit]:
        """A held-out row as the chunks of its valid anchors (unit.py)."""
        return evaluation_chunks(self.held_out, self.rows[number], self.shape, number)

    def load_target(self, device: torch.device, progress: ShowProgress = no_progress) -> Target:
        c = self.config
        return Target.load(
            self.directory, self.drafter.taps, dtype_of(c.target.dtype, device), device,
            mode=c.run.mode, rows=row_plan(self), trust_remote_code=c.target.trust_remote_code,
            progress=progress,
        )  # fmt: skip

    def load_tables(self, device: torch.device) -> Tables:
        c = self.config.target
        return load_tables(self.directory, dtype_of(c.dtype, device), device, c.trust_remote_code)

    def make_drafter(self) -> DFlash:
        return make_drafter(self.config, self.directory)

    def mask_token_report(self) -> str:
        """What the mask token is and why it is safe; UserError when texts may hold it."""
        return check_mask_token(self.directory, self.drafter.mask_token, self.config.target.trust_remote_code)

    def template_report(self) -> str:
        """Which chat template, with which options, the corpus went through."""
        c = self.config.target
        if self.corpus.manifest.template_hash is None:
            return "none: the corpus was prepared from text that had been through one"
        options = ", ".join(f"{k} = {v}" for k, v in c.template_options.items()) or "no options"
        template = c.chat_template or "the model's own"
        return f"{template}, {options}; the corpus was prepared with the same"


def open_job(config: Config) -> Job:
    """UserError for everything that can be wrong with a recipe, its corpus and its target's directory."""
    for sink in config.run.sinks:
        require(sink)
    directory = models.resolve(config.target.model, config.target.revision)
    corpus, held_out = (Corpus.open(Path(config.data.corpus), split) for split in ("train", "held_out"))
    c = config.target
    check_matches(corpus.manifest, directory, c.chat_template, c.template_options, c.trust_remote_code)
    unit = config.unit
    rate = unit.anchor_rate or fitting_anchor_rate(corpus, unit.tokens, unit.anchors)
    shape = UnitShape(unit.tokens, unit.anchors, config.drafter.block, rate)
    drafter = drafter_shape(config, directory)
    try:
        check_documents(corpus, shape)
        check_lengths(held_out, shape, "held-out document")
        rows = plan_epoch(held_out, shape, seed=0, epoch=0) if len(held_out.lengths) else []
    except ValueError as error:
        raise UserError(f"{config.data.corpus}: {error}") from None
    return Job(config, directory, corpus, held_out, rows[: config.run.evaluate_units], shape, drafter)


def make_drafter(config: Config, directory: Path) -> DFlash:
    """The drafter of a recipe with its first weights (float32, CPU)."""
    drafter = DFlash(drafter_shape(config, directory))
    init_random(drafter, config.run.seed)
    if config.drafter.init == "target":
        init_from_target(drafter, directory, config.target.trust_remote_code)
    return drafter


def total_steps(config: Config, units: UnitSequence) -> int:
    """optim.steps, or what optim.epochs of the corpus come to."""
    if config.optim.steps:
        return config.optim.steps
    epochs = config.optim.epochs
    rows = sum(units.rows_in_epoch(e) for e in range(ceil(epochs))) * epochs / ceil(epochs)
    return max(1, round(rows / config.unit.per_step))


def last_step(job: Job, resume: bool = False) -> int:
    """The run's, or run.stop_after where that comes before it; a run that goes on may be past that already."""
    total = total_steps(job.config, UnitSequence(job.corpus, job.shape, job.config.run.seed))
    return total if resume else min(total, job.config.run.stop_after or total)


def row_plan(job: Job) -> RowPlan:
    """The shape of the rows that the target will get."""
    return RowPlan(job.shape.tokens, longest_document(job.corpus, job.held_out))


def automatic_device() -> str:
    """What run.device = "auto" means here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def topology_of(config: Config) -> Topology:
    """The recipe's workers on this host's devices."""
    devices = torch.cuda.device_count() if config.run.device != "cpu" and torch.cuda.is_available() else 0
    if config.run.device == "cuda" and not devices:
        raise UserError('run.device = "cuda": this torch sees no CUDA device; use "cpu" or "auto"')
    topology = resolve_topology(config, devices)
    if config.run.mode == "graph":
        resolve_mode(config.run.mode, torch.device(topology.devices[-1]))
    return topology


def dtype_of(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype that target.dtype or --dtype names; auto: bfloat16 on CUDA, float32 on the CPU."""
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"auto": automatic, "float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
