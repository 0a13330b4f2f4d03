"""`draftsmith train` and `draftsmith stop`: starts the workers, watches over them, says what went wrong, starts again.

One worker runs in this very process. Several are processes under torch's elastic agent (what torchrun runs), so that
other launchers can start the same `draftsmith.worker`. On one host everything listens on the loopback interface alone.
SIGTERM or SIGINT asks the run to checkpoint and end, a second one ends it at once; a worker's first failure ends all.
"""

import fcntl
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith.config import Config
from draftsmith.console import Console
from draftsmith.errors import UserError
from draftsmith.failure import Failure, Restarts, explain, first_failure, out_of_memory_kills
from draftsmith.mailbox import PeerLost
from draftsmith.options import StopOptions, TrainOptions
from draftsmith.profile import check_in_run, profiled_steps
from draftsmith.run import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER,
    RunDirectory,
    attempt_of,
    check_directory,
    check_run,
    last_attempt,
    process,
    read_outcome,
    read_owner,
    write_json,
)  # fmt: skip
from draftsmith.topology import Topology

SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address


def launch(options: TrainOptions, config: Config) -> int:
    """`draftsmith train`. Returns an exit code of run.py."""
    from draftsmith.checkpoint import list_checkpoints
    from draftsmith.host import run_host
    from draftsmith.job import last_step, open_job, topology_of

    path = options.run or Path("runs") / options.recipe.stem
    check_options(options)
    check_directory(path)
    if options.topology == "auto":
        from draftsmith.plan import best_topology

        config = best_topology(config)
    hosts, topology = hosts_of(options), topology_of(config)
    if options.profile is not None:
        done = max((c.step for c in list_checkpoints(path)), default=0) if options.resume else 0
        check_in_run(options.profile, done, last_step(open_job(config), options.resume))
    if not options.unchecked:
        from draftsmith.doctor import refuse_unfit

        refuse_unfit(config, path)
    if hosts == (1, 1) and topology.processes == 1 and not options.restarts and not options.detach:
        try:
            return run_host(config, path, options.resume, Console(), options.profile)
        except PeerLost as error:
            say(str(error))
            return EXIT_FAILED
        except (KeyboardInterrupt, SystemExit) as ended:
            # By a second signal. Threads that still run would break a usual exit.
            number = signal.SIGINT if isinstance(ended, KeyboardInterrupt) else signal.SIGTERM
            say(f"ended at once by {number.name}")
            os._exit(128 + number)
    open_job(config)
    if hosts == (1, 1):  # of several, another one may have begun the run
        check_run(path, config, options.resume)
    if options.detach:
        return detach(options, config, path)
    return supervise(options, config, topology, path, hosts)


def check_options(options: TrainOptions) -> None:
    """What would else come out only when models are loaded and a run directory is made."""
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: must not be negative")
    if options.profile is not None:
        profiled_steps(options.profile)
    if options.rendezvous is not None:
        host, _, port = options.rendezvous.rpartition(":")
        if not host or not (port.isdecimal() and 0 < int(port) < 65536):
            raise UserError(f"--rendezvous {options.rendezvous!r}: give HOST:PORT, e.g. node0:29400")


def hosts_of(options: TrainOptions) -> tuple[int, int]:
    """--hosts "2" or "1:2" -> (fewest, most)."""
    fewest, _, most = options.hosts.partition(":")
    if not fewest.isdecimal() or not (most or fewest).isdecimal() or not 1 <= int(fewest) <= int(most or fewest):
        raise UserError(f"--hosts {options.hosts!r}: give a number, or FEWEST:MOST")
    if int(most or fewest) > 1 and options.rendezvous is None:
        raise UserError("--hosts: several hosts need --rendezvous HOST:PORT, the same on all of them")
    return int(fewest), int(most or fewest)


def supervise(options: TrainOptions, config: Config, topology: Topology, path: Path, hosts: tuple[int, int]) -> int:
    """Run the workers to the end; on one host, start again after a failure as often as asked."""
    console, resume = Console(), options.resume
    write_recipe(path, config)
    single, (fewest, most) = hosts == (1, 1), hosts
    if not single:
        more = f" or up to {most}, for half a minute" if most > fewest else ""
        console.note(f"meeting at {options.rendezvous}: waits for {fewest} hosts{more}")
    with asking_to_stop(path):
        for start in range(options.restarts + 1 if single else 1):
            code = run_workers(options, topology, path, hosts, resume, console)
            if code != EXIT_FAILED or start == options.restarts or (path / "stop").exists() or not single:
                break
            resume = (path / "config.json").is_file()
            console.note(f"starting again, {start + 1} of {options.restarts} restarts")
    return code


