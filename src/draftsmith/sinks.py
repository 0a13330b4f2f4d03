"""`draftsmith sink RUN --to tensorboard|wandb`: hands a run's metrics on to another tool. Imports no torch.

A sink follows the run's event files in a process of its own, so nothing it does can slow or end a run: the first trainer
starts one process for each of `run.sinks` and says once if one failed. A sink ends with its run, however that ends. It
works on finished runs as well, and each start hands on the whole run.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self

from tyro.conf import Positional

from draftsmith.config import SinkName
from draftsmith.errors import UserError
from draftsmith.history import Follower, Run

SKIPPED = ("step", "t", "steps")  # bookkeeping, no metrics


@dataclass(frozen=True)
class SinkOptions:
    """Hands a run's metrics on, while it runs or afterwards; ends with the run."""

    run: Positional[Path]
    """Run directory."""
    to: SinkName
    """tensorboard writes RUN/tensorboard; wandb writes an offline run below RUN/wandb for `wandb sync`."""
    online: bool = False
    """wandb: send to the server at once."""
    every: float = 2.0
    """Seconds between looks at the run's files."""


class Sink(Protocol):
    """Where metrics go. An adapter is these two methods and a row in `SINKS`."""

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Metrics of one record; `seconds` since the epoch. Steps never go back."""

    def close(self) -> None:
        """Everything has been handed over."""


class TensorBoardSink:
    """Event files in RUN/tensorboard, written anew at each start."""

    def __init__(self, run: Run, options: SinkOptions):
        from tensorboard.summary import Writer

        directory = options.run / "tensorboard"
        if directory.is_dir():
            shutil.rmtree(directory)
        self._writer, self._flushed = Writer(str(directory)), 0.0

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=seconds)
        if time.monotonic() - self._flushed > 5:  # the writer itself flushes every two minutes
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, offline by default; the recipe is its config."""

    def __init__(self, run: Run, options: SinkOptions):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the client's own crash reports would go out
        import wandb

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False)
        self._run = wandb.init(
            project="draftsmith", name=run.name, dir=str(options.run), mode="online" if options.online else "offline",
            config=run.config.get("recipe", {}), settings=settings,
        )  # fmt: skip

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": seconds}, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS = {"tensorboard": TensorBoardSink, "wandb": WandbSink}


def main(options: SinkOptions) -> int:
    """`draftsmith sink`."""
    require(options.to)
    follow(options)
    return 0


def require(name: str) -> None:
    """UserError if the package of a sink is missing."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a directory of that name, such as RUN/wandb, is no package
        raise UserError(f"the sink {name} needs the package {name}: pip install 'draftsmith[sinks]'")


def follow(options: SinkOptions) -> None:
    """Hand on every record, until the run is no longer running."""
    follower = Follower(options.run)
    run = follower.poll()
    sink: Sink = SINKS[options.to](run, options)
    last = -1
    try:
        while True:
            going_on = run.state() in ("running", "empty")  # asked before the look at the files, so that none is missed
            run = follower.poll()
            found = metrics(run, last)
            for last, seconds, values in found[: -1 if going_on else None]:  # the newest may still get its evaluation
                sink.write(last, seconds, values)
            if not going_on:
                return
            time.sleep(options.every)
            run = follower.poll()
    finally:
        sink.close()


def metrics(run: Run, after: int = -1) -> list[tuple[int, float, dict[str, float]]]:
    """(step, seconds since the epoch, numbers by name) of each step behind `after`, its evaluation included, in order."""
    found: dict[int, tuple[float, dict[str, float]]] = {}
    for prefix, records in (("train", run.steps), ("held_out", run.evaluations)):
        for record in records[bisect_right(records, after, key=itemgetter("step")) :]:
            seconds, values = found.setdefault(record["step"], (record["t"], {}))
            values.update(_numbers(prefix, record))
    return [(step, *found[step]) for step in sorted(found)]


def _numbers(prefix: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Scalars by name; a list becomes one number a position, from 1."""
    out: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            out.update({f"{prefix}/{name}/{k:02d}": float(item) for k, item in enumerate(value, 1) if item is not None})
        elif isinstance(value, int | float) and name not in SKIPPED:
            out[f"{prefix}/{name}"] = float(value)
    return out


class SinkProcesses:
    """The sinks of a run in training. Use as a context manager around the event log (open it first): sinks see it end."""

    PATIENCE_SECONDS = 60.0  # after the run's last word; a sink needs a moment to see it and to finish
    AFTER_ERROR_SECONDS = 10.0

    def __init__(self, run: Path, names: Sequence[SinkName], say: Callable[[str], None]):
        self._run, self._names, self._say = run, names, say
        self._started: list[tuple[SinkName, subprocess.Popen[bytes], threading.Thread]] = []

    def __enter__(self) -> Self:
        for name in self._names:
            self._log(name).parent.mkdir(exist_ok=True)
            with self._log(name).open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "draftsmith", "sink", str(self._run), "--to", name],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            watcher = threading.Thread(target=self._watch, args=(name, process), name=f"sink {name}", daemon=True)
            watcher.start()
            self._started.append((name, process, watcher))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        deadline = time.monotonic() + (self.PATIENCE_SECONDS if kind is None else self.AFTER_ERROR_SECONDS)
        for _, process, watcher in self._started:
            watcher.join(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            watcher.join()

    def _watch(self, name: SinkName, process: "subprocess.Popen[bytes]") -> None:
        """Wait for a sink's end and say it if it was no good one."""
        code = process.wait()
        if code:
            lines = self._log(name).read_text(errors="replace").strip().splitlines()
            why = (
                lines[-1] if lines and code > 0 else "killed, or not done in time" if code < 0 else f"exit code {code}"
            )
            again = f"`draftsmith sink {self._run} --to {name}` hands everything on later"
            self._say(f"the sink {name} failed and the run goes on without it: {why}; {again}")

    def _log(self, name: SinkName) -> Path:
        return self._run / "logs" / f"sink.{name}.log"
