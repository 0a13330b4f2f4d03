"""config.json of the two serving layouts, written from a drafter's shape and read back into one. Imports no torch.

zlab: what z-lab's package, SGLang and vLLM load (architecture DFlashDraftModel, no embedding, no head). Every key that
any of them reads is written, block_size in both places and RoPE in both spellings, since each reader looks elsewhere.
speculators: what the `speculators` library writes and vLLM serves by the directory alone; its tap ids count the
embedding output as 0, so they are ours plus one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.drafters.dflash import DFlashShape

SPECULATORS_VERSION = "0.9.0"  # whose layout this is


@dataclass(frozen=True)
class TargetTraits:
    """What a layout says of the target besides the drafter's shape."""

    name: str
    architectures: tuple[str, ...]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    embed_scale: float
    logit_scale: float
    softcap: float


def zlab_config(shape: "DFlashShape", traits: TargetTraits, dtype: str) -> dict[str, Any]:
    """config.json of the zlab layout."""
    special: dict[str, Any] = {}
    if traits.embed_scale != 1.0:
        special["input_embedding_scale"] = traits.embed_scale
    if traits.logit_scale != 1.0:
        special["output_multiplier"] = traits.logit_scale
    if traits.softcap:
        special["final_logit_softcapping"] = traits.softcap
    return {
        "architectures": ["DFlashDraftModel"],
        **body_config(shape, traits, dtype),
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token,
            "target_layer_ids": list(shape.taps),
            **special,
        },
        "num_target_layers": shape.num_target_layers,
    }


def speculators_config(shape: "DFlashShape", traits: TargetTraits, dtype: str) -> dict[str, Any]:
    """config.json of the speculators layout."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": traits.name, "architectures": list(traits.architectures)},
        },
        "transformer_layer_config": body_config(shape, traits, dtype),
        "block_size": shape.block_size,
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "mask_token_id": shape.mask_token,
        # speculators applies it to sliding layers only, vLLM takes it as the causality of ALL layers: true is right for
        # both when every layer is full. Mixed layers have no value that is right for vLLM (docs/serve.md).
        "sliding_window_non_causal": not any(shape.windows),
        "sample_from_anchor": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
    }


def body_config(shape: "DFlashShape", traits: TargetTraits, dtype: str) -> dict[str, Any]:
    """The Qwen3 configuration of the draft layers, common to both layouts."""
    windows = {w for w in shape.windows if w is not None}
    if len(windows) > 1:
        raise UserError(f"draft layers with windows {sorted(windows)}: both layouts know one window for all layers")
    scaling = {key: value for key, value in shape.rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in shape.windows],
        "sliding_window": max(windows, default=None),
        "use_sliding_window": bool(windows),
        "max_window_layers": shape.num_layers,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": None if shape.rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": {"rope_type": "default", **shape.rope},
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "vocab_size": shape.vocab_size,
        "bos_token_id": traits.bos_token_id,
        "eos_token_id": traits.eos_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def shape_from_zlab(config: dict[str, Any], source: str) -> "DFlashShape":
    """Read a zlab config.json, ours or z-lab's own; what is missing or not plain DFlash is a UserError naming the key."""
    special = config.get("dflash_config") or {}
    architectures = config.get("architectures") or []
    if architectures and "DFlashDraftModel" not in architectures:
        raise UserError(f"{source}: architectures {architectures}: only DFlashDraftModel is known")
    if special.get("projector_type", "dflash") != "dflash":
        raise UserError(f"{source}: projector_type {special['projector_type']!r} is another kind of drafter")

    def either(key: str) -> Any:
        if special.get(key, config.get(key)) is None:
            raise UserError(f"{source}: {key} is missing, at the top level and in dflash_config")
        return special.get(key, config.get(key))

    taps = special.get("target_layer_ids", config.get("target_layer_ids"))
    return _shape(config, source, either("block_size"), either("mask_token_id"), taps, either("num_target_layers"))


def shape_from_speculators(config: dict[str, Any], source: str, num_target_layers: int) -> "DFlashShape":
    """Read a speculators config.json; its layout does not say how many layers the target has."""
    body = config.get("transformer_layer_config")
    missing = [k for k in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids") if config.get(k) is None]
    if not isinstance(body, dict) or missing:
        raise UserError(f"{source}: {', '.join(missing) or 'transformer_layer_config'} is missing")
    if config["speculators_model_type"] != "dflash" or config.get("sample_from_anchor"):
        raise UserError(f"{source}: speculators_model_type {config['speculators_model_type']!r} is not plain DFlash")
    if config.get("draft_vocab_size") not in (None, body.get("vocab_size")):
        raise UserError(f"{source}: a reduced vocabulary of {config['draft_vocab_size']} tokens is not supported")
    taps = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    return _shape(
        {**body, "is_causal": False if config.get("sliding_window_non_causal") else None}, source,
        config["block_size"], config["mask_token_id"], taps, num_target_layers,
    )  # fmt: skip


def _shape(
    config: dict[str, Any], source: str, block: int, mask: int, taps: list[int] | None, target_layers: int
) -> "DFlashShape":
    from draftsmith.drafters.dflash import DFlashShape, default_taps

    layers = _need(config, "num_hidden_layers", source)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    causal = config.get("is_causal", (config.get("dflash_config") or {}).get("causal"))
    if causal is not None and any((kind == "sliding_attention") != bool(causal) for kind in kinds):
        raise UserError(f"{source}: causal = {causal} on {' and '.join(sorted(set(kinds)))} layers is not supported")
    if config.get("attention_bias"):
        raise UserError(f"{source}: attention_bias is not supported")
    window = _need(config, "sliding_window", source) if "sliding_attention" in kinds else None
    heads = _need(config, "num_attention_heads", source)
    hidden = _need(config, "hidden_size", source)
    try:
        return DFlashShape(
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size", source),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            num_layers=layers,
            vocab_size=_need(config, "vocab_size", source),
            block_size=block,
            mask_token=mask,
            taps=tuple(taps) if taps else default_taps(target_layers, layers),
            num_target_layers=target_layers,
            rms_norm_eps=_need(config, "rms_norm_eps", source),
            rope=_rope(config, source),
            max_positions=_need(config, "max_position_embeddings", source),
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None


def _need(config: dict[str, Any], key: str, source: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"{source}: {key} is missing")
    return config[key]


def _rope(config: dict[str, Any], source: str) -> dict[str, Any]:
    """rope_parameters (transformers >= 5), or rope_theta with rope_scaling (before), as one dict with rope_theta in it."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = _need(config, "rope_theta", source)
    return rope
