"""What a family does with its embedding and its head, measured by running its own classes hollow.

Config fields have other meanings in other families (`logits_scaling` divides in Granite and multiplies in HyperCLOVA X),
so no field is read here. The classes are built with the real config but a vocabulary of VOCABULARY tokens and without
decoder layers: the decoder runs up to its first layer, the head runs on states that are made up. In float64, on the CPU.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError, first_line
from draftsmith.target_load import decoder_class, find_layers, quiet, remote_class

VOCABULARY = 64
TOLERANCE = 1e-5  # relative; families that compute a part in float32 differ by about 1e-7
# What a class that is run without its layers, or was never meant for it, may raise.
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError)


@dataclass(frozen=True)
class Scales:
    """First layer's input = embedding(id) * embedding (+ what depends on the position alone); logits =
    softcap(head(h) * logit) with softcap(x) = c tanh(x / c), or x where it is 0."""

    embedding: float
    logit: float
    softcap: float


def measure_scales(directory: Path, config: Any, trust_remote_code: bool = False) -> Scales:
    """The scales of the model in `directory`; UserError when its embedding or logits are computed in another way."""
    small = _small(config)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
            torch.manual_seed(0)
            embed, weight = _embedding(directory, small, trust_remote_code)
            scale = _linear(embed, weight)
            head, weight = _head(directory, small, trust_remote_code)
            found = _logits(head, weight)
    except ERRORS as error:
        raise UserError(
            f"{directory}: its embedding and head cannot be measured, {type(small).__name__} does not run without its "
            f"layers: {first_line(error)}"
        ) from None
    if scale is None:
        raise UserError(
            f"{directory}: its first layer gets more than embedding(id) times a number (a norm or a projection of it); "
            "drafters cannot be trained for this family"
        )
    if isinstance(found, str):
        raise UserError(f"{directory}: its logits are {found}; drafters cannot be trained for this family")
    return Scales(scale, *found)


def _small(config: Any) -> Any:
    """The config with tiny tables, nothing quantised, embedding and head apart."""
    small = copy.deepcopy(config)
    small.tie_word_embeddings = False
    for part in (small, small.get_text_config(decoder=True)):
        values = part.to_dict()
        for name in values:
            if "vocab_size" in name and isinstance(values[name], int):
                setattr(part, name, VOCABULARY)
        part.tie_word_embeddings = False
        part.pad_token_id = None
        if "quantization_config" in values:
            del part.quantization_config
    return small


class _Arrived(Exception):
    """Carries the first layer's input out of the decoder."""

    def __init__(self, states: Tensor):
        self.states = states


