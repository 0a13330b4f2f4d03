"""Checkpoints: complete or absent, safetensors and JSON, no pickle.

`checkpoints/step_N/` means that N optimizer steps are finished. It holds model.safetensors (float32 masters under
z-lab's tensor names), optimizer.safetensors (exp_avg.NAME, exp_avg_sq.NAME) and state.json. It is written to a hidden
temporary directory, flushed to disk and renamed, so a kill at any moment leaves either all of it or nothing.
"""

import errno
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.drafters.dflash import DFlashShape
    from draftsmith.step import TrainStep

FORMAT = 1
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself (state.json)."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def shape(self) -> "DFlashShape":
        from draftsmith.drafters.dflash import DFlashShape

        return DFlashShape.from_dict(self.state["drafter"])


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    found = []
    for path in (run / "checkpoints").glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / "state.json").is_file():
            found.append(read_checkpoint(path))
    return sorted(found, key=lambda c: c.step)


def read_checkpoint(path: Path) -> Checkpoint:
    """Open state.json of one checkpoint directory."""
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: is not a checkpoint (it has no state.json)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'state.json'}: cannot be read: {error}") from None
    if state.get("format") != FORMAT:
        raise UserError(f"{path / 'state.json'}: format {state.get('format')!r}, this version reads {FORMAT}")
    return Checkpoint(path, state["step"], state)


def load_weights(checkpoint: Checkpoint) -> "dict[str, Tensor]":
    """Masters under our parameter names, float32; a tensor that is missing or of another shape is one UserError."""
    return _load(checkpoint, "model.safetensors", "")


def restore(checkpoint: Checkpoint, step: "TrainStep") -> None:
    """Put weights, moments and the step count of a checkpoint into a TrainStep; bitwise what was saved."""
    import torch

    def flat(named: "dict[str, Tensor]") -> "Tensor":
        return torch.cat([named[n].flatten() for n in step.flat.names])

    if checkpoint.shape != step.drafter.shape:
        raise UserError(
            f"{checkpoint.path}: the checkpoint's drafter differs from the recipe's: {_difference(checkpoint, step)}"
        )
    masters = flat(load_weights(checkpoint))
    moments = [flat(_load(checkpoint, "optimizer.safetensors", f"{kind}.")) for kind in ("exp_avg", "exp_avg_sq")]
    step.restore(masters, *moments, checkpoint.state["optimizer_step"])


def save(run: Path, step_number: int, step: "TrainStep", state: dict[str, Any]) -> Checkpoint:
    """Write step_N; `state` is added to state.json. No space, or no right to write, is a UserError and leaves nothing."""
    exp_avg, exp_avg_sq, optimizer_step = step.moments()
    tensors = snapshot(step, {"": step.flat.masters, "exp_avg.": exp_avg, "exp_avg_sq.": exp_avg_sq})
    state = {
        "format": FORMAT,
        "step": step_number,
        "optimizer_step": float(optimizer_step),
        "drafter": step.drafter.shape.to_dict(),
        **state,
    }
    return write(run, step_number, tensors, state)


def snapshot(step: "TrainStep", flats: "dict[str, Tensor]") -> "dict[str, dict[str, Tensor]]":
    """Flat buffers -> file name -> tensors on the CPU under z-lab's names with the flat's prefix."""
    from draftsmith.drafters.dflash import to_zlab

    files: dict[str, dict] = {"model.safetensors": {}, "optimizer.safetensors": {}}
    for prefix, flat in flats.items():
        named = to_zlab(step.flat.named(flat.cpu()), step.drafter.shape)
        file = files["optimizer.safetensors" if prefix else "model.safetensors"]
        file.update({prefix + name: tensor.contiguous() for name, tensor in named.items()})
    return files


def write(run: Path, step_number: int, files: "dict[str, dict[str, Tensor]]", state: dict[str, Any]) -> Checkpoint:
    """The files of one checkpoint, complete or absent."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = run / "checkpoints" / f"step_{step_number}"
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    need = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(temporary.parent).free
        if free < need * 1.05:
            raise OSError(errno.ENOSPC, f"{need / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in files.items():
            save_file(tensors, temporary / name)
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        flush(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{final}: the checkpoint could not be written: {error}; "
            "earlier checkpoints are untouched, free some space and go on with --resume"
        ) from None
    return Checkpoint(final, step_number, state)


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(run: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one (highest evaluated acceptance length)."""
    found = list_checkpoints(run)
    kept = {c.step for c in found[-keep_last:]}
    best = best_checkpoint(found)
    for checkpoint in found:
        if checkpoint.step not in kept and (best is None or checkpoint.step != best.step):
            shutil.rmtree(checkpoint.path, ignore_errors=True)
    for leftover in (run / "checkpoints").glob(".step_*.tmp"):
        if leftover.name.split(".")[-2] == str(os.getpid()):
            shutil.rmtree(leftover, ignore_errors=True)


def best_checkpoint(found: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest acceptance length on held-out units, the newest among equals."""
    scored = [c for c in found if c.state.get("acceptance_length") is not None]
    return max(scored, key=lambda c: (c.state["acceptance_length"], c.step), default=None)


def _load(checkpoint: Checkpoint, file: str, prefix: str) -> "dict[str, Tensor]":
    from safetensors import SafetensorError, safe_open

    from draftsmith.drafters.dflash import from_zlab

    path = checkpoint.path / file
    try:
        with safe_open(path, "pt") as tensors:
            named = {k.removeprefix(prefix): tensors.get_tensor(k) for k in tensors.keys() if k.startswith(prefix)}
        return from_zlab(named, checkpoint.shape)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def _difference(checkpoint: Checkpoint, step: "TrainStep") -> str:
    ours, theirs = step.drafter.shape.to_dict(), checkpoint.shape.to_dict()
    return ", ".join(f"{k} {theirs[k]} instead of {ours[k]}" for k in ours if ours[k] != theirs[k])
