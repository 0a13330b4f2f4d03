"""The run directory: everything a run writes, and the rules for starting in one and going on in one. Imports no torch."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.config import Config
from draftsmith.disk import lock, read_object
from draftsmith.errors import UserError

# Keys that may differ when a run goes on: none of them changes which units are seen or what an update does.
MAY_CHANGE = {
    "run.log_every", "run.evaluate_every", "run.evaluate_units", "run.save_every", "run.keep_last", "run.stop_after",
    "run.save_minutes", "run.time_limit", "run.sinks", "run.device", "run.mode", "run.threads", "run.checkpoint_activations",
    "target.model", "target.revision", "data.corpus",
}  # fmt: skip
MAY_CHANGE_SECTION = "topology."  # how the workers are spread

# What a launcher, the doctor, or a run that could not begin leave in a directory that no run has begun in.
BEFORE = {"logs", "doctor.json", ".lock"}

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3
# Of worker processes: ended because another worker did, and told to end.
EXIT_PEER, EXIT_TERMINATED = 4, 143


@dataclass(frozen=True)
class RunDirectory:
    """RUN/config.json, logs/, events/, checkpoints/, evaluations/, plans/, export/, and while it is trained running.json."""

    path: Path
    attempt: int

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    @property
    def examination(self) -> Path:
        """Where this file is, workers are examined by `draftsmith doctor` instead of training."""
        return self.path / "logs" / "examination.json"


@dataclass(frozen=True)
class Owner:
    """A process, such as the one that trains in a run directory (running.json). `started` tells it from a later one of
    the same id."""

    pid: int
    host: str
    started: int
    directory: str = ""
    """Of running.json: what a copy of the run directory has not."""

    def is_here(self) -> bool:
        return self.host == platform.node()

    def is_alive(self) -> bool:
        """On another host: unknown, taken for alive."""
        return not self.is_here() or start_time(self.pid) == self.started


def open_run(path: Path, config: Config, resume: bool) -> RunDirectory:
    """Start a run in a new directory, or go on in an old one; the recipe must be the old one's but for MAY_CHANGE."""
    return begin_attempt(path, config, check_run(path, config, resume))


def begin_attempt(
    path: Path, config: Config, attempt: int, launchers: Sequence[Owner] = (), same_launch: bool = False
) -> RunDirectory:
    """Take the directory for attempt `attempt`, started by `launchers` (of worker processes, one a host); of several
    that take it at once one gets it."""
    try:
        for part in ("events", "checkpoints", f"logs/attempt_{attempt}"):
            (path / part).mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as file:
            lock(file, str(path))
            if not same_launch:
                check_free(path)
            (path / "stop").unlink(missing_ok=True)
            about = {"attempt": attempt, "launchers": [asdict(one) for one in launchers], "provenance": provenance()}
            write_json(path / "config.json", {"recipe": config.to_dict(), **about})
            write_json(path / "running.json", asdict(replace(process(os.getpid()), directory=identity(path))))
    except OSError as error:
        raise UserError(f"{path}: the run directory cannot be written: {error}") from None
    return RunDirectory(path, attempt)


def check_run(path: Path, config: Config, resume: bool, same_launch: bool = False) -> int:
    """The number of the attempt that `open_run` would begin; UserError where it would refuse. Writes nothing.

    `same_launch`: the launcher has ended the attempt before, also where its process was on a host that is gone.
    """
    written = path / "config.json"
    if resume:
        if not written.is_file():
            raise UserError(f"{path}: there is no run to resume here (no config.json)")
        old = read_written(path)
        _compare(flatten(old["recipe"]), flatten(config.to_dict()), written)
    elif path.exists() and any(p.name not in BEFORE and not is_empty(p) for p in path.iterdir()):
        raise UserError(
            f"{path}: already holds a run; go on with --resume, name another with --run, or delete it yourself"
        )
    if not same_launch:
        check_free(path)
    return old["attempt"] + 1 if resume else 0


def check_directory(path: Path) -> None:
    """UserError where a file stands in the way of the run directory."""
    file = next((place for place in (path, *path.parents) if place.is_file()), None)
    if file is not None:
        raise UserError(f"{path}: cannot be a run directory, {file} is a file; name another with --run")


