"""What a plan starts from: the devices that are planned for, how they compute, and counts of the corpus."""

from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.config import Config
from draftsmith.doctor_checks_device import host_memory
from draftsmith.errors import UserError
from draftsmith.job import Job
from draftsmith.plan_memory import Compute, count_chunk_keys
from draftsmith.rates import GIB, Card, card, card_of
from draftsmith.step_modes import resolve_mode
from draftsmith.unit import UnitSequence

ROOM = 0.97  # of a device's memory that a plan may fill: allocators round up
SAMPLE = 3  # units whose documents stand for all


@dataclass(frozen=True)
class Place:
    """The devices that are planned for."""

    kind: str
    """"cuda" or "cpu"."""
    name: str
    count: int
    memory: int
    """Bytes of one device that a plan may fill."""
    card: Card | None
    here: bool
    """They are in this machine."""


@dataclass(frozen=True)
class CorpusFacts:
    """Of the training split, and of the recipe's units over it."""

    documents: int
    tokens: int
    mean_length: float
    longest: int
    rows_in_epoch: int
    tokens_used: float
    """Share of a row's tokens."""
    anchors_used: float
    mean_context: float
    squared_lengths: float
    """Sum over a row's documents of length^2."""
    chunk_keys: int


def place_of(config: Config, device: str | None, count: int | None) -> Place:
    """The named card, else the devices of this machine, else its CPU."""
    if count is not None and count < 1:
        raise UserError(f"--count {count}: at least one device")
    if device is not None and device.lower() != "cpu":
        found = card(device)
        return Place("cuda", found.name, count or 1, int(found.memory * GIB * ROOM), found, here=False)
    here = torch.cuda.device_count() if torch.cuda.is_available() and config.run.device != "cpu" else 0
    if here and device is None:
        properties = torch.cuda.get_device_properties(0)
        found = card_of(properties.name, properties.total_memory / GIB)
        return Place("cuda", properties.name, count or here, int(properties.total_memory * ROOM), found, here=True)
    if config.run.device == "cuda" and device is None:
        raise UserError(
            'run.device = "cuda" but this torch sees no CUDA device: name a card, e.g. --device h200 --count 8'
        )
    return Place("cpu", "CPU", count or 1, int(host_memory() * ROOM), None, here=True)


def compute_of(config: Config, kind: str) -> Compute:
    """dtype and mode as the recipe resolves them on that kind of device."""
    automatic = "bfloat16" if kind == "cuda" else "float32"
    dtype = automatic if config.target.dtype == "auto" else config.target.dtype
    item = {"bfloat16": 2, "float32": 4}[dtype]
    mode = resolve_mode(config.run.mode, torch.device(kind))
    return Compute(kind, item, mode, config.run.checkpoint_activations)


def corpus_facts(job: Job, units: UnitSequence) -> CorpusFacts:
    """Counts of the corpus; the means are of the first units."""
    lengths, shape = job.corpus.lengths, job.shape
    rows = units.rows_in_epoch(0)
    sample = [units.unit(u) for u in range(min(SAMPLE, rows))]
    contexts = [(u.anchors - u.starts)[: u.anchors_used] for u in sample]
    squares = [np.square(np.bincount(u.documents[: u.tokens_used])).sum() for u in sample]
    return CorpusFacts(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        mean_length=float(lengths.mean()),
        longest=int(lengths.max()),
        rows_in_epoch=rows,
        tokens_used=float(lengths.sum() / (rows * shape.tokens)),
        anchors_used=float(np.mean([u.anchors_used / shape.anchors for u in sample])),
        mean_context=float(np.concatenate(contexts).mean()) if any(map(len, contexts)) else 0.0,
        squared_lengths=float(np.mean(squares)),
        chunk_keys=int(np.mean([count_chunk_keys(u) for u in sample])),
    )
