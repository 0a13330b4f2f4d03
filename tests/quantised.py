"""Tiny checkpoints in the formats of quantizers, written by hand from their definitions, with the floats they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, HIDDEN, LAYERS = 96, 64, 5
F8 = torch.float8_e4m3fn
GROUP = 32  # columns that share a scale
Stored = tuple[
    dict[str, Tensor], Tensor
]  # tensors by what follows the module's name, the weight [out, in] they stand for
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def fp8_blocks(w: Tensor) -> Stored:
    out, columns = w.shape
    blocks = w.view(out // GROUP, GROUP, columns // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    q = (blocks / scale[:, None, :, None]).to(F8)
    plain = (q.float() * scale[:, None, :, None]).view(out, columns)
    return {"weight": q.view(out, columns), "weight_scale_inv": scale}, plain


def fp8_rows(w: Tensor) -> Stored:
    scale = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
    q = (w / scale).to(F8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def int8_rows(w: Tensor) -> Stored:
    scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = (w / scale).round().clamp(-128, 127)
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


def four_bits(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(0..15 around 8 [out, in], scale [out, in / GROUP] float16, plain [out, in])"""
    out, columns = w.shape
    groups = w.view(out, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1) / 7).half().float()
    q = (groups / scale[..., None]).round().clamp(-8, 7)
    return (q + 8).long().view(out, columns), scale, (q * scale[..., None]).view(out, columns)


def packed(values: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """[r, c] of 0..15 -> int32 [r, c / 8], lowest bits first."""
    words = (values.view(values.shape[0], -1, 8)[..., list(order)] << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_groups(w: Tensor) -> Stored:
    q, scale, plain = four_bits(w)
    return {"weight_packed": packed(q), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}, plain


def gptq(w: Tensor) -> Stored:
    q, scale, plain = four_bits(w)
    zeros = torch.full((scale.shape[1], w.shape[0]), 7)  # stored less one
    order = (torch.arange(w.shape[1]) // GROUP).int()
    return {"qweight": packed(q).T, "qzeros": packed(zeros), "scales": scale.T.half(), "g_idx": order}, plain


def awq(w: Tensor) -> Stored:
    q, scale, plain = four_bits(w)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    zeros = torch.full((scale.shape[1], w.shape[0]), 8)
    return {"qweight": packed(q.T.contiguous(), order), "qzeros": packed(zeros, order), "scales": scale.T.half()}, plain


def bitsandbytes8(w: Tensor) -> Stored:
    scale = w.abs().amax(1)
    q = (w / scale[:, None] * 127).round()
    return {"weight": q.to(torch.int8), "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}, (
        q * scale[:, None] / 127
    )


def bitsandbytes4(w: Tensor) -> Stored:
    blocks = w.reshape(-1, 64)
    scale, levels = blocks.abs().amax(1), torch.tensor(NF4)
    q = ((blocks / scale[:, None])[..., None] - levels).abs().argmin(-1)
    flat = q.view(-1).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
    return {
        "weight": (flat[0::2] << 4 | flat[1::2])[:, None],
        "weight.absmax": scale,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }, (levels[q] * scale[:, None]).view(w.shape)


def compressed(form: str, bits: int, kind: str, strategy: str, activations: bool = False) -> dict[str, Any]:
    weights = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=True, dynamic=False)
    weights |= {"group_size": GROUP} if strategy == "group" else {}
    inputs = dict(num_bits=bits, type=kind, strategy="token", symmetric=True, dynamic=True) if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


@dataclass(frozen=True)
class Format:
    quantization: dict[str, Any]
    store: Callable[[Tensor], Stored]
    packages: tuple[str, ...]
    """What transformers needs to read it on a CPU."""
    tolerance: float = 1e-5
    """Relative. Some compute parts in half precision; transformers 5.17 rounds int8 activations as a server does."""

    @property
    def here(self) -> bool:
        return all(find_spec(p) for p in self.packages)


SKIPPED = "model.layers.1.mlp.down_proj"  # not quantised where a format can say so
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}
BITS = {"bits": 4, "group_size": GROUP}
BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", SKIPPED], "llm_int8_threshold": 0.0}
NF = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
CT, NB = ("compressed_tensors",), ("accelerate", "bitsandbytes")
FORMATS = {
    "fp8": Format(FP8 | {"modules_to_not_convert": ["lm_head", SKIPPED]}, fp8_blocks, ("accelerate",)),
    "compressed-tensors, fp8": Format(compressed("float-quantized", 8, "float", "channel"), fp8_rows, CT, 0.02),
    "compressed-tensors, int8": Format(compressed("int-quantized", 8, "int", "channel", True), int8_rows, CT, 0.06),
    "compressed-tensors, int4": Format(compressed("pack-quantized", 4, "int", "group"), int4_groups, CT),
    "bitsandbytes, int8": Format(BNB | {"load_in_8bit": True}, bitsandbytes8, NB),
    "bitsandbytes, nf4": Format(BNB | NF | {"load_in_4bit": True}, bitsandbytes4, NB, 0.05),
    "gptq": Format(
        BITS | {"quant_method": "gptq", "desc_act": False, "sym": True}, gptq, ("accelerate", "optimum", "gptqmodel"), 1e-3
    ),
    "awq": Format(
        BITS | {"quant_method": "awq", "version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head", SKIPPED]},
        awq, ("accelerate", "gptqmodel"), 1e-3,
    ),
}  # fmt: skip


def save_plain(directory: Path) -> transformers.PreTrainedModel:
    """A tiny Qwen3 in bfloat16."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(directory)
    return model


def quantise(
    directory: Path, quantization: dict[str, Any] | None, store: Callable[[Tensor], Stored], *also: str
) -> dict:
    """Rewrite the checkpoint's projections (and the modules `also`) in a format; returns the floats that they stand for."""
    path = directory / "model.safetensors"
    tensors, plain = load_file(path), {}
    spared = json.dumps(quantization) if quantization else ""
    for name in [n for n in tensors if n.endswith("_proj.weight") or n.removesuffix(".weight") in also]:
        module = name.removesuffix(".weight")
        if f'"{module}"' in spared:
            continue
        stored, plain[name] = store(tensors.pop(name).float())
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": quantization} if quantization else {}
    (directory / "config.json").write_text(json.dumps(config))
    return plain