def _embedding(directory: Path, config: Any, trust_remote_code: bool) -> tuple[Callable[[], Tensor], Tensor]:
    """(run, weight): `run` gives the first layer's input [V, H], one token at position 0 each, at the weight [V, H]."""
    text = config.get_text_config(decoder=True)
    family = decoder_class(directory, config, text, trust_remote_code)
    held: list[nn.Module] = []

    def build(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, config, *args, **kwargs)
        name = find_layers(self, config.num_hidden_layers)
        held.append(self.get_submodule(name)[0])  # stays on the meta device: it is entered, never run
        self.set_submodule(name, nn.ModuleList())
        held.append(self.get_submodule(name))

    decoder = _hollow(family, build, text)
    layer, layers = held
    layers.append(layer)

    def arrive(module: nn.Module, args: tuple, kwargs: dict) -> None:
        raise _Arrived(args[0] if args else kwargs["hidden_states"])

    layer.register_forward_pre_hook(arrive, with_kwargs=True)
    weight = decoder.get_input_embeddings().weight

    def run() -> Tensor:
        ids = torch.arange(VOCABULARY)[:, None]
        try:
            decoder(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
        except _Arrived as arrived:
            return arrived.states.reshape(VOCABULARY, -1)
        raise RuntimeError("its first layer is never called")

    return run, weight


class _States(nn.Module):
    """In the place of the decoder: answers with states that are made up, and has the decoder's own attributes."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self._replaced = [decoder]  # in a list, so that its weights, on the meta device, are none of this module's

    @property
    def decoder(self) -> nn.Module:
        return self  # OPT's head asks for the decoder inside the decoder

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._replaced[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> "_Answer":
        return _Answer(self.states[None])


class _Answer:
    """What decoders return: the states under their usual names, nothing under any other."""

    def __init__(self, states: Tensor):
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _head(directory: Path, config: Any, trust_remote_code: bool) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(run, weight): `run` gives the logits [n, V] of final states [n, H]; every parameter behind them is random."""
    family, config = _causal_class(directory, config, trust_remote_code)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    held: list[nn.Module] = []

    def build(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, config, *args, **kwargs)
        head, name = self.get_output_embeddings(), _beside_head(self, layers)
        held.extend((head, _States(self.get_submodule(name))))
        self.set_submodule(name, held[1])

    model = _hollow(family, build, config)
    head, stand_in = held
    for parameter in model.parameters():
        parameter.normal_()

    def run(states: Tensor) -> Tensor:
        stand_in.states = states
        ids = torch.zeros(1, len(states), dtype=torch.int64)
        return model(input_ids=ids, use_cache=False).logits[0].double()

    return run, head.weight


def _beside_head(model: nn.Module, layers: int) -> str:
    """Name of the module beside the output head that has the decoder's layers in it."""
    head = model.get_output_embeddings()
    place = next(n for n, m in model.named_modules() if m is head).rpartition(".")[0]
    inside = model.get_submodule(place)
    child = find_layers(inside, layers).partition(".")[0]
    return f"{place}.{child}" if place else child


def _hollow(family: type, build: Callable[..., None], config: Any) -> nn.Module:
    """The class built by `build` on the meta device, what is left of it filled by the family's own rules, in float64."""
    names = {"__init__": build, "__module__": family.__module__}
    # Heads are not tied here, and what they would be tied to is not there.
    names |= {"_tied_weights_keys": None, "tie_weights": lambda self, *args, **kwargs: None}
    model = type(family.__name__, (family,), names).from_pretrained(
        None, config=config, state_dict={}, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def _causal_class(directory: Path, config: Any, trust_remote_code: bool) -> tuple[type, Any]:
    """The class with the output head, and the config that it takes: of the text model, else the multimodal one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text = config.get_text_config(decoder=True)
    for mapping, key in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, text),
        (MODEL_FOR_CAUSAL_LM_MAPPING, config),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config),
    ):
        if type(key) in mapping:
            return mapping[type(key)], key
    return remote_class(directory, config, trust_remote_code, "AutoModelForCausalLM"), config


def _linear(run: Callable[[], Tensor], weight: Tensor) -> float | None:
    """The s of run() = s * weight + offset, with an offset that is the same for every token; None if it is not so."""
    random = torch.randn_like(weight)
    weight.zero_()
    offset = run().double()
    weight.copy_(random)
    output = run().double() - offset
    if output.shape != weight.shape or not torch.equal(offset, offset[:1].expand_as(offset)):
        return None
    return _factor(output, random.double())


def _logits(run: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[float, float] | str:
    """(scale, soft-cap), or what the logits are instead."""
    states = torch.randn(8, weight.shape[1], dtype=torch.float64)
    raw = states @ weight.double().T
    if run(torch.zeros_like(states)).abs().max() > 0:
        return "its head's plus a bias"
    if run(states).shape != raw.shape:
        return f"of {run(states).shape[-1]} entries where its head has {raw.shape[-1]}"
    tiny = 1e-9
    scale = _factor(run(states * tiny), raw * tiny)
    if scale is None:
        return "no multiple of its head's"
    huge = run(states * 1e9).abs()
    if _close(huge, (raw * scale * 1e9).abs()):
        cap = 0.0
    else:
        cap = _rounded(float(huge.max()))
    for size in (0.01, 1.0, 100.0):
        want = raw * scale * size
        if not _close(run(states * size), torch.tanh(want / cap) * cap if cap else want):
            return "neither its head's times a number nor their soft-cap"
    return scale, cap


def _factor(output: Tensor, of: Tensor) -> float | None:
    """The s with output = s * of, None if there is none."""
    scale = float((output * of).sum() / of.square().sum())
    return _rounded(scale) if scale and _close(output, of * scale) else None


def _close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def _rounded(value: float) -> float:
    """Without the last digits, which are those of a float32 buffer."""
    return float(f"{value:.8g}")
