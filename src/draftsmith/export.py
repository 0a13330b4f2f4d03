"""Serving layouts of a trained drafter, and loading a drafter from any of its forms.

An export is complete or absent: it is written to a hidden directory beside its place, loaded back, compared tensor by
tensor and logit by logit with what was trained, and only then renamed. draftsmith.json in it says which target, which
chat template options and which run it belongs to.
"""

import errno
import json
import os
import shlex
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from draftsmith import checkpoint, models
from draftsmith.console import size
from draftsmith.disk import flush
from draftsmith.drafters.dflash import DFlash, from_zlab, to_zlab
from draftsmith.errors import UserError
from draftsmith.layouts import (
    TargetTraits,
    shape_from_speculators,
    shape_from_zlab,
    speculators_config,
    zlab_config,
)
from draftsmith.options import ExportOptions
from draftsmith.step import Tables
from draftsmith.tables import load_tables
from draftsmith.target_facts import describe

Layout = Literal["zlab", "speculators"]
METADATA = "draftsmith.json"


@dataclass(frozen=True)
class DrafterInfo:
    """Where a drafter comes from and what it was trained with; all but `source` may be unknown for foreign drafters."""

    source: str
    target: str | None = None
    revision: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """Text of a chat template that replaced the model's own."""
    step: int | None = None
    acceptance_length: float | None = None
    """Held-out walk at that step."""
    recipe: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None

    @property
    def trusts_remote_code(self) -> bool:
        """Whether the recipe allowed code shipped with the target."""
        return bool(self.recipe and self.recipe["target"].get("trust_remote_code"))


def load_drafter(path: Path) -> tuple[DFlash, DrafterInfo]:
    """Read a drafter (float32, CPU, eval mode) from a checkpoint, a run (best checkpoint, else newest) or an export.

    Exports may be ours or, in the zlab layout, anybody's. UserError when it is none of these or does not fit itself.
    """
    if (path / "state.json").is_file():
        return _from_checkpoint(checkpoint.read_checkpoint(path))
    if (path / "checkpoints").is_dir():
        found = checkpoint.list_checkpoints(path)
        if not found:
            raise UserError(f"{path / 'checkpoints'}: holds no complete checkpoint yet")
        return _from_checkpoint(checkpoint.best_checkpoint(found) or found[-1])
    if (path / "config.json").is_file():
        return _from_layout(path)
    what = "has neither state.json, checkpoints/ nor config.json" if path.is_dir() else "no such directory"
    raise UserError(f"{path}: {what}; give a run, a checkpoint or an exported drafter")


def export(
    source: Path, out: Path, layout: Layout = "zlab", dtype: str = "bfloat16", target: str | None = None,
    revision: str | None = None,
) -> DrafterInfo:  # fmt: skip
    """Write `out` in a serving layout. The target (its name from the run, if not given) supplies ids, scales and, for the
    speculators layout, embedding and head. Returns what went into draftsmith.json."""
    drafter, info = load_drafter(source)
    name, revision = target_of(info, source, target, revision)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another --out or delete it yourself")
    directory = models.resolve(name, revision)
    tables = load_tables(directory, torch.float32, torch.device("cpu"), info.trusts_remote_code)
    traits = _traits(name, directory, tables)
    check_fits(drafter, directory, info.trusts_remote_code)
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    drafter.to(torch_dtype)
    tensors = to_zlab(dict(drafter.named_parameters()), drafter.shape)
    config = zlab_config(drafter.shape, traits, dtype)
    if layout == "speculators":
        config = speculators_config(drafter.shape, traits, dtype)
        # vLLM and speculators know no scales: they are folded in (a soft-cap does not change the order of tokens).
        tensors["embed_tokens.weight"] = (tables.embedding * tables.embed_scale).to(torch_dtype)
        tensors["lm_head.weight"] = (tables.head.weight * tables.head.scale).to(torch_dtype)
    metadata = {**asdict(info), "source": str(source), "target": name, "revision": revision}
    files = {
        "config.json": config,
        METADATA: {"format": 1, "layout": layout, "drafter": drafter.shape.to_dict(), **metadata},
    }
    tensors = {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    _write(out, tensors, files, lambda written: _compare(drafter, written, tables))
    return DrafterInfo(**metadata)


def target_of(info: DrafterInfo, source: Path, target: str | None, revision: str | None) -> tuple[str, str | None]:
    """(name, revision) of the target to take: the given one, else the one that the drafter was trained for, at the
    recipe's revision, which means nothing for another target. UserError where neither is known."""
    name = target or info.target
    if name is None:
        raise UserError(f"{source}: does not say which target it belongs to; give --target")
    return name, revision or (None if target else info.revision)


def check_fits(drafter: DFlash, target: Path, trust_remote_code: bool = False) -> None:
    """The drafter's widths against the target's; UserError names what differs."""
    facts, shape = describe(target, trust_remote_code), drafter.shape
    pairs = {
        "hidden size": (shape.hidden_size, facts.hidden_size),
        "vocabulary": (shape.vocab_size, facts.vocab_size),
        "layers of the target": (shape.num_target_layers, facts.num_layers),
    }
    wrong = [f"{what} {ours} instead of {theirs}" for what, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise UserError(f"{target}: the drafter was made for another target: {', '.join(wrong)}")


def main(options: ExportOptions) -> None:
    """`draftsmith export`: writes, checks, and prints how to serve the result."""
    out = options.out or options.source / "export" / options.to
    info = export(options.source, out, options.to, options.dtype, options.target, options.revision)
    shape = _read_json(out / METADATA)["drafter"]
    print(f"{out}: {options.to} layout, {options.dtype}, loaded back: same tensors, same logits")
    if options.to == "speculators" and len({w is None for w in shape["windows"]}) > 1:
        print(
            "note: vLLM makes full layers causal where this layout has sliding ones beside them; serve --to zlab there"
        )
    for line in serve_commands(info.target or "TARGET", out, options.to, shape["block_size"]):
        print(line)


def serve_commands(target: str, out: Path, layout: Layout, block_size: int) -> list[str]:
    """Shell lines that serve the export with the engines that know its layout (docs/serve.md)."""
    speculative = {"method": "dflash", "model": str(out), "num_speculative_tokens": block_size - 1}
    lines = [
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))} "
        "--attention-backend flash_attn"
    ]
    if layout == "zlab":
        lines.append(
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(str(out))} --speculative-num-draft-tokens {block_size}"
        )
    return lines


