"""Tensors of a target by name, read lazily from its safetensors shards: embedding, head, and its last layers."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.loss import Head
from draftsmith.step import Tables
from draftsmith.target_facts import is_tied, read_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING_LEAVES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
HEAD_LEAVES = ("lm_head", "embed_out", "output")


@dataclass(frozen=True)
class Shards:
    """Which safetensors file holds which tensor."""

    directory: Path
    files: dict[str, str]  # tensor name -> file name

    @classmethod
    def open(cls, directory: Path) -> "Shards":
        """Read the index, or the header of the only file; UserError when there is neither or a shard is missing."""
        index = directory / INDEX
        if index.is_file():
            try:
                files = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                raise UserError(f"{index}: not an index of safetensors shards; fetch it again") from None
            for name in sorted(set(files.values())):
                if not (directory / name).is_file():
                    raise UserError(f"{directory / name}: missing, but {INDEX} lists it; fetch the model again")
            return cls(directory, files)
        if not (directory / SINGLE).is_file():
            raise UserError(f"{directory}: no {SINGLE} and no {INDEX}; only safetensors weights are read")
        with _opened(directory / SINGLE) as file:
            return cls(directory, {name: SINGLE for name in file.keys()})  # noqa: SIM118 (not a dict)

    def path(self, name: str) -> Path:
        return self.directory / self.files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        with _opened(self.path(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """One tensor, CPU, as stored."""
        with _opened(self.path(name)) as file:
            if name not in file.keys():  # noqa: SIM118 (not a dict)
                raise UserError(f"{self.path(name)}: no tensor {name}, but {INDEX} says so; fetch the shard again")
            return file.get_tensor(name)


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or cut short ({error}); fetch it again") from None


def load_tables(
    directory: Path, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> Tables:
    """The frozen embedding and head that a trainer needs, and nothing else of the target.

    A tied head is the embedding's own storage; as in transformers, two stored tables that differ are not tied and a
    tied pair may be stored under either name. UserError naming the file when one is missing or has a wrong shape.
    """
    config = read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    size = (text.vocab_size, text.hidden_size)
    scale, logit_scale, softcap = table_scales(text)
    shards = Shards.open(directory)
    embedding, head = (_table(shards, leaves, size) for leaves in (EMBEDDING_LEAVES, HEAD_LEAVES))
    if embedding is None and head is None:
        raise UserError(f"{directory}: no tensor of the embedding (looked for {', '.join(EMBEDDING_LEAVES)})")
    if embedding is None or head is None:
        if not is_tied(config):
            what = "embedding" if embedding is None else "output head"
            raise UserError(f"{directory}: no tensor of the {what}, and config.json does not tie it to the other table")
        embedding = head = embedding if head is None else head
    elif is_tied(config) and torch.equal(embedding, head):
        head = embedding
    same = head is embedding
    embedding = embedding.to(device, dtype)
    head = embedding if same else head.to(device, dtype)
    return Tables(embedding, scale, Head(head, logit_scale, softcap))


def _table(shards: Shards, leaves: tuple[str, ...], size: tuple[int, int]) -> Tensor | None:
    """The [V, H] matrix of one of these modules, None without one. The outermost: MTP heads and vision towers nest deeper."""
    found = [n for n in shards.files if n.removesuffix(".weight").rpartition(".")[2] in leaves and ".layers." not in n]
    if not found:
        return None
    name = min((n for n in found if shards.shape(n) == size), key=lambda n: n.count("."), default=None)
    if name is None:
        shape = list(shards.shape(found[0]))
        raise UserError(f"{shards.path(found[0])}: {found[0]} is {shape}, config.json says {list(size)}")
    return shards.read(name)


def table_scales(text) -> tuple[float, float, float]:
    """(embedding scale, logit scale, logit soft-cap) of a family, by the fields that hold them."""
    values = text.to_dict()
    embed = values.get("embedding_multiplier") or values.get("scale_emb") or 1.0
    if text.model_type.startswith("gemma"):
        embed = text.hidden_size**0.5
    logit = values.get("logit_scale") or values.get("lm_head_multiplier") or 1.0
    if values.get("logits_scaling"):
        logit = 1.0 / values["logits_scaling"]
    return float(embed), float(logit), float(values.get("final_logit_softcapping") or 0.0)


def last_layers(directory: Path, count: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Tensors of the target's last `count` decoder layers by z-lab's names (`self_attn.q_proj.weight` ...), and its final norm.

    Sibling projections that the family stores as one (qkv_proj, gate_up_proj) are split. float32, CPU. UserError says what
    of the family has no place in a draft layer.
    """
    text = read_config(directory).get_text_config(decoder=True)
    shards = Shards.open(directory)
    prefix = _layers_prefix(shards)
    first = text.num_hidden_layers - count
    if first < 0:
        raise UserError(f"{directory}: {text.num_hidden_layers} layers cannot start {count} draft layers")
    layers = []
    for index in range(first, text.num_hidden_layers):
        start = f"{prefix}{index}."
        layers.append({n.removeprefix(start): shards.read(n).float() for n in shards.files if n.startswith(start)})
    norm = next((n for n in (prefix.removesuffix("layers.") + "norm.weight",) if n in shards.files), None)
    if norm is None:
        raise UserError(f"{directory}: no final norm beside {prefix}0")
    return layers, shards.read(norm).float()


def _layers_prefix(shards: Shards) -> str:
    """What stands before a decoder layer's number, e.g. `model.layers.`."""
    found = {n.partition("layers.0.self_attn.")[0] + "layers." for n in shards.files if "layers.0.self_attn." in n}
    found = {p for p in found if not any(part in p for part in ("vis", "audio"))}
    if len(found) != 1:
        raise UserError(f"{shards.directory}: no decoder layers under the usual names")
    return found.pop()
