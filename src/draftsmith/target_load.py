"""Builds a target's text decoder with its first layers alone and reads only their tensors, one at a time.

Plain checkpoints are handed to transformers as `StoredTensor`s, which are read from their shard when transformers asks:
the peak is the weights that are kept plus a few tensors, and transformers' own renaming and merging (experts, old
names) still applies. Quantised and GGUF checkpoints go through transformers' quantizers.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from draftsmith.console import ShowProgress, no_progress
from draftsmith.errors import UserError
from draftsmith.target_facts import gguf_file, read_config
from draftsmith.target_storage import (
    OTHERWISE,
    QUANTIZERS_RAISE,
    cannot_load,
    cannot_run,
    check_all_read,
    check_method,
    check_plain,
    check_scaled,
    is_widened,
    quantization,
    reader,
    to_build_from,
    with_reasons,
)  # fmt: skip
from draftsmith.weights import HEAD_LEAVES, Shards, StoredTensor

HALVES = (torch.bfloat16, torch.float16)


def load_decoder(
    directory: Path, config: Any, keep: range, dtype: torch.dtype, attention: str, trust_remote_code: bool = False,
    progress: ShowProgress = no_progress,
) -> nn.Module:  # fmt: skip
    """The decoder of `config`'s text model with the layers `keep`, on the CPU, in eval mode, without gradients.

    Layers before them do nothing and hold nothing, those behind are not there. `attention` is the name of the attention
    implementation. UserError names the file and tensor that is missing, of a wrong shape, or cut short, or why a quantised
    checkpoint cannot be read.
    """
    check_method(directory, config)
    text = config.get_text_config(decoder=True)
    family = decoder_class(directory, config, text, trust_remote_code)
    options: dict[str, Any] = dict(
        config=to_build_from(text, config),
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    place: Path | None = directory
    stored: dict[str, StoredTensor] = {}
    whole = False
    if gguf := gguf_file(directory):
        if not (find_spec("gguf") and find_spec("accelerate")):
            raise UserError(f"{gguf}: transformers reads GGUF with the packages gguf and accelerate; install both")
        options["gguf_file"] = gguf.name
        shards = Shards(directory, {})
    else:
        shards = Shards.open(directory)
        prefix = tower_prefix(shards, directory) if text is not config else ""
        if quantization(config) is not None:
            check_scaled(
                [t for n, t in shards.tensors.items() if n.startswith(prefix) and _is_wanted(n, keep)], shards, config
            )
            family, whole = causal_class(family, config)
            options["key_mapping"] = {f"^{prefix.replace('.', chr(92) + '.')}": ""} if prefix else None
        else:
            names = {n: n.removeprefix(prefix) for n in shards.tensors if n.startswith(prefix)}
            check_plain([shards.tensors[n] for n in names if _is_wanted(n, keep)])
            stored, place = {new: shards.tensors[old].widened(dtype) for old, new in names.items()}, None
    wanted = sum(_is_wanted(name, keep) for name in stored) or None
    try:
        with quiet(), with_reasons(), progress("load the target", wanted, "tensors") as bar:
            if stored:
                options["state_dict"] = {name: replace(tensor, told=bar.advance) for name, tensor in stored.items()}
            model, info = cut(family, keep).from_pretrained(place, **options)
            if is_widened(config) and model.is_quantized:
                model = model.dequantize(dtype)
            _settle_dtype(model, dtype, model.built_from)
            if not stored:
                bar.advance(len(model.state_dict()))
    except QUANTIZERS_RAISE as error:
        raise cannot_load(directory, config, error) from None
    info["missing_keys"] = [n for n in info["missing_keys"] if _is_wanted(n, keep)]
    _check(info, shards, prefix if not gguf else "", directory, config)
    check_all_read([n for n in info["unexpected_keys"] if _is_wanted(n, keep)], shards, config)
    decoder = model.base_model if whole else model
    return decoder.eval().requires_grad_(False)


def load_whole(directory: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """The whole causal language model, in eval mode: for replies and for verification.

    UserError where transformers cannot make one of the directory, would fill a tensor at random or read quantised weights
    wrongly, or where its quantised layers do not run on `device`.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(directory, trust_remote_code)
    check_method(directory, config)
    shards = Shards.open(directory)
    if quantization(config) is None:
        check_plain(list(shards.tensors.values()))
    else:
        check_scaled(list(shards.tensors.values()), shards, config)
    options = dict(dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    try:
        with quiet(), with_reasons():
            model, info = AutoModelForCausalLM.from_pretrained(
                directory, config=to_build_from(config, config), **options
            )
            _check(info, shards, "", directory, config)
            if quantization(config) is None:
                return model.to(device).eval()
            if is_widened(config) and model.is_quantized:
                model = model.dequantize(dtype)
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (*QUANTIZERS_RAISE, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise cannot_load(directory, config, error, " as a causal language model") from None
    check_all_read(list(info["unexpected_keys"]), shards, config)
    _settle_dtype(model, dtype, {n: type(m) for n, m in plain.named_modules()})
    try:
        model = model.to(device).eval()
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device=device), use_cache=False)
    except QUANTIZERS_RAISE as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise cannot_run(directory, config, dtype, device, error) from None
    return model