def _from_checkpoint(found: checkpoint.Checkpoint) -> tuple[DFlash, DrafterInfo]:
    drafter = DFlash(found.shape)
    drafter.load_state_dict(checkpoint.load_weights(found), strict=True)
    recipe = found.state.get("recipe")
    target = recipe["target"] if recipe else {}
    info = DrafterInfo(
        source=str(found.path),
        target=target.get("model"),
        revision=target.get("revision"),
        template_options=target.get("template_options", {}),
        chat_template=_template_text(target.get("chat_template")),
        step=found.step,
        acceptance_length=found.state.get("acceptance_length"),
        recipe=recipe,
        provenance=found.state.get("provenance"),
    )
    return drafter.eval(), info


def _template_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the recipe's target.chat_template cannot be read: {error}") from None


def _from_layout(path: Path) -> tuple[DFlash, DrafterInfo]:
    config = _read_json(path / "config.json")
    metadata = _read_json(path / METADATA) if (path / METADATA).is_file() else {}
    source = str(path / "config.json")
    if "speculators_model_type" in config:
        layers = metadata["drafter"]["num_target_layers"] if metadata else max(config["aux_hidden_state_layer_ids"]) + 1
        shape = shape_from_speculators(config, source, layers)
    else:
        shape = shape_from_zlab(config, source)
    weights = path / "model.safetensors"
    try:
        with safe_open(weights, "pt") as file:
            names = [n for n in file.keys() if n not in ("embed_tokens.weight", "lm_head.weight")]
            drafter = DFlash(shape)
            drafter.load_state_dict(from_zlab({n: file.get_tensor(n).float() for n in names}, shape), strict=True)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{weights}: {error}") from None
    known = {k: metadata[k] for k in DrafterInfo.__dataclass_fields__ if k in metadata}
    return drafter.eval(), DrafterInfo(**{**known, "source": str(path)})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _traits(name: str, directory: Path, tables: Tables) -> TargetTraits:
    config = _read_json(directory / "config.json")
    text = {**config, **(config.get("text_config") or {})}
    return TargetTraits(
        name=name,
        architectures=tuple(config.get("architectures") or ()),
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
        embed_scale=tables.embed_scale,
        logit_scale=tables.head.scale,
        softcap=tables.head.softcap,
    )


def _write(out: Path, tensors: dict[str, Tensor], files: dict[str, dict], check) -> None:
    """tensors and JSON files into `out`, after `check(directory)` passed; nothing is left when anything fails."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < need * 1.05:
            raise OSError(
                errno.ENOSPC, f"{size(need * 1.05)} are needed, {size(need * 1.05 - free)} more than are free"
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, values in files.items():
            (temporary / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # safetensors writes files that their owner alone may read; a server often runs as somebody else.
        (temporary / "model.safetensors").chmod((temporary / METADATA).stat().st_mode)
        check(temporary)
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        if out.is_dir():
            out.rmdir()  # empty: it was checked
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: the export could not be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compare(drafter: DFlash, written: Path, tables: Tables) -> None:
    """Load back; shape, every tensor and the logits of a probe block must equal the exported drafter's bit for bit."""
    loaded, _ = load_drafter(written)
    ours, theirs = drafter.float().state_dict(), loaded.state_dict()
    different = [n for n in ours if not torch.equal(ours[n], theirs[n])]
    if loaded.shape != drafter.shape or different:
        raise AssertionError(f"{written}: loaded back, {different or 'the shape'} differs from the trained drafter")
    if not torch.equal(probe_logits(drafter, tables), probe_logits(loaded, tables)):
        raise AssertionError(f"{written}: loaded back, the logits of a probe block differ")


@torch.no_grad()
def probe_logits(drafter: DFlash, tables: Tables) -> Tensor:
    """Logits [B, V] of one block after 8 context tokens with made-up features, for comparing two copies of a drafter."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    f = drafter.fuse(torch.randn(8, drafter.fc.in_features, generator=generator))
    ids = torch.tensor([0] + [shape.mask_token] * (shape.block_size - 1))
    x = F.embedding(ids, tables.embedding) * tables.embed_scale
    positions = torch.arange(8 + shape.block_size)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in ((context_k, k), (context_v, v)))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, enable_gqa=True)
        return out[0].transpose(0, 1)

    states = drafter(x, f, positions[8:], positions[:8], attend)
    return (states @ tables.head.weight.T) * tables.head.scale
