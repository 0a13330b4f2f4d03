"""The target's frozen embedding and output head, read by name from its safetensors shards or its GGUF file."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.loss import Head
from draftsmith.step import Tables
from draftsmith.target_facts import gguf_file, is_tied, read_config
from draftsmith.target_scales import measure_scales
from draftsmith.target_storage import OTHERWISE
from draftsmith.weights import HEAD_LEAVES, PLAIN, Shards, StoredTensor

EMBEDDING_LEAVES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")


def load_tables(
    directory: Path, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> Tables:
    """The frozen embedding and head that a trainer needs, and nothing else of the target.

    A tied head is the embedding's own storage; as in transformers, two stored tables that differ are not tied and a
    tied pair may be stored under either name. The scales are measured (target_scales.py). UserError naming the file when a
    table is missing or has a wrong shape, or when the family computes embedding or logits in another way.
    """
    config = read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    size = (text.vocab_size, text.hidden_size)
    scales = measure_scales(directory, config, trust_remote_code)
    embedding, head = _stored_tables(directory, size, dtype)
    if embedding is None and head is None:
        raise UserError(f"{directory}: no tensor of the embedding (looked for {', '.join(EMBEDDING_LEAVES)})")
    if embedding is None or head is None:
        if not (is_tied(config) or gguf_file(directory)):
            what = "embedding" if embedding is None else "output head"
            raise UserError(f"{directory}: no tensor of the {what}, and config.json does not tie it to the other table")
        embedding = head = embedding if head is None else head
    elif is_tied(config) and torch.equal(embedding, head):
        head = embedding
    same = head is embedding
    embedding = embedding.to(device)
    head = embedding if same else head.to(device)
    return Tables(embedding, scales.embedding, Head(head, scales.logit, scales.softcap))


def _stored_tables(directory: Path, size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(embedding, head) on the CPU, None for one that is not stored."""
    if gguf := gguf_file(directory):
        return _gguf_table(gguf, "token_embd.weight", size, dtype), _gguf_table(gguf, "output.weight", size, dtype)
    shards = Shards.open(directory)
    return _table(shards, EMBEDDING_LEAVES, size, dtype), _table(shards, HEAD_LEAVES, size, dtype)


def _gguf_table(path: Path, name: str, size: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """One [V, H] matrix of a GGUF file, dequantised."""
    if not find_spec("gguf"):
        raise UserError(f"{path}: needs the package gguf; install it, or name a directory with safetensors")
    import gguf

    found = next((t for t in gguf.GGUFReader(path).tensors if t.name == name), None)
    if found is None:
        return None
    table = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type))
    if tuple(table.shape) != size:
        raise UserError(f"{path}: {name} is {list(table.shape)}, its header says {list(size)}")
    return table.to(dtype)


def _table(shards: Shards, leaves: tuple[str, ...], size: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """The [V, H] matrix of one of these modules, None without one. The outermost: MTP heads and vision towers nest deeper."""
    found = [
        n for n in shards.tensors if n.removesuffix(".weight").rpartition(".")[2] in leaves and ".layers." not in n
    ]
    if not found:  # quantizers store a module's parts under names of their own: qweight, weight_packed, weight._data
        found = [
            n for n in shards.tensors if n.replace(".weight.", ".").rpartition(".")[0].rpartition(".")[2] in leaves
        ]
        found = [n for n in found if not n.endswith(".bias") and ".layers." not in n]
        if found:
            raise _quantised(max((shards.tensors[n] for n in found), key=lambda t: t.end - t.start))
        return None
    name = min((n for n in found if shards.tensors[n].shape == size), key=lambda n: n.count("."), default=None)
    if (stored := shards.tensors[name or found[0]]).dtype not in PLAIN:
        raise _quantised(stored)
    if name is None:
        raise UserError(f"{stored.path}: {stored.name} is {list(stored.shape)}, config.json says {list(size)}")
    return shards.read(name, dtype)


def _quantised(table: StoredTensor) -> UserError:
    return UserError(
        f"{table.path}: {table.name} is quantised ({table.dtype}); the trainer needs embedding and head as plain floats: "
        f"quantise the model without them (modules_to_not_convert, ignore), or {OTHERWISE}"
    )
