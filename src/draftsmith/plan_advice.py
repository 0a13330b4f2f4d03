"""What a plan advises: another T, A and G, space on disk, the smallest card that does, the largest target that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.config import Config
from draftsmith.drafters.dflash import DFlashShape, default_taps
from draftsmith.init import propose_unit
from draftsmith.job import Job
from draftsmith.plan_facts import ROOM, CorpusFacts, Place, compute_of
from draftsmith.plan_memory import Compute, TargetSize, budget, known_size, parameter_count
from draftsmith.plan_speed import Prediction
from draftsmith.rates import CARDS, GIB, KNOWN_TARGETS

BLOCKS_PER_STEP = 16384  # of published runs: 32 sequences with up to 512 blocks each
STEPS_WANTED = 2000  # fewer updates than this train a drafter badly, whatever their size


@dataclass(frozen=True)
class Proposal:
    """Another shape, with the reasons."""

    tokens: int
    anchors: int
    anchor_rate: float
    per_step: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Disk:
    checkpoint: int
    """Bytes of one checkpoint."""
    kept: int
    """Most that lie on the disk at once: the last ones, the best, and the one being written."""


def propose(job: Job, config: Config, place: Place, corpus: CorpusFacts) -> Proposal:
    """T, A and the rate by init's rule; G so that a step has as many blocks as published runs and a run enough steps."""
    found = propose_unit(job.corpus, job.held_out, job.shape.block_size, place.kind)
    shape = found.shape
    rows = corpus.tokens / shape.tokens * config.optim.epochs
    wanted = min(BLOCKS_PER_STEP / shape.anchors, rows / STEPS_WANTED)
    G = max(1, round(wanted / place.count)) * place.count
    reason = (
        f"G = {G}: {G * shape.anchors} blocks a step and about {rows / G:.0f} steps in {config.optim.epochs:g} epochs, "
        f"a multiple of {place.count} trainers"
    )
    return Proposal(shape.tokens, shape.anchors, shape.anchor_rate, G, (*found.reasons, reason))


def disk_of(config: Config, drafter: DFlashShape) -> Disk:
    """Float32 masters and two moments; the newest keep_last, the best one, and the one being written."""
    one = 12 * parameter_count(drafter)
    return Disk(one, one * (config.run.keep_last + 2))


def smallest_card(config: Config, job: Job, size: TargetSize) -> str | None:
    """The card with the least memory that holds target and trainer colocated."""
    compute = compute_of(replace(config, run=replace(config.run, mode="auto")), "cuda")
    need = budget("both", job.drafter, job.shape, size, compute, 0).total
    fitting = [c for c in CARDS.values() if need <= c.memory * GIB * ROOM]
    return min(fitting, key=lambda c: c.memory).name if fitting else None


def largest_target(job: Job, memory: int, compute: Compute) -> str | None:
    """The largest of the well-known dense targets that fits one device, colocated, with this recipe's D, B, T and A."""
    fitting = None
    for known in KNOWN_TARGETS:
        taps = default_taps(known.num_layers, max(3, len(job.drafter.taps)))
        shape = replace(
            job.drafter, hidden_size=known.hidden_size, intermediate_size=known.intermediate_size,
            num_heads=known.num_heads, num_kv_heads=known.num_kv_heads, head_dim=known.head_dim, taps=taps,
            vocab_size=max(known.vocab_size, job.drafter.mask_token + 1), num_target_layers=known.num_layers,
        )  # fmt: skip
        if budget("both", shape, job.shape, known_size(known, taps), compute, 0).total <= memory:
            fitting = known.name
    return fitting


def imbalance(ranking: Sequence[Prediction], per_step: int) -> list[str]:
    """Says when G does not divide among the trainers of the best topology."""
    if not ranking or per_step % ranking[0].layout.trainers == 0:
        return []
    R = ranking[0].layout.trainers
    idle = 1 - per_step / (-(-per_step // R) * R)
    return [f"unit.per_step = {per_step} over {R} trainers is uneven: they wait {idle:.0%} of the time for each other"]
