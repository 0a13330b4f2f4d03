"""A tiny target, its corpus and recipes for tests of the pipeline, and what they ask of a run's files."""

import atexit
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from draftsmith import config
from draftsmith.run import start_time, write_json

ROUNDING = 2e-3 if torch.cuda.is_available() else 0.0  # bitwise equality is promised on CPUs alone


def recipe(place: Path, targets: int = 0, trainers: int = 1, workers: str = "threads", steps: int = 6, **run):
    """3 units a step (uneven over 2 trainers), held-out rows after every third step, a log line for every step."""
    c = config.load(place / "recipe.toml")
    settings = {"threads": 1, "log_every": 1, "evaluate_every": 3, "evaluate_units": 3, "save_every": 10**6} | run
    return replace(
        c,
        unit=replace(c.unit, tokens=256, anchors=16, per_step=3),
        optim=replace(c.optim, steps=steps),
        drafter=replace(c.drafter, layers=1),
        run=replace(c.run, **settings),
        topology=replace(c.topology, targets=targets, trainers=trainers, workers=workers, first_patience=120.0),
    )


def command(place: Path, run: Path, c: config.Config, *extra: str) -> list[str]:
    """`draftsmith train` for a recipe that is written beside the run directory."""
    written = place / f"{run.name}.json"
    write_json(written, {"recipe": c.to_dict()})
    return [sys.executable, "-m", "draftsmith", "train", str(written), "--run", str(run), *extra]


def start(argv: list[str], seconds: float = 150.0, **popen) -> subprocess.Popen:
    """A process that is killed after `seconds`, so that no wait for it or its output is endless.

    It and what it starts carry its command in their environment, by which `left_of` finds them.
    """
    marked = {**os.environ, "TEST_COMMAND": "\n".join(argv) + "\n"}
    settings = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True, "env": marked} | popen
    process = subprocess.Popen(argv, **settings)
    deadline = threading.Timer(seconds, process.kill)
    deadline.daemon = True
    deadline.start()
    atexit.register(process.kill)  # a failed test leaves it
    return process


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds} s in vain"
        time.sleep(0.05)


def read_until(process: subprocess.Popen, beginning: str) -> str:
    """Lines of standard error up to the first that begins so."""
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith(beginning):
            return seen
    raise AssertionError(f"ended with {process.wait()} before {beginning!r}:\n{seen}")


def in_a_terminal(argv: list[str]) -> tuple[int, str]:
    """Exit code of a command and everything that its terminal got to show."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    screen = b""
    while chunk := _read(master):
        screen += chunk
    os.close(master)
    return process.wait(), screen.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other side is gone
        return b""


def records(run: Path, kind: str) -> list[dict]:
    """Event records of a kind, from all workers' files."""
    whole = [
        path.read_text().rpartition("\n")[0] for path in sorted(run.glob("events/*.jsonl"))
    ]  # it may be written to
    rows = [json.loads(line) for text in whole for line in text.splitlines()]
    return [row for row in rows if row["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; steps that a later attempt did again must have the same one."""
    found: dict[int, float] = {}
    for row in records(run, "step"):
        before = found.setdefault(row["step"], row["loss"])
        assert abs(before - row["loss"]) <= ROUNDING * before, f"step {row['step']} differs between attempts"
    return found


def acceptance(run: Path) -> dict[int, float]:
    return {row["step"]: row["acceptance_length"] for row in records(run, "evaluation")}


def held_out_losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in records(run, "evaluation")}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step}" / "model.safetensors")


def same_values(a: dict[int, float], b: dict[int, float]) -> bool:
    return a.keys() == b.keys() and all(abs(a[step] - b[step]) <= ROUNDING * abs(b[step]) for step in a)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """On GPUs the largest step that AdamW's noise can take, at most."""
    return a.keys() == b.keys() and all(float((a[name] - b[name]).abs().max()) <= ROUNDING * 5 for name in a)


def pids(run: Path, attempt: int = 0) -> dict[str, int]:
    """Worker -> process id of one attempt."""
    return {f"{r['role']}{r['index']}": r["pid"] for r in records(run, "open") if r["attempt"] == attempt}


def ended(numbers: list[int], seconds: float = 5.0) -> bool:
    """All of these processes end within the time."""
    limit = time.monotonic() + seconds
    while any(start_time(pid) is not None for pid in numbers):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def worker_of(launcher: int, local: int) -> int:
    """Process id of local worker `local`, as soon as the launcher has started it."""
    found: list[int] = []

    def look() -> bool:
        for task in Path(f"/proc/{launcher}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with suppress(OSError):  # it has just ended
                    if f"LOCAL_RANK={local}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        found.append(pid)
        return bool(found)

    until(look)
    return found[0]


def left_of(run: Path) -> dict[int, str]:
    """Living processes that were started to train in `run`, compile workers included."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b"\n")
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if f"\n{run}\n".encode() in command + environment and start_time(int(process.name)) is not None:
            found[int(process.name)] = command.decode()
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listens(port: int) -> bool:
    """The first host serves the meeting, as --rendezvous says; here both could."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def agents_of(place: Path, c: config.Config, name: str, shared: bool = True) -> list[subprocess.Popen]:
    """Two torchrun agents on this machine as two hosts, with one run directory NAME, or NAME_0 and NAME_1."""
    command(place, place / name, c)
    started = []
    for host in range(2):
        path = place / name if shared else place / f"{name}_{host}"
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
            f"--nproc-per-node={c.topology.targets + c.topology.trainers}", "--rdzv-backend=c10d", f"--rdzv-id={name}",
            f"--rdzv-endpoint={place / name}.store", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1",
            "-m", "draftsmith.worker", str(place / f"{name}.json"), "--run-directory", str(path),
        ]  # fmt: skip
        out = (place / f"{name}_{host}.out").open("w")
        started.append(start(argv, stdout=out, stderr=out, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}))
    return started
