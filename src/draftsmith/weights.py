"""Tensors of a target by name, read lazily from its safetensors shards; its last layers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.target_facts import read_config

PIECE = 1 << 20  # bytes read at a time; a multiple of every itemsize
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U32": torch.uint32,
    "U16": torch.uint16, "U64": torch.uint64,
}  # fmt: skip

PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes that hold a value without a scale beside it
HEAD_LEAVES = ("lm_head", "embed_out", "output")  # how the output head is named in checkpoints


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, read (not mapped) when it is indexed with `[...]`, as transformers does."""

    path: Path
    name: str
    dtype: str  # safetensors' spelling, which transformers expects of `get_dtype`
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    end: int
    wanted: torch.dtype | None = None
    """What `[...]` converts to while reading, None for the stored dtype."""
    told: Callable[[], None] | None = None
    """Called when `[...]` has read it."""

    def __getitem__(self, index: Any) -> Tensor:
        whole = self.read(self.wanted)
        if self.told is not None:
            self.told()
        return whole[index]

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the CPU; converted piece by piece, so that it never stands in memory twice."""
        stored = DTYPES[self.dtype]
        out = torch.empty(self.shape, dtype=dtype or stored)
        flat, piece = out.view(-1), bytearray(min(PIECE, self.end - self.start))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            for at in range(self.start, self.end, PIECE):
                view = memoryview(piece)[: min(PIECE, self.end - at)]
                if _read_into(file, view) != len(view):
                    raise UserError(f"{self.path}: cut short inside {self.name}; fetch it again")
                part = torch.frombuffer(view, dtype=stored)
                first = (at - self.start) // stored.itemsize
                flat[first : first + part.numel()].copy_(part)
        return out

    def widened(self, dtype: torch.dtype) -> "StoredTensor":
        """Converts to `dtype` where that loses nothing: transformers keeps some tensors in float32 whatever the model's."""
        wider = self.dtype in PLAIN and dtype.itemsize > DTYPES[self.dtype].itemsize
        return replace(self, wanted=dtype) if wider else self

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)


@dataclass(frozen=True)
class Shards:
    """Every tensor of a safetensors checkpoint by name; nothing is read but headers."""

    directory: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, directory: Path) -> "Shards":
        """UserError when there are no safetensors, a shard is missing or cut short, or lacks what the index promises."""
        index = directory / INDEX
        if not index.is_file():
            if not (directory / SINGLE).is_file():
                raise UserError(f"{directory}: no {SINGLE} and no {INDEX}; only safetensors weights are read")
            return cls(directory, _header(directory / SINGLE))
        try:
            files = json.loads(index.read_text())["weight_map"]
            names = sorted(set(files.values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index}: not an index of safetensors shards; fetch it again") from None
        tensors: dict[str, StoredTensor] = {}
        for name in names:
            if not (directory / name).is_file():
                raise UserError(f"{directory / name}: missing, but {INDEX} lists it; fetch the model again")
            tensors |= _header(directory / name)
        for name, file in files.items():
            if name not in tensors:
                raise UserError(f"{directory / file}: no tensor {name}, but {INDEX} lists it; fetch the shard again")
        return cls(directory, tensors)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, CPU, as stored or as `dtype`."""
        return self.tensors[name].read(dtype)


def _read_into(file: Any, view: memoryview) -> int:
    """Fill `view` from an unbuffered file; returns fewer bytes only at the file's end."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            break
        done += count
    return done


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file (8 bytes: header length; JSON header; data), with the file's size checked against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length or not length:
            raise UserError(f"{path}: cut short or no safetensors file; fetch it again")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            found = {n: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in entries.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: no safetensors header; fetch it again") from None
    base = 8 + length
    end = base + max((e[3] for e in found.values()), default=0)
    if size < end:
        raise UserError(f"{path}: cut short: {size} bytes of {end}; fetch it again")
    return {n: StoredTensor(path, n, d, s, base + a, base + b) for n, (d, s, a, b) in found.items()}


def last_layers(directory: Path, count: int, trust_remote_code: bool = False) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Tensors of the target's last `count` decoder layers by z-lab's names (`self_attn.q_proj.weight` ...), and its final norm.

    Names and shapes are the family's; float32, CPU. UserError when there are too few layers, or none under the usual names.
    """
    text = read_config(directory, trust_remote_code).get_text_config(decoder=True)
    shards = Shards.open(directory)
    prefix = _layers_prefix(shards)
    first = text.num_hidden_layers - count
    if first < 0:
        raise UserError(f"{directory}: {text.num_hidden_layers} layers cannot start {count} draft layers")
    layers = []
    for index in range(first, text.num_hidden_layers):
        start = f"{prefix}{index}."
        layers.append(
            {n.removeprefix(start): shards.read(n, torch.float32) for n in shards.tensors if n.startswith(start)}
        )
    norm = next((n for n in (prefix.removesuffix("layers.") + "norm.weight",) if n in shards.tensors), None)
    if norm is None:
        raise UserError(f"{directory}: no final norm beside {prefix}0")
    return layers, shards.read(norm, torch.float32)


def _layers_prefix(shards: Shards) -> str:
    """What stands before a decoder layer's number, e.g. `model.layers.`."""
    found = {n.partition("layers.0.self_attn.")[0] + "layers." for n in shards.tensors if "layers.0.self_attn." in n}
    found = {p for p in found if not any(part in p for part in ("vis", "audio"))}
    if len(found) != 1:
        raise UserError(f"{shards.directory}: no decoder layers under the usual names")
    return found.pop()
