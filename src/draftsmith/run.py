"""The run directory: everything a run writes, and the rules for starting in one and going on in one. Imports no torch."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.errors import UserError

# Keys that may differ when a run goes on: none of them changes which units are seen or what an update does.
MAY_CHANGE = {
    "run.log_every", "run.evaluate_every", "run.evaluate_units", "run.save_every", "run.keep_last", "run.stop_after",
    "run.device", "run.mode", "run.checkpoint_activations", "target.model", "target.revision", "data.corpus",
}  # fmt: skip

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3


@dataclass(frozen=True)
class RunDirectory:
    """RUN/config.json, logs/, events/, checkpoints/, evaluations/, plans/, export/."""

    path: Path
    attempt: int


def open_run(path: Path, config: Config, resume: bool) -> RunDirectory:
    """Start a run in a new directory, or go on in an old one; the recipe must be the old one's but for MAY_CHANGE."""
    written = path / "config.json"
    if resume:
        if not written.is_file():
            raise UserError(f"{path}: there is no run to resume here (no config.json)")
        old = json.loads(written.read_text())
        _compare(flatten(old["recipe"]), flatten(config.to_dict()), written)
        attempt = old["attempt"] + 1
    else:
        if path.exists() and any(path.iterdir()):
            raise UserError(
                f"{path}: already holds a run; go on with --resume, name another with --run, or delete it yourself"
            )
        attempt = 0
    try:
        for part in ("events", "checkpoints", f"logs/attempt_{attempt}"):
            (path / part).mkdir(parents=True, exist_ok=True)
        write_json(written, {"recipe": config.to_dict(), "attempt": attempt, "provenance": provenance()})
    except OSError as error:
        raise UserError(f"{path}: the run directory cannot be written: {error}") from None
    return RunDirectory(path, attempt)


def read_config(run: Path) -> dict[str, Any]:
    """config.json of a run."""
    try:
        return json.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{run}: is not a run directory: {error}") from None


def provenance() -> dict[str, Any]:
    """What one needs to repeat the run: versions, git commit of the source if it is a checkout, argv, machine."""
    versions = {}
    for name in ("draftsmith", "torch", "transformers", "safetensors", "numpy"):
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
    """Complete or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)


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
    changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k) and k not in MAY_CHANGE]
    if changed:
        listed = ", ".join(f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in changed)
        raise UserError(f"{where}: a resumed run keeps its recipe, but {listed}; start a new run for another recipe")