def check_free(path: Path) -> None:
    """UserError where another process trains in the directory."""
    owner = read_owner(path)
    if owner is not None and owner.pid != os.getpid() and owner.is_alive():
        known = "" if owner.is_here() else f"; if it is not, delete {path / 'running.json'}"
        raise UserError(
            f"{path}: is being trained by process {owner.pid} on {owner.host}; `draftsmith stop {path}` ends it{known}"
        )


def is_empty(path: Path) -> bool:
    """A directory without any file below it."""
    return path.is_dir() and not any(below.is_file() for below in path.rglob("*"))


def identity(path: Path) -> str:
    """What tells a directory from a copy of it, and not from itself under another name."""
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}"


def join_run(path: Path, config: Config, attempt: int, launchers: Sequence[Owner]) -> RunDirectory:
    """The run that another host has opened, in this host's own directory, or in the same one if it is shared."""
    owner = read_owner(path)
    if owner is None or not owner.is_alive():  # a directory of this host's own
        return begin_attempt(path, config, attempt, launchers)
    return RunDirectory(path, attempt)


def last_attempt(path: Path) -> tuple[int, list[Owner]] | None:
    """The newest attempt in a run directory and the launchers that started it; None where no run has begun."""
    if not (path / "config.json").is_file():
        return None
    written = read_written(path)
    return written["attempt"], [Owner(**one) for one in written.get("launchers", [])]


def attempt_of(path: Path) -> int:
    """The number of the newest attempt; 0 before there is one."""
    last = last_attempt(path)
    return last[0] if last is not None else 0


def close_run(run: RunDirectory) -> None:
    """Nobody trains here any more."""
    owner = read_owner(run.path)
    if owner is not None and owner.pid == os.getpid() and owner.is_here():
        (run.path / "running.json").unlink(missing_ok=True)
        (run.path / "stop").unlink(missing_ok=True)


def write_outcome(run: RunDirectory, code: int) -> None:
    """What an attempt came to, for the launcher: worker processes end with 0 both when done and when stopped."""
    write_json(run.logs / "outcome.json", {"exit_code": code})


def read_outcome(run: RunDirectory) -> int:
    """EXIT_DONE or EXIT_STOPPED of an attempt whose workers all ended well."""
    return json.loads((run.logs / "outcome.json").read_text())["exit_code"]


def read_owner(path: Path) -> Owner | None:
    """Who trains in this run directory, by its own word; None if nobody does, or does in that which this is a copy of."""
    try:
        owner = Owner(**json.loads((path / "running.json").read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path / 'running.json'}: cannot be read: {error}; delete it if nobody trains there") from None
    return None if owner.is_here() and owner.directory not in ("", identity(path)) else owner


def process(pid: int) -> Owner:
    """A process of this host."""
    return Owner(pid, platform.node(), start_time(pid) or 0)


def start_time(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read_written(run: Path) -> dict[str, Any]:
    """config.json of a run: its resolved recipe and the number of its newest attempt."""
    remedy = "it is damaged; start a new run (its checkpoints can still be evaluated and exported)"
    return read_object(run / "config.json", {"recipe": dict, "attempt": int}, remedy)


def provenance() -> dict[str, Any]:
    """What one needs to repeat the run: versions, git commit of the source if it is a checkout, argv, machine."""
    versions: dict[str, str | None] = {"draftsmith": __version__}
    for name in ("torch", "transformers", "safetensors", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "host": platform.node(),
        "git": _git_commit(),
        "argv": sys.argv,
    }


def _git_commit() -> str | None:
    source = Path(__file__).resolve().parent
    if not (source.parent.parent / ".git").exists() or shutil.which("git") is None:
        return None
    out = subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return out.stdout.strip() or None


def write_json(path: Path, value: Any) -> None:
    """Complete or absent, also where processes of several hosts write it, which may have one process number."""
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested recipe -> {"optim.lr": ...}; template options stay one value."""
    out = {}
    for key, value in values.items():
        if isinstance(value, dict) and not prefix:
            out.update(flatten(value, f"{key}."))
        else:
            out[prefix + key] = value
    return out


def _compare(old: dict[str, Any], new: dict[str, Any], where: Path) -> None:
    kept = [k for k in sorted(old.keys() | new.keys()) if k not in MAY_CHANGE and not k.startswith(MAY_CHANGE_SECTION)]
    changed = [k for k in kept if old.get(k) != new.get(k)]
    if changed:
        listed = ", ".join(f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in changed)
        raise UserError(f"{where}: a resumed run keeps its recipe, but {listed}; start a new run for another recipe")
