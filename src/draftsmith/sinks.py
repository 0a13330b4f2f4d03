"""`draftsmith sink RUN --to tensorboard|wandb`: hands a run's metrics on to another tool. Imports no torch.

A sink follows the run's event files in a process of its own, so nothing it does can slow or end a run: `train` starts one
process a sink and says once if one ended. It works on finished runs as well, and each start hands on the whole run.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tyro.conf import Positional

from draftsmith.console import Console
from draftsmith.errors import UserError
from draftsmith.history import Follower, Run

SinkName = Literal["tensorboard", "wandb"]
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
    every: float = 5.0
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
        self._writer = Writer(str(directory))

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=seconds)

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
    if importlib.util.find_spec(name) is None:
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
            found = metrics(run)
            for step, seconds, values in found[: -1 if going_on else None]:  # the newest may still get its evaluation
                if step > last:
                    sink.write(step, seconds, values)
                    last = step
            if not going_on:
                return
            time.sleep(options.every)
            run = follower.poll()
    finally:
        sink.close()


def metrics(run: Run) -> list[tuple[int, float, dict[str, float]]]:
    """(step, seconds since the epoch, numbers by name) of each step, its evaluation included, in order of steps."""
    found: dict[int, tuple[float, dict[str, float]]] = {}
    for prefix, records in (("train", run.steps), ("held_out", run.evaluations)):
        for record in records:
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

    PATIENCE_SECONDS = 60.0

    def __init__(self, run: Path, names: Sequence[SinkName], console: Console):
        self._run, self._names, self._console = run, names, console
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            require(name)

    def __enter__(self) -> "SinkProcesses":
        (self._run / "logs").mkdir(parents=True, exist_ok=True)
        for name in self._names:
            with self._log(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "draftsmith", "sink", str(self._run), "--to", name],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + self.PATIENCE_SECONDS
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._console.note(f"the sink {name} did not finish in time; {self._again(name)}")
        self.check()

    def check(self) -> None:
        """Say once of each sink that failed. Call at log steps."""
        for name in [name for name, process in self._processes.items() if process.poll() is not None]:
            code = self._processes.pop(name).returncode
            if code > 0:
                lines = self._log(name).read_text(errors="replace").strip().splitlines()
                why = lines[-1] if lines else f"exit code {code}"
                self._console.note(f"the sink {name} failed and the run goes on without it: {why}; {self._again(name)}")

    def _again(self, name: str) -> str:
        return f"`draftsmith sink {self._run} --to {name}` hands everything on later"

    def _log(self, name: str) -> Path:
        return self._run / "logs" / f"sink.{name}.log"
