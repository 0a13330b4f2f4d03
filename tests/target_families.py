"""Tiny random-weight configs of the families a target may come from; one line each in FAMILIES."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, HIDDEN, LAYERS = 96, 32, 6
COMMON = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip
MLA = dict(
    head_dim=None, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
    v_head_dim=6, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
    first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRID = dict(
    **MOE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    shared_expert_intermediate_size=16, linear_conv_kernel_dim=4,
)  # fmt: skip
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=HIDDEN)
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})
WIDTHS = (
    "hidden_size", "intermediate_size", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim", "moe_intermediate_size", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_ssm", "mamba_d_head",
    "mamba_d_state", "shared_expert_intermediate_size", "query_pre_attn_scalar", "out_hidden_size",
)  # fmt: skip

# family -> (config class, what differs from COMMON, packed?)
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("LlamaConfig", {}, True),
    "qwen2": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2), True),
    "qwen3": ("Qwen3Config", {}, True),
    "qwen3_moe": ("Qwen3MoeConfig", MOE, True),
    "gemma2": ("Gemma2Config", dict(sliding_window=5, query_pre_attn_scalar=12, attn_logit_softcapping=0.5), True),
    "gemma3": ("Gemma3TextConfig", dict(sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=12), True),
    "mistral": ("MistralConfig", dict(sliding_window=5), True),
    "phi3": ("Phi3Config", dict(sliding_window=7), True),
    "gpt_oss": ("GptOssConfig", dict(sliding_window=5, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2), True),
    "deepseek_v3": ("DeepseekV3Config", MLA, True),
    "glm4": ("Glm4Config", dict(partial_rotary_factor=0.5), True),
    "olmo2": ("Olmo2Config", {}, True),
    "smollm3": ("SmolLM3Config", dict(no_rope_layer_interval=2), True),
    "granite": ("GraniteConfig", dict(embedding_multiplier=3.0, attention_multiplier=0.2, logits_scaling=4.0), True),
    "qwen3_next": ("Qwen3NextConfig", HYBRID, False),
    "falcon_h1": ("FalconH1Config", MAMBA, False),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", MROPE, True),
}  # fmt: skip


def family_config(family: str, scale: int = 1) -> Any:
    """`scale` multiplies all widths: kernels for GPUs take no heads of fewer than 16."""
    name, changes, _ = FAMILIES[family]
    values = {k: v * scale if k in WIDTHS else v for k, v in {**COMMON, **changes}.items() if v is not None}
    if family == "qwen2_5_vl":
        values.pop("head_dim")
        sections = [n * scale for n in MROPE["rope_parameters"]["mrope_section"]]
        values["rope_parameters"] = MROPE["rope_parameters"] | {"mrope_section": sections}
        vision = {k: v * scale if k in WIDTHS else v for k, v in VISION.items()}
        return transformers.Qwen2_5_VLConfig(text_config=values, vision_config=vision)
    return getattr(transformers, name)(**values)


def save_family(
    family: str, directory: Path, dtype: torch.dtype = torch.float32, scale: int = 1, **saving: Any
) -> torch.nn.Module:
    """A random model of the family in `directory`; returns it (eager attention, so that every family's own rule runs)."""
    config = family_config(family, scale)
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText if family == "qwen2_5_vl" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sinks, biases and norms start equal: make them tell
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, **saving)
    return model
