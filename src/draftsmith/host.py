"""The workers of one process: what a role is given, one worker in the main thread or several in threads.

A role is a plain function of a Worker: train.trainer, prefill.target_role.
"""

import os
import platform
import socket
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch

from draftsmith.config import Config
from draftsmith.console import Advance, Console, no_progress, step_line
from draftsmith.events import StepRecord
from draftsmith.job import Job, open_job, topology_of
from draftsmith.loop import StopRequest
from draftsmith.mailbox import Patience, PeerLost, TargetEnd, TrainerEnd
from draftsmith.run import RunDirectory, close_run, open_run
from draftsmith.slots import SlotMemory, accept, offer, receive, socket_pairs
from draftsmith.step_modes import allow_recompiles, forbid_recompiles
from draftsmith.team import Barrier, Member, Team
from draftsmith.topology import Place, Topology


@dataclass(frozen=True)
class Mail:
    """One worker's connections inside its cell: a target's listener, or sockets, and what threads share."""

    place: Place
    attempt: int
    patience: Patience
    sockets: list[socket.socket] = field(default_factory=list)
    listener: socket.socket | None = None
    local: dict[str, SlotMemory] | None = None
    """Slots of the targets of this process, by name."""

    def as_target(self, memory: SlotMemory) -> tuple[TargetEnd, int]:
        """Wait for the cell's trainers and hand them the slots; also the step they start from."""
        me, cell = self.place.name, self.place.cell()
        if self.local is not None:
            self.local[me] = memory
        sockets = self.sockets or accept(self.listener, cell.trainers, self.patience.first)
        lines, start = offer(sockets, me, self.attempt, memory, self.patience.first)
        return TargetEnd(me, self.attempt, cell, memory.tensors, lines, self.patience), start

    def as_trainer(self, start: int) -> TrainerEnd:
        """Wait for the cell's targets, open their slots, tell them the step to start from."""
        me, index = self.place.name, self.place.index
        lines, slots = receive(self.sockets, me, index, self.attempt, start, self.local, self.patience.first)
        return TrainerEnd(me, self.attempt, self.place.cell(), slots, lines, self.patience)

    def close(self) -> None:
        """Whoever waits for this worker learns that it is gone."""
        for one in (*self.sockets, *([self.listener] if self.listener else [])):
            one.close()


@dataclass(frozen=True)
class Worker:
    """What a role is given."""

    job: Job
    run: RunDirectory
    place: Place
    stop: StopRequest
    console: "Notes"
    member: Member | None
    """A trainer's."""
    mail: Mail | None
    """None when colocated."""
    resumes: bool
    all_set_up: "Meeting"
    """Of the workers of this process."""
    profile: str | None = None
    """Steps to profile, of the first trainer."""


class Meeting:
    """Where the workers of one process wait until all have loaded, compiled and captured: a thread that uses the GPU,
    however little, breaks the capture of another one. From then on a recompile is an error, unless a worker needs it."""

    def __init__(self, workers: int, seconds: float, forbids: bool = True):
        self._barrier = Barrier(workers, seconds, self._all_here)
        self._forbids = forbids

    def wait(self, may_compile: bool = False) -> None:
        """`may_compile`: a model that breaks into parts compiles some of them only when it needs them."""
        if may_compile:
            self._forbids = False
        self._barrier.wait()

    def abort(self) -> None:
        """Whoever waits learns that another one has failed."""
        self._barrier.abort()

    def _all_here(self) -> None:
        if self._forbids:
            forbid_recompiles()


class Notes:
    """A console whose lines go to a log file, too; either may be None."""

    def __init__(self, log: TextIO | None, console: Console | None):
        self._log, self._console = log, console

    def note(self, text: str) -> None:
        self._line(text)
        if self._console is not None:
            self._console.note(text)

    def step(self, record: StepRecord, total: int) -> None:
        self._line(step_line(record, total))
        if self._console is not None:
            self._console.step(record, total)

    def progress(self, description: str, total: int | None, unit: str) -> AbstractContextManager[Advance]:
        """Console.progress, if there is a console."""
        return (self._console.progress if self._console else no_progress)(description, total, unit)

    def close(self) -> None:
        """Take the console's progress display away."""
        if self._console is not None:
            self._console.close()

    def _line(self, text: str) -> None:
        if self._log is not None:
            with suppress(OSError):  # a full disk must not end a run; the event log says it
                os.write(self._log.fileno(), f"{time.strftime('%H:%M:%S')} {text}\n".encode())


