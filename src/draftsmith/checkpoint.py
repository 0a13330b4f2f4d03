"""Checkpoints: complete or absent, safetensors and JSON, no pickle.

`checkpoints/step_N/` means that N optimizer steps are finished. It holds model.safetensors (float32 masters under
z-lab's tensor names), optimizer.safetensors (exp_avg.NAME, exp_avg_sq.NAME) and state.json. It is written to a hidden
temporary directory, flushed to disk and renamed, so a kill at any moment leaves either all of it or nothing.
"""

import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from draftsmith.config import TargetConfig
from draftsmith.console import size
from draftsmith.disk import check_object, flush, read_object
from draftsmith.errors import UserError
from draftsmith.kinds import misfit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

    from draftsmith.drafters.dflash import DFlashShape
    from draftsmith.step import TrainStep

FORMAT = 1
_STEP = re.compile(r"step_(\d+)")
DAMAGED = "if the checkpoint is damaged, delete its directory: the one before it is taken"


class Recipe(TypedDict):
    target: TargetConfig


# What readers of state.json rely on.
STATE = {
    "step": int, "optimizer_step": float, "drafter": dict, "acceptance_length": float | None, "recipe": Recipe | None,
    "provenance": dict | None,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself (state.json)."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def shape(self) -> "DFlashShape":
        """UserError where state.json describes no drafter."""
        from draftsmith.drafters.dflash import DFlashShape

        drafter = self.state["drafter"]
        wrong = misfit(drafter, DFlashShape, "drafter")
        try:
            if wrong is None:
                return DFlashShape.from_dict(drafter)
        except (TypeError, ValueError) as error:
            wrong = f"drafter: {error}"
        raise UserError(f"{self.path / 'state.json'}: {wrong}; {DAMAGED}")


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
    if not (path / "state.json").is_file():
        raise UserError(f"{path}: is not a checkpoint (it has no state.json)")
    state = read_object(path / "state.json", {"format": int}, DAMAGED)
    if state["format"] != FORMAT:
        raise UserError(f"{path / 'state.json'}: format {state['format']!r}, this version reads {FORMAT}")
    check_object(path / "state.json", state, STATE, DAMAGED)
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


def _flats(step: "TrainStep") -> "dict[str, Tensor]":
    """Prefix in the files -> flat [P] float32 of a step: masters, first and second moments."""
    return {"": step.flat.masters, "exp_avg.": step.adamw.exp_avg, "exp_avg_sq.": step.adamw.exp_avg_sq}


def _files(step: "TrainStep", flats: "dict[str, Tensor]") -> "dict[str, dict[str, Tensor]]":
    """Flat buffers on the CPU -> file name -> tensors (views where they can be) under z-lab's names with the prefix."""
    from draftsmith.drafters.dflash import to_zlab

    files: dict[str, dict] = {"model.safetensors": {}, "optimizer.safetensors": {}}
    for prefix, flat in flats.items():
        named = to_zlab(step.flat.named(flat), step.drafter.shape)
        file = files["optimizer.safetensors" if prefix else "model.safetensors"]
        file.update({prefix + name: tensor.contiguous() for name, tensor in named.items()})
    return files


def _complete(step: "TrainStep", step_number: int, count: "Tensor", state: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step_number,
        "optimizer_step": float(count),
        "drafter": step.drafter.shape.to_dict(),
        **state,
    }


class Writer:
    """Writes checkpoints in the background: training waits for the copy to host memory, not for the disk.

    On CUDA the copies are queued in the stream of training, between two updates, into page-locked buffers: the host goes
    on at once and the device is held up for the copy alone (12 GB take 0.25 s over PCIe 5). On a CPU the caller waits for
    the copy (2 to 3 s for 12 GB). One at a time; a failure is raised, as a UserError, by the next call.
    """

    def __init__(self, run: Path, keep_last: int, step: "TrainStep"):
        self._run, self._keep_last, self._step = run, keep_last, step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Page-locking takes seconds for large states, so it happens while the run gets going.
        self._buffers = self._pool.submit(_host_buffers, step)
        self._writing: Future[Checkpoint] | None = None

    def close(self) -> None:
        """Let a write that is under way end; `finish` before, to hear of its failure."""
        self._pool.shutdown(wait=True)
        if self._step.flat.masters.is_cuda and self._buffers.exception() is None:
            from draftsmith.static import page_unlock

            for buffer in self._buffers.result().values():
                page_unlock(buffer)

    def start(self, step_number: int, state: dict[str, Any]) -> None:
        """Copy the state as it is now in the device's order of work, and go on; waits while an earlier one is written."""
        import torch

        self.finish()
        flats = _flats(self._step)
        check_space(self._run, sum(f.numel() * f.element_size() for f in flats.values()), step_number)
        buffers, copied = self._buffers.result(), None
        for prefix, flat in (*flats.items(), ("count", self._step.adamw.count)):
            buffers[prefix].copy_(flat, non_blocking=True)
        if self._step.flat.masters.is_cuda:
            copied = torch.cuda.Event(blocking=True)
            copied.record(torch.cuda.current_stream(self._step.flat.masters.device))
        self._writing = self._pool.submit(self._write, step_number, buffers, copied, state)

    def finish(self) -> Checkpoint | None:
        """Wait for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def poll(self) -> Checkpoint | None:
        """The checkpoint that has been finished since the last call, if any."""
        return self.finish() if self._writing is not None and self._writing.done() else None

    def _write(
        self, step_number: int, buffers: "dict[str, Tensor]", copied: "Event | None", state: dict[str, Any]
    ) -> Checkpoint:
        if copied is not None:
            copied.synchronize()
        *flats, (_, count) = buffers.items()
        state = _complete(self._step, step_number, count, state)
        written = write(self._run, step_number, _files(self._step, dict(flats)), state)
        prune(self._run, self._keep_last)
        return written


def _host_buffers(step: "TrainStep") -> "dict[str, Tensor]":
    import torch

    from draftsmith.static import page_locked

    tensors = {**_flats(step), "count": step.adamw.count}
    if step.flat.masters.is_cuda:
        return {prefix: page_locked(tensor, "checkpoints") for prefix, tensor in tensors.items()}
    # zeros, not empty: touching the pages now keeps page faults out of the first snapshot
    return {prefix: torch.zeros_like(tensor) for prefix, tensor in tensors.items()}


def write(run: Path, step_number: int, files: "dict[str, dict[str, Tensor]]", state: dict[str, Any]) -> Checkpoint:
    """The files of one checkpoint, complete or absent."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = run / "checkpoints" / f"step_{step_number}"
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    need = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
    check_space(run, need, step_number)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in files.items():
            save_file(tensors, temporary / name)
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        if (final / "state.json").is_file():  # the same steps give the same state: the old one stays whole
            shutil.rmtree(temporary)
        else:
            temporary.rename(final)
        flush(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _unwritten(final, error) from None
    return Checkpoint(final, step_number, state)


def check_space(run: Path, need: int, step_number: int) -> None:
    """UserError unless `need` bytes and a twentieth more are free where checkpoints go."""
    final = run / "checkpoints" / f"step_{step_number}"
    if not run.is_dir():
        raise UserError(f"{run}: the run directory is gone; what was in it is lost, the run ends here")
    try:
        final.parent.mkdir(exist_ok=True)
        free = shutil.disk_usage(final.parent).free
    except OSError as error:
        raise _unwritten(final, error) from None
    if free < need * 1.05:
        raise _unwritten(final, f"{size(need * 1.05)} are needed, {size(need * 1.05 - free)} more than are free")


def _unwritten(final: Path, reason: object) -> UserError:
    return UserError(
        f"{final}: the checkpoint could not be written: {reason}; "
        "earlier checkpoints are untouched, free some space and go on with --resume"
    )


def prune(run: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one (highest evaluated acceptance length).
    UserError where one cannot be moved."""
    found = list_checkpoints(run)
    kept = {c.step for c in found[-keep_last:]}
    best = best_checkpoint(found)
    for checkpoint in found:
        if checkpoint.step not in kept and (best is None or checkpoint.step != best.step):
            doomed = checkpoint.path.with_name(f".{checkpoint.path.name}.{os.getpid()}.tmp")
            try:
                checkpoint.path.rename(doomed)  # in one move, so that a kill leaves no half of it in the list
            except OSError as error:
                raise UserError(
                    f"{checkpoint.path}: the old checkpoint could not be deleted: {error.strerror}; "
                    "the newest is complete, go on with --resume"
                ) from None
            shutil.rmtree(doomed, ignore_errors=True)


def sweep(run: Path) -> None:
    """Remove what killed writers left. For the one process that trains in `run`."""
    for leftover in (run / "checkpoints").glob(".step_*.tmp"):
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
        raise UserError(f"{path}: {error}; {DAMAGED}") from None


def _difference(checkpoint: Checkpoint, step: "TrainStep") -> str:
    ours, theirs = step.drafter.shape.to_dict(), checkpoint.shape.to_dict()
    return ", ".join(f"{k} {theirs[k]} instead of {ours[k]}" for k in ours if ours[k] != theirs[k])
