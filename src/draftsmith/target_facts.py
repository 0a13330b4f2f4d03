"""What a target's config.json says, in one spelling for every family. Reads no weights."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, first_line

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class TargetFacts:
    """Sizes of the text decoder.

    `rope` is what a drafter for this target uses: base and scaling of the full-attention layers, always over whole
    heads (no partial rotation, no multimodal sections), and the plain base where the target's frequencies depend on
    the length. `head_dim` is the value head size where keys and values differ (MLA).
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_positions: int
    tied: bool
    dtype: str | None


def read_config(directory: Path, trust_remote_code: bool = False) -> Any:
    """The model's `PreTrainedConfig`, with the fields no target can do without checked against the file."""
    from transformers import AutoConfig

    gguf = gguf_file(directory)
    path = gguf or directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: missing; a target is a directory with config.json and safetensors, or one GGUF file")
    if gguf:
        try:
            return AutoConfig.from_pretrained(directory, gguf_file=gguf.name)
        except (ValueError, LookupError, OSError, ImportError, NotImplementedError, struct.error) as error:
            raise UserError(f"{gguf}: transformers cannot read this GGUF file: {first_line(error)}") from None
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UserError(f"{path}: no field model_type; is this a model in Hugging Face layout?")
    if "auto_map" in raw and not trust_remote_code and not _known(raw["model_type"]):
        raise UserError(
            f"{path}: model_type {raw['model_type']!r} comes with Python code of its own, which is not run unless "
            "asked: set target.trust_remote_code = true if you trust it"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path}: transformers cannot read it: {first_line(error)}") from None
    _check_fields(raw, config, path)
    return config


def describe(directory: Path, trust_remote_code: bool = False) -> TargetFacts:
    """Facts of the target in `directory`; UserError naming the file and field when one is missing."""
    config = read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = _first(text, "num_key_value_heads") or heads
    head_dim = _first(text, "v_head_dim", "head_dim") or text.hidden_size // heads
    architectures = config.architectures or [type(config).__name__.removesuffix("Config")]
    dtype = config.dtype if config.dtype is not None else text.dtype
    return TargetFacts(
        architecture=architectures[0],
        model_type=config.model_type,
        hidden_size=text.hidden_size,
        intermediate_size=_first(text, "intermediate_size", "ffn_hidden_size", "moe_intermediate_size")
        or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        rms_norm_eps=_first(text, "rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon") or 1e-6,
        rope=drafter_rope(text),
        max_positions=_first(text, "max_position_embeddings", "max_sequence_length") or 4096,
        tied=is_tied(config),
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
    )


def is_tied(config: Any) -> bool:
    """Whether the head is the embedding: the outer config decides, as it does in transformers."""
    return bool(config.tie_word_embeddings)


def target_rope(text: Any) -> dict[str, Any]:
    """Rope parameters of the full-attention layers as transformers understands them, `rope_theta` inside."""
    rope = dict(_first(text, "rope_parameters", "rope_scaling") or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", float(_first(text, "rope_theta", "rotary_emb_base") or 10000.0))
    if rope["rope_type"] is None:
        rope["rope_type"] = "default"
    return rope


def drafter_rope(text: Any) -> dict[str, Any]:
    """`target_rope` over whole heads and without a rule that depends on the length (see `TargetFacts`)."""
    rope = target_rope(text)
    if rope["rope_type"] in LENGTH_DEPENDENT_ROPE or "mrope_section" in rope:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {k: v for k, v in rope.items() if k != "partial_rotary_factor"}


def gguf_file(directory: Path) -> Path | None:
    """The directory's GGUF file, if that is what the target is made of."""
    if (directory / "config.json").is_file():
        return None
    found = sorted(directory.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{directory}: {len(found)} GGUF files; leave one, or split files joined into one")
    return found[0] if found else None


def _first(hf_config: Any, *names: str) -> Any:
    """The first of these fields that a Hugging Face config has and that is not None; families spell them differently."""
    for name in names:
        value = getattr(hf_config, name, None)
        if value is not None:
            return value
    return None


def _check_fields(raw: dict, config: Any, path: Path) -> None:
    """A flat config.json must hold its sizes: transformers would fill a gap with another model's default."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        return  # nested configs leave out what equals their family's default
    spellings = {name: {name} for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    for canonical, alias in type(config).attribute_map.items():
        spellings.get(canonical, set()).add(alias)
    for name, accepted in spellings.items():
        if not accepted & raw.keys():
            raise UserError(f"{path}: no field {name}; the file is not complete, fetch it again")


def _known(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