def run_host(config: Config, path: Path, resume: bool, console: Console, profile: str | None = None) -> int:
    """All workers of a run on this host in this process: one, or threads. Returns an exit code of run.py."""
    topology = topology_of(config)
    places = [Place(topology, local) for local in range(topology.workers)]
    job = open_job(config)
    run = open_run(path, config, resume)
    try:
        with ExitStack() as stack:
            log = stack.enter_context((run.logs / log_name(places)).open("a", buffering=1))
            team, notes = Team(topology.trainers, seconds=config.topology.first_patience), Notes(log, console)
            stop = stack.enter_context(StopRequest(path / "stop", config.run.time_limit, notes.note))
            return run_places(job, run, places, team, stop, notes, resume, profile=profile)
    finally:
        close_run(run)


def run_places(
    job: Job, run: RunDirectory, places: list[Place], team: Team, stop: StopRequest, console: Notes, resume: bool,
    mails: list[Mail] | None = None, profile: str | None = None,
) -> int:  # fmt: skip
    """The workers of one process: in this thread if there is one, else in a thread each."""
    patience = patience_of(job.config)
    mails = mails or (thread_mails(places, run.attempt, patience) if places[0].topology.targets else [])
    quiet = Notes(None, None) if len(places) > 1 else console
    trainers = [place for place in places if place.role != "target"]
    counts_recompiles = run.examination.is_file()  # the doctor
    meeting = Meeting(len(places), patience.first, forbids=not counts_recompiles)
    workers = [
        Worker(
            job, run, place, stop, console if place.is_first else quiet,
            team.member(trainers.index(place)) if place in trainers else None, mails[i] if mails else None, resume,
            meeting, profile if place.is_first else None,
        )
        for i, place in enumerate(places)
    ]  # fmt: skip
    try:
        return play(workers[0]) if len(workers) == 1 else Threads(workers, team).run()
    finally:
        console.close()
        allow_recompiles()


def play(worker: Worker) -> int:
    """One worker's role, from set-up to its end."""
    from draftsmith.prefill import target_role
    from draftsmith.train import trainer

    config, device = worker.job.config, torch.device(worker.place.device)
    torch.set_num_threads(intra_op_threads(config, worker.place.topology))  # of this thread
    if device.type == "cuda":
        torch.cuda.set_device(device)
    role = target_role if worker.place.role == "target" else trainer
    if worker.run.examination.is_file():
        from draftsmith.doctor_run import examine_target, examine_trainer

        role = examine_target if worker.place.role == "target" else examine_trainer
    try:
        return role(worker)
    finally:
        if worker.mail is not None:
            worker.mail.close()


class Threads:
    """Workers as threads. The first error ends all of them and is raised in the caller."""

    LEAVE = 5.0  # seconds that threads are given to notice

    def __init__(self, workers: list[Worker], team: Team):
        self._workers, self._team = workers, team
        self._codes: dict[str, int] = {}
        self._errors: list[BaseException] = []

    def run(self) -> int:
        threads = [threading.Thread(target=self._one, args=(w,), name=w.place.name, daemon=True) for w in self._workers]
        for thread in threads:
            thread.start()
        end = None
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.1)  # short, so that this thread can take signals
            if self._errors and end is None:
                end = time.monotonic() + self.LEAVE
            if end is not None and time.monotonic() > end:
                break
        if self._errors:
            raise next((e for e in self._errors if not isinstance(e, PeerLost)), self._errors[0])
        return max(self._codes.values())

    def _one(self, worker: Worker) -> None:
        with ExitStack() as stack:
            stack.push(self._keep)
            self._codes[worker.place.name] = play(worker)

    def _keep(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        """A thread's error is raised in the caller's thread instead of being printed in its own."""
        if error is not None:
            self._errors.append(error)
            self._team.abort()
            self._workers[0].all_set_up.abort()
        return True


def thread_mails(places: list[Place], attempt: int, patience: Patience) -> list[Mail]:
    """Connections between the threads of one process, in the order of `places`."""
    topology, local = places[0].topology, {}
    of_target, of_trainer = socket_pairs(topology.targets, topology.trainers)
    sockets = [*of_target, *of_trainer]
    return [Mail(place, attempt, patience, sockets[place.local], None, local) for place in places]


def patience_of(config: Config) -> Patience:
    return Patience(config.topology.first_patience, config.topology.patience)


def intra_op_threads(config: Config, topology: Topology) -> int:
    """run.threads, or this host's CPUs shared out."""
    return config.run.threads or max(1, len(os.sched_getaffinity(0)) // topology.workers)


def log_name(places: list[Place]) -> str:
    """HOST.ROLEn.log of a process that hosts one worker, HOST.threads.log of one that hosts several."""
    host = platform.node().split(".")[0] or "localhost"
    worker = f"{places[0].role}{places[0].number}" if len(places) == 1 else f"threads{places[0].host}"
    return f"{host}.{worker}.log"