def _is_wanted(name: str, keep: range) -> bool:
    """Whether a decoder with these layers has a tensor: no head, no other layer. For messages and checks only."""
    layer = re.search(r"\.(\d+)\.", name)
    return not set(name.split(".")) & set(HEAD_LEAVES) if layer is None else int(layer[1]) in keep


def tower_prefix(shards: Shards, directory: Path) -> str:
    """What stands before the text decoder's names in a multimodal checkpoint, e.g. `model.language_model.`."""
    found = {n.partition("layers.0.")[0] for n in shards.tensors if "layers.0." in n}
    found = {p for p in found if f"{p}embed_tokens.weight" in shards.tensors}
    if len(found) != 1:
        what = f"several text decoders ({', '.join(sorted(found))})" if found else "no text decoder"
        raise UserError(f"{directory}: {what} among the tensors of this multimodal model")
    return found.pop()


def cut(family: type, keep: range) -> type:
    """The same model class that builds only these layers, under their own numbers.

    The config stays whole: some families derive constants from the number of layers or count layers from the end.
    """

    def build(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, config, *args, **kwargs)
        name = find_layers(self, config.get_text_config(decoder=True).num_hidden_layers)
        kept = [nn.Identity() if i < keep.start else m for i, m in enumerate(self.get_submodule(name)[: keep.stop])]
        self.set_submodule(name, nn.ModuleList(kept))
        self.built_from = {n: type(m) for n, m in self.named_modules()}

    return type(family.__name__, (family,), {"__init__": build, "__module__": family.__module__})


def _settle_dtype(model: nn.Module, dtype: torch.dtype, built_from: dict[str, type]) -> None:
    """Give the family's own weights the asked dtype where transformers left them as they are stored. `built_from`: the
    types of its modules before a quantizer changed any.

    bitsandbytes always leaves them so. Some versions (5.17 is one) do that with every tensor of a quantised checkpoint
    that changes its name, as all do when a decoder is loaded without its head, and turn MXFP4 into bfloat16 whatever is
    asked for. Modules that a quantizer put in the place of the family's keep what they have, and so does float32:
    families ask for it on purpose.
    """
    for name, module in model.named_modules():
        if built_from.get(name) is type(module):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.dtype in HALVES:
                    tensor.data = tensor.data.to(dtype)


def stops_of(model: nn.Module, otherwise: int | list[int] | None) -> tuple[int, ...]:
    """The tokens that end a loaded model's replies; `otherwise` where its generation config names none."""
    found = model.generation_config.eos_token_id
    found = otherwise if found is None else found
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def find_layers(model: nn.Module, count: int) -> str:
    """The name in `model` of the decoder's ModuleList: the outermost one with `count` entries."""
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise UserError(f"{type(model).__name__}: no list of {count} decoder layers in this architecture")
    return min(lists, key=lambda n: n.count("."))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing of the tensors left out on purpose; what is wrong is raised by `_check`."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def decoder_class(directory: Path, config: Any, text: Any, trust_remote_code: bool) -> type:
    """The class of the text decoder alone, without an output head."""
    from transformers import MODEL_MAPPING

    if type(text) in MODEL_MAPPING:
        found = MODEL_MAPPING[type(text)]
        return found[0] if isinstance(found, tuple) else found
    return remote_class(directory, config, trust_remote_code, "AutoModel", "AutoModelForCausalLM")


def causal_class(family: type, config: Any) -> tuple[type, bool]:
    """(class, whether it has a head) to load a quantised checkpoint with: quantizers look for modules by the checkpoint's own
    names, in lists of what is not quantised for one, and those begin above the decoder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.get_text_config(decoder=True) is config
    return (MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], True) if found else (family, False)


def remote_class(directory: Path, config: Any, trust_remote_code: bool, *kinds: str) -> type:
    """The first of these classes in the model's own code; UserError when it has none or may not run it."""
    known = config.to_dict().get("auto_map", {})
    name = next((known[kind] for kind in kinds if kind in known), None)
    if not (trust_remote_code and name):
        text = config.get_text_config(decoder=True)
        raise UserError(f"{directory / 'config.json'}: transformers has no decoder for model_type {text.model_type!r}")
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(name, str(directory))


def _check(info: dict[str, Any], shards: Shards, prefix: str, directory: Path, config: Any) -> None:
    """Refuse a model with tensors that transformers would fill at random."""
    plain = quantization(config) is None
    for name, got, want in sorted(info["mismatched_keys"]):
        place = next((t.path for n, t in shards.tensors.items() if n.endswith(name)), directory)
        asks, todo = ("config.json", "") if plain else (reader(config), f"; {OTHERWISE}")
        raise UserError(f"{place}: {prefix}{name} is {list(got)}, {asks} asks for {list(want)}{todo}")
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if plain:
            raise UserError(f"{directory}: no tensor {prefix}{missing[0]}{more} in its files; fetch the model again")
        raise UserError(
            f"{directory}: {reader(config)} finds no tensor {prefix}{missing[0]}{more} in its files, which are cut or written "
            f"for other software; fetch the model again, or {OTHERWISE}"
        )
    if errors := info.get("error_msgs"):
        raise UserError(f"{directory}: {errors[0]}")
