"""A worker process: what `draftsmith train` starts for each worker, and what torchrun, SLURM or Kubernetes start.

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m draftsmith.worker RECIPE

It meets the others at the launcher's store, takes its place by its rank, and plays its role (host.py). With
topology.workers = "threads" one process holds all workers of its host. Exit codes: 0 when the run is done or was
stopped, 1 failed, 2 the user's mistake, EXIT_PEER where another worker's end was the cause.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from draftsmith.__main__ import parse_recipe
from draftsmith.config import Config
from draftsmith.console import Console, Output
from draftsmith.errors import UserError
from draftsmith.host import Mail, Notes, log_name, patience_of, run_places
from draftsmith.job import Job, open_job, topology_of
from draftsmith.loop import StopRequest
from draftsmith.mailbox import PeerLost
from draftsmith.options import WorkerOptions
from draftsmith.run import (
    EXIT_FAILED,
    EXIT_PEER,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_USER,
    RunDirectory,
    begin_attempt,
    check_run,
    close_run,
    flatten,
    join_run,
    last_attempt,
    process,
    start_time,
    write_outcome,
)  # fmt: skip
from draftsmith.slots import connect, listen, private_directory
from draftsmith.team import Team, World
from draftsmith.topology import Place, Topology

PLACES = {"target.model", "target.revision", "data.corpus"}  # keys that may differ between hosts
PEER_SECONDS = 3.0  # a worker that lost another one waits so long for the launcher to end it and to name the cause
MEETING_SECONDS = 600.0  # to meet, before anything is loaded: all were started together
GRACE_SECONDS = 25.0  # after a polite SIGTERM; torchrun kills after 30


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process without running destructors, which could wait for workers that are gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all; until `obey_signals` it ends this one, silently
    code, terminal = EXIT_FAILED, os.dup(2)  # `redirect` sends 2 to the log
    try:
        code = work(list(sys.argv[1:] if argv is None else argv)) or 0  # None: torch's `record` after --help
    except UserError as error:
        code = EXIT_USER
        last_word(f"draftsmith: {error}", terminal)
    except SystemExit as end:  # flags that cannot be parsed
        code = end.code
    except PeerLost as error:
        code = EXIT_PEER
        last_word(f"draftsmith: {error}", terminal)
        time.sleep(PEER_SECONDS)
    finally:
        if code == EXIT_FAILED and sys.exception() is not None:
            last_word(traceback.format_exc(), terminal)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def last_word(text: str, terminal: int) -> None:
    """To the log, or where its disk is full to the launcher's terminal."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        with suppress(OSError):
            os.write(terminal, f"{text}\n".encode())


class ErrorFile(ErrorHandler):
    """torch's note of an exception, complete or absent: half of one, by a worker that was ended, breaks the launcher."""

    def record_exception(self, e: BaseException) -> None:
        place = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if place:
            os.environ["TORCHELASTIC_ERROR_FILE"] = f"{place}.tmp"
            super().record_exception(e)
            os.replace(f"{place}.tmp", place)


