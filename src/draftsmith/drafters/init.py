"""Start a drafter from its target: draft layers are copies of the target's last layers, fc passes the last tap through."""

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.dflash import DFlash, DFlashShape, from_zlab, to_zlab
from draftsmith.errors import UserError
from draftsmith.target_facts import gguf_file, read_config, target_rope
from draftsmith.target_load import find_layers, load_decoder
from draftsmith.target_storage import is_widened, quantization
from draftsmith.weights import last_layers

OTHERWISE = 'set drafter.init = "random"'


def init_from_target(drafter: DFlash, directory: Path, trust_remote_code: bool = False) -> None:
    """Fill the drafter in place; q_norm and k_norm stay 1 where the target has none.

    hidden_norm stays 1. UserError says what of the target has no place in a draft layer.
    """
    shape = drafter.shape
    if gguf := gguf_file(directory):
        raise UserError(f"{gguf}: GGUF layers cannot start a draft layer; {OTHERWISE}")
    config = read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    rope = target_rope(text)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(
            f"{directory}: the target rotates only {partial:g} of each head, a draft layer all; {OTHERWISE}"
        )
    activation = text.to_dict().get("hidden_act") or text.to_dict().get("hidden_activation") or "silu"
    if activation not in ("silu", "swish"):
        raise UserError(f"{directory}: the target's MLP uses {activation}, a draft layer SiLU; {OTHERWISE}")
    stored = last_layers if quantization(config) is None else _quantised_layers
    layers, norm = stored(directory, shape.num_layers, trust_remote_code)
    state = {n: t.detach().clone() for n, t in to_zlab(dict(drafter.named_parameters()), shape).items()}
    for index, layer in enumerate(layers):
        _fill(state, f"layers.{index}.", _split(layer, shape), directory)
    state["fc.weight"] = pass_last_tap(shape)
    state["norm.weight"] = norm
    state["hidden_norm.weight"] = torch.ones(shape.hidden_size)
    try:
        drafter.load_state_dict(from_zlab(state, shape), strict=False)
    except ValueError as error:
        raise UserError(f"{directory}: {error}; {OTHERWISE}") from None


def _quantised_layers(directory: Path, count: int, trust_remote_code: bool) -> tuple[list[dict[str, Tensor]], Tensor]:
    """`last_layers` of a quantised target, whose tensors only its quantizer can read."""
    config = read_config(directory, trust_remote_code)
    if not is_widened(config):
        raise UserError(f"{directory}: layers that stay quantised cannot start a draft layer; {OTHERWISE}")
    total = config.get_text_config(decoder=True).num_hidden_layers
    keep = range(total - count, total)
    if keep.start < 0:
        raise UserError(f"{directory}: {total} layers cannot start {count} draft layers")
    decoder = load_decoder(directory, config, keep, torch.float32, "eager", trust_remote_code)
    name = find_layers(decoder, total)
    layers = [dict(decoder.get_submodule(name)[index].named_parameters()) for index in keep]
    norm = dict(decoder.named_parameters()).get("norm.weight")
    if norm is None:
        raise UserError(f"{directory}: no final norm beside its layers; {OTHERWISE}")
    return layers, norm


def pass_last_tap(shape: DFlashShape) -> Tensor:
    """fc [H, K*H] that hands the last tap through: identity on its columns, zero elsewhere."""
    weight = torch.zeros(shape.hidden_size, len(shape.taps) * shape.hidden_size)
    weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
    return weight


def _split(layer: dict[str, Tensor], shape: DFlashShape) -> dict[str, Tensor]:
    """Families that store siblings as one (qkv_proj, gate_up_proj) in z-lab's names; what does not fit stays as it is."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    out = {}
    for name, tensor in layer.items():
        if name == "self_attn.qkv_proj.weight" and tensor.shape[0] == q + 2 * kv:
            for part, piece in zip("qkv", tensor.split((q, kv, kv)), strict=True):
                out[f"self_attn.{part}_proj.weight"] = piece
        elif name == "mlp.gate_up_proj.weight" and tensor.shape[0] == 2 * shape.intermediate_size:
            out["mlp.gate_proj.weight"], out["mlp.up_proj.weight"] = tensor.chunk(2)
        else:
            out[name] = tensor
    return out


def _fill(state: dict[str, Tensor], prefix: str, layer: dict[str, Tensor], directory: Path) -> None:
    """Copy one target layer over the draft layer whose names start with `prefix`."""
    extra = sorted(n for n in layer if prefix + n not in state)
    if extra:
        kinds = "biases" if all(n.endswith(".bias") for n in extra) else "tensors"
        raise UserError(f"{directory}: the target's layers have {kinds} a draft layer has not: {extra[0]}; {OTHERWISE}")
    optional = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    for name in (n.removeprefix(prefix) for n in list(state) if n.startswith(prefix)):
        if name in layer:
            if layer[name].shape != state[prefix + name].shape:
                got, want = list(layer[name].shape), list(state[prefix + name].shape)
                raise UserError(f"{directory}: {name} is {got}, a draft layer's {want}; {OTHERWISE}")
            state[prefix + name] = layer[name]
        elif name in optional:
            state[prefix + name] = torch.ones_like(state[prefix + name])
        else:
            raise UserError(f"{directory}: the target's layers have no {name}; {OTHERWISE}")