def run_workers(
    options: TrainOptions, topology: Topology, path: Path, hosts: tuple[int, int], resume: bool, console: Console
) -> int:
    """One start of all workers of this host under torch's elastic agent."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    from draftsmith.rendezvous import register_loopback
    from draftsmith.slots import private_directory, sweep_private_directories

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # this file says it in one place
    killed_before, attempt_before = out_of_memory_kills(), last_attempt(path)

    def tell(failure: Failure) -> None:
        for line in explain(failure, topology, path, out_of_memory_kills() - killed_before):
            console.note(line)

    single, restarts = hosts == (1, 1), Restarts(tell)
    if single:
        register_loopback()
    else:
        restarts.listen()
        # With torch's shared store the workers of a second meeting would read the keys of the first.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    notes = private_directory()  # torch's; in the run directory a full disk would break the agent, too
    launch_config = LaunchConfig(
        min_nodes=hosts[0],
        max_nodes=hosts[1],
        nproc_per_node=topology.processes,
        run_id="draftsmith",
        rdzv_backend="loopback" if single else "c10d",
        rdzv_endpoint="" if single else options.rendezvous,
        local_addr=None if single else own_address(options.rendezvous),
        max_restarts=0 if single else options.restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(notes)),
        signals_to_handle="SIGQUIT",  # SIGTERM and SIGINT are ours
    )
    argv = ["-m", "draftsmith.worker", str(recipe_of(path)), "--run", str(path), "--launcher", str(os.getpid())]
    argv += ["--resume"] * resume + (["--profile", options.profile] if options.profile else [])
    try:
        launch_agent(launch_config, sys.executable, argv)
    except ChildFailedError as error:
        failure = first_failure(error.failures.values())
        if failure.pid != restarts.told:
            tell(failure)
        return EXIT_USER if failure.exitcode == EXIT_USER else EXIT_FAILED
    except RendezvousError as error:
        why = "no connection" if isinstance(error, RendezvousConnectionError) else str(error)
        console.note(lost(options.rendezvous, why, path, last_attempt(path) != attempt_before))
        return EXIT_FAILED
    finally:
        console.output.show_cursor()  # a killed worker that hid it for its progress display cannot
        restarts.close()
        shutil.rmtree(notes, ignore_errors=True)
        sweep_private_directories()
    return read_outcome(RunDirectory(path, attempt_of(path)))


def lost(rendezvous: str, why: str, path: Path, met: bool) -> str:
    """What is said of a meeting that is no more; UserError where its workers had not `met`."""
    if not met:
        raise UserError(f"the hosts did not meet at {rendezvous}: {why}") from None
    where = f"the meeting at {rendezvous} is lost ({why}): the host that served it is gone"
    return f"{where}; start the others again with another --rendezvous and --run {path} --resume"


def write_recipe(path: Path, config: Config) -> None:
    """The resolved recipe, which the workers read."""
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        write_json(recipe_of(path), {"recipe": config.to_dict()})
    except OSError as error:
        raise UserError(f"{path}: the run directory cannot be written: {error}") from None


def recipe_of(path: Path) -> Path:
    """This host's: where its target and corpus lie may differ from the others'."""
    return path / "logs" / f"recipe.{os.uname().nodename}.json"


@contextmanager
def asking_to_stop(path: Path) -> Iterator[None]:
    """SIGTERM and SIGINT write the file that trainers look for; the second one, or one before training, ends everything:
    workers die with this process."""
    asked = False

    def ask(number: int, _frame: object) -> None:
        nonlocal asked
        if asked or not has_begun(path):
            say(f"ended at once by {signal.Signals(number).name}")
            os._exit(128 + number)
        asked = True
        (path / "stop").touch()
        say("stopping after this step; once more ends at once")

    old = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def has_begun(path: Path) -> bool:
    """This launcher's workers train: an attempt that took the directory would throw away a stop asked for before."""
    owner, last = read_owner(path), last_attempt(path)
    return owner is not None and owner.is_alive() and last is not None and process(os.getpid()) in last[1]


def say(text: str) -> None:
    """To the terminal, also from a signal's handler, which may have interrupted rich in the middle of its own work."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress display hides it
    with suppress(OSError):
        os.write(2, f"{show_cursor}draftsmith train: {text}\n".encode())


def own_address(rendezvous: str) -> str:
    """This host's address on the network that leads to the rendezvous, which the other hosts reach it by.

    torch would take the host's name, which in containers nobody else knows; gloo would listen where that name leads to.
    """
    host, _, port = rendezvous.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            address = probe.getsockname()[0]
            for _, interface in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
                except OSError:  # it has no IPv4 address
                    continue
                if socket.inet_ntoa(found[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    except (OSError, ValueError) as error:
        raise UserError(f"--rendezvous {rendezvous!r}: {error}; give HOST:PORT, a name or IPv4 address") from None
    return address


# In the background ----------------------------------------------------------------------------------------------------


def detach(options: TrainOptions, config: Config, path: Path) -> int:
    """Start `draftsmith train` in a session of its own; returns when its run has begun, whose directory another host may
    own, or when it has failed."""
    write_recipe(path, config)
    attempt_before = last_attempt(path)
    argv = [sys.executable, "-m", "draftsmith", "train", str(recipe_of(path)), "--run", str(path)]
    argv += ["--unchecked"]  # `launch` has asked
    argv += ["--resume"] * options.resume + ["--restarts", str(options.restarts), "--hosts", options.hosts]
    argv += ["--rendezvous", options.rendezvous] if options.rendezvous else []
    argv += ["--profile", options.profile] if options.profile else []
    log = path / "logs" / "launcher.log"
    print(f"starting; what it says: {log}", flush=True)
    with log.open("ab") as out:
        before = log.stat().st_size
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, close_fds=True
        )
    while process.poll() is None:
        owner = read_owner(path)
        if owner is not None and owner.is_alive() and last_attempt(path) != attempt_before:
            print(f"training in {path} as process {process.pid}")
            print(f"draftsmith watch {path} | draftsmith status {path} | draftsmith stop {path}")
            return EXIT_DONE
        time.sleep(0.1)
    if process.returncode not in (EXIT_DONE, EXIT_STOPPED):
        sys.stderr.write(log.read_bytes()[before:].decode(errors="replace"))
    return process.returncode


def stop(options: StopOptions) -> int:
    """`draftsmith stop`."""
    owner = read_owner(options.run)
    if owner is None or not owner.is_alive():
        raise UserError(f"{options.run}: nobody trains here")
    (options.run / "stop").touch()
    print(f"{options.run}: asked to checkpoint and end after the step it is at")
    while options.wait and read_owner(options.run) == owner and owner.is_alive():
        time.sleep(0.2)
    return EXIT_DONE