@partial(record, error_handler=ErrorFile())  # torchrun shows the error of the first worker that failed
def work(argv: list[str]) -> int:
    """Meet the others, play the role."""
    options, config = parse_recipe(WorkerOptions, argv, "draftsmith.worker", "a worker process")
    end_with(options.launcher or os.getppid())
    rank, size, local, per_host, restart = (
        int(os.environ.get(name, -1))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    if min(rank, size, local, per_host) < 0:
        raise UserError("draftsmith.worker is started by torchrun; without it: draftsmith train RECIPE")
    topology = topology_of(config)
    if per_host != topology.processes:
        raise UserError(
            f"{per_host} processes were started on this host, but the recipe has {topology.describe()}: "
            f"torchrun --nproc-per-node={topology.processes}"
        )
    job = open_job(config)
    hosts, host = size // per_host, rank // per_host
    world = World.join(rank, size, max(0, restart), hosts, min(MEETING_SECONDS, config.topology.first_patience))
    run, resumes = open_together(world, options, job, local)
    try:
        places = [Place(topology, i, host, hosts) for i in (range(topology.workers) if topology.threads else [local])]
        console = redirect(run, places)
        stop = StopRequest(run.path / "stop", config.run.time_limit)
        obey_signals(stop, [pid for where, pid in world.gather((host, os.getpid())) if where == host])
        leaders = [h * per_host + i for h in range(hosts) for i in range(per_host) if leads(topology, i)]
        backend = "nccl" if places[-1].device != "cpu" else "gloo"
        check_apart(
            world.gather((host, card(next(p for p in places if p.role != "target"))) if rank in leaders else None)
        )
        groups = world.groups(leaders, backend, patience_of(config))
        team = Team(topology.trainers if topology.threads else 1, groups, config.topology.first_patience)
        mails = meet_cell(world, places[0], run.attempt, config) if topology.targets and not topology.threads else None
        code = run_places(job, run, places, team, stop, console, resumes, mails, options.profile)
        if any(place.role != "target" and place.index == 0 for place in places):
            write_outcome(run, code)
        return 0 if code == EXIT_STOPPED else code
    finally:
        close_run(run)


def card(trainer: Place) -> str | None:
    """The physical GPU of a trainer: what is cuda:0 to one process may be another process's cuda:1."""
    return None if trainer.device == "cpu" else str(torch.cuda.get_device_properties(trainer.device).uuid)


def check_apart(leaders: list[tuple[int, str | None] | None]) -> None:
    """NCCL adds up between GPUs only; two hosts of a launcher may be containers of one machine, which share them."""
    hosts: dict[str, int] = {}
    for host, gpu in filter(None, leaders):
        if gpu in hosts:
            raise UserError(
                f"trainers of hosts {hosts[gpu]} and {host} were given the same GPU (UUID {gpu}), but NCCL sums gradients "
                "between GPUs only; give each host its own ones, as by CUDA_VISIBLE_DEVICES"
            )
        if gpu is not None:
            hosts[gpu] = host


def leads(topology: Topology, local: int) -> bool:
    """The host's process of this number holds trainers."""
    return topology.threads or local >= topology.targets


def open_together(world: World, options: WorkerOptions, job: Job, local: int) -> tuple[RunDirectory, bool]:
    """The first process opens the run directory for all; each host has it too, in the same place or in one of its own.

    Workers whose launchers have started this run before go on with it: after a failure, or when a host has come or gone.
    Returns the directory and whether the run goes on.
    """
    path, config = options.run or Path("runs") / options.recipe.stem, job.config
    about = (flatten(config.to_dict()), job.corpus_identity)
    here = (last_attempt(path), process(os.getppid()), *about) if local == 0 else None
    hosts = [host for host in world.gather(here) if host is not None]
    check_recipes([recipe for _, _, recipe, _ in hosts])
    check_corpora([corpus for *_, corpus in hosts])
    launchers, before = [launcher for _, launcher, *_ in hosts], [last for last, *_ in hosts if last is not None]
    again = any(one in launchers for _, started_by in before for one in started_by)
    resume = options.resume or again
    attempt = max((number + 1 for number, _ in before), default=0)
    own = resume and (here is None or here[0] is not None or not before)  # else another host's directory holds the run
    agree(world, local == 0, lambda: check_run(path, config, own, same_launch=again))
    agree(world, world.rank == 0, lambda: begin_attempt(path, config, attempt, launchers, again))
    agree(world, local == 0 and world.rank != 0, lambda: join_run(path, config, attempt, launchers))
    return RunDirectory(path, attempt), resume


def check_recipes(recipes: list[dict[str, Any]]) -> None:
    """All hosts must do the same; only where the target and the corpus lie may differ."""
    for host, recipe in enumerate(recipes):
        for key in recipe.keys() - PLACES:
            if recipe[key] != recipes[0][key]:
                raise UserError(
                    f"{key} is {recipe[key]!r} on host {host} and {recipes[0][key]!r} on host 0; give all hosts one recipe"
                )


def check_corpora(identities: list[str]) -> None:
    """All hosts must hold the same documents, wherever they lie."""
    for host, corpus in enumerate(identities):
        if corpus != identities[0]:
            raise UserError(
                f"data.corpus holds another corpus on host {host} (identity {corpus}) than on host 0 ({identities[0]}); "
                "copy one of them to all hosts"
            )


def agree(world: World, acts: bool, action: Callable[[], object]) -> None:
    """Do `action` in the processes that act; every process raises the first UserError of any."""
    refusal = None
    if acts:
        try:
            action()
        except UserError as error:
            refusal = str(error)
    refusals = [text for text in world.gather(refusal) if text is not None]
    if refusals:
        raise UserError(refusals[0])


def redirect(run: RunDirectory, places: list[Place]) -> Notes:
    """Send everything this process prints to its log; the first trainer's lines go to the launcher's terminal, too, and
    one line of each target, which all wait for while it loads."""
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    log: TextIO = (run.logs / log_name(places)).open("a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    faulthandler.enable(log)
    console = Console(Output(file=terminal, highlight=False))
    if places[0].local == 0 and places[0].host > 0:
        console.note(
            f"host {places[0].host} of {places[0].hosts} has joined; host 0 shows the run, {run.logs} has its own lines"
        )
    if len(places) == 1 and places[0].role == "target":
        console.note(f"{places[0].name} loads on {places[0].device}; its lines: {log.name}")
    return Notes(log, console if any(place.is_first for place in places) else None)


def meet_cell(world: World, place: Place, attempt: int, config: Config) -> list[Mail]:
    """Connect every trainer of each host with every target of it, through sockets in a directory that is gone afterwards."""
    first = place.local == 0
    directories = world.gather((place.host, str(private_directory()) if first else None))
    directory = Path(next(path for host, path in directories if host == place.host and path is not None))
    target = place.role == "target"
    listener = listen(directory, place.index) if target else None
    world.gather(None)
    sockets: list[socket.socket] = [] if target else connect(directory, place.topology.targets)
    world.gather(None)
    if first:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    return [Mail(place, attempt, patience_of(config), sockets, listener)]


def end_with(launcher: int) -> None:
    """A worker never outlives its launcher, however that ends (PR_SET_PDEATHSIG), also when it had ended before."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(EXIT_TERMINATED)


def obey_signals(stop: StopRequest, siblings: list[int]) -> None:
    """SIGTERM or SIGINT: end at once if another worker of this host has ended (the launcher clears up after a failure),
    else ask for a stop, and end if that takes too long. In a thread of its own: the main one may be blocked anywhere."""
    started = {pid: start_time(pid) for pid in siblings}
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the wake-up below does the work
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def obey() -> None:
        while ours.recv(1):
            if any(start_time(pid) != at for pid, at in started.items()):
                os._exit(EXIT_TERMINATED)
            if not stop.requested:
                print("draftsmith: told to stop, which every trainer will after the same step", file=sys.stderr)
                stop.ask()
                threading.Timer(GRACE_SECONDS, os._exit, (EXIT_TERMINATED,)).start()

    # `theirs` is kept alive by the thread's closure
    threading.Thread(target=lambda: (obey(), theirs.close()), name="signals", daemon=True).start()


if __name__ == "__main__":
    main()
