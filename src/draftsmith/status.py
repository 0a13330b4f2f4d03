"""`draftsmith status RUN`: how a run stands, in a few lines or as JSON for scripts. From files only, no torch."""

import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from draftsmith.console import duration, number
from draftsmith.events import DEVICE_SUFFIX, WAIT_PREFIX
from draftsmith.history import Run, Session, read_run

RECENT = 20  # log steps that current rates and shares are taken over


@dataclass(frozen=True)
class StatusOptions:
    """How a run stands now."""

    run: Positional[Path]
    """Run directory."""
    as_json: Annotated[bool, arg(name="json")] = False
    """One JSON object on standard output."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker over its last log steps."""

    worker: str
    state: str
    """running, ended, failed or killed."""
    busy_share: float | None
    """Share of the time inside spans of work, 0..1; None without spans."""
    wait_share: float | None
    """Share of the time inside wait_* spans."""
    span_shares: dict[str, float]
    """Share of the time by span name."""
    silent_seconds: float


@dataclass(frozen=True)
class Status:
    """How a run stands; units in the names, None where the run's files do not tell."""

    run: str
    state: str
    attempt: int
    step: int
    total_steps: int | None
    elapsed_seconds: float
    left_seconds: float | None
    silent_seconds: float | None
    loss: float | None
    acceptance_length: float | None
    """Newest held-out walk, bonus included."""
    best_acceptance_length: float | None
    best_step: int | None
    tokens_per_second: float | None
    useful_tflops: float | None
    ceiling_tflops: float | None
    memory_bytes: int | None
    skipped_updates: int | None
    recompiles: int | None
    replays: int | None
    checkpoints: list[int]
    workers: list[WorkerStatus]
    bottleneck: str | None
    """What the speed hangs on: the newest record's `bound_by`, else the busiest of several roles."""
    error: str | None
    left_out: list[str]
    """What the run's files hold that is not what was written, a line each."""


def main(options: StatusOptions) -> int:
    """`draftsmith status`."""
    status = status_of(read_run(options.run))
    if options.as_json:
        json.dump(asdict(status), sys.stdout, indent=1)
        print()
    else:
        print("\n".join(lines(status)))
    return 0


def status_of(run: Run, now: float | None = None) -> Status:
    """Everything worth a glance; `now` is the time in seconds since the epoch."""
    now = time.time() if now is None else now
    newest: dict[str, Any] = dict(run.steps[-1]) if run.steps else {}
    best = max(run.evaluations, key=lambda e: e["acceptance_length"], default={})
    walked = run.evaluations[-1] if run.evaluations else {}
    state = run.state(now)
    workers = [_worker(session, state, now) for session in run.current()]
    return Status(
        run=run.name,
        state=state,
        attempt=run.attempt,
        step=run.done_steps,
        total_steps=run.total_steps,
        elapsed_seconds=run.elapsed_seconds(),
        left_seconds=run.left_seconds() if state == "running" else None,
        silent_seconds=max(0.0, now - max(s.last for s in run.sessions)) if run.sessions else None,
        loss=newest.get("loss"),
        acceptance_length=walked.get("acceptance_length"),
        best_acceptance_length=best.get("acceptance_length"),
        best_step=best.get("step"),
        tokens_per_second=newest.get("tokens_per_second"),
        useful_tflops=newest.get("useful_tflops"),
        ceiling_tflops=newest.get("ceiling_tflops"),
        memory_bytes=newest.get("memory_bytes"),
        skipped_updates=newest.get("skipped_updates"),
        recompiles=newest.get("recompiles"),
        replays=newest.get("replays"),
        checkpoints=run.checkpoints(),
        workers=workers,
        bottleneck=newest.get("bound_by") or _bottleneck(run.current()),
        error=next((s.error for s in run.current() if s.error), None),
        left_out=run.left_out(),
    )


def shares(session: Session, last: int = RECENT) -> dict[str, float]:
    """Share of the time of the last log steps by span name."""
    recent = session.busy(last)
    seconds = sum(line["seconds"] for line in recent)
    sums: dict[str, float] = defaultdict(float)
    for line in recent:
        for name, value in line["span_seconds"].items():
            sums[name] += value
    return {name: value / seconds for name, value in sums.items()} if seconds > 0 else {}


def waiting(span_shares: dict[str, float]) -> float:
    """The part of the shares that is waiting."""
    return sum(value for name, value in span_shares.items() if name.startswith(WAIT_PREFIX))


def _worker(session: Session, run_state: str, now: float) -> WorkerStatus:
    by_name = shares(session)
    ended = ("failed" if session.error else "ended") if session.ended else run_state
    wait = waiting(by_name) if by_name else None
    busy = sum(by_name.values()) - wait if wait is not None else None
    return WorkerStatus(session.worker, ended, busy, wait, by_name, max(0.0, now - session.last))


def _bottleneck(sessions: list[Session]) -> str | None:
    """The role with the highest mean busy share, of its devices if they tell: the others wait for it. None where all
    workers have one role."""
    by_role: dict[str, list[float]] = defaultdict(list)
    for session in [s for s in sessions if s.of_device] or sessions:
        if session.busy_lines:
            by_name = shares(session)
            by_role[session.role.removesuffix(DEVICE_SUFFIX)].append(sum(by_name.values()) - waiting(by_name))
    if len(by_role) < 2:
        return None
    return max(by_role, key=lambda role: sum(by_role[role]) / len(by_role[role]))


def lines(status: Status) -> list[str]:
    """The status for people."""
    of = f" of {status.total_steps:,}" if status.total_steps else ""
    out = [f"{status.run}: {status.state}, step {status.step:,}{of}, {duration(status.elapsed_seconds)}"]
    if status.error:
        out.append(f"  error        {status.error}")
    if status.left_seconds is not None:
        out.append(f"  left         {duration(status.left_seconds)}")
    if status.loss is not None:
        out.append(f"  loss         {status.loss:.4f}")
    if status.acceptance_length is not None and status.best_acceptance_length is not None:
        best = f" (best {status.best_acceptance_length:.3f} at step {status.best_step:,})"
        out.append(f"  acceptance   {status.acceptance_length:.3f} tokens a cycle on held-out text{best}")
    if status.tokens_per_second is not None:
        out.append(f"  speed        {number(status.tokens_per_second)} tokens/s{_ceiling(status)}")
    if status.memory_bytes is not None:
        out.append(f"  memory       {status.memory_bytes / 2**30:.2f} GiB")
    if status.skipped_updates:
        out.append(f"  skipped      updates: {status.skipped_updates}")
    if status.recompiles:
        out.append(f"  recompiled   {status.recompiles} times since training began")
    if status.checkpoints:
        out.append(f"  checkpoints  {', '.join(f'{step:,}' for step in status.checkpoints)}")
    for worker in status.workers:
        busy = "" if worker.busy_share is None else f", busy {worker.busy_share:.0%}, waiting {worker.wait_share:.0%}"
        silent = "" if worker.state == "ended" else f", last word {duration(worker.silent_seconds)} ago"
        out.append(f"  {worker.worker}: {worker.state}{busy}{silent}")
    if status.bottleneck:
        out.append(f"  bound by     {status.bottleneck}")
    out += [f"  note         {text}" for text in status.left_out]
    return out


def _ceiling(status: Status) -> str:
    if status.useful_tflops is None:
        return ""
    share = f", {status.useful_tflops / status.ceiling_tflops:.0%} of the ceiling" if status.ceiling_tflops else ""
    return f", {status.useful_tflops:.3g} useful TFLOP/s{share}"
