"""How a target's weights are stored: plain floats, or numbers that mean nothing without a quantizer's scales beside them.

transformers skips a quantisation method that it does not know and leaves out tensors that it does not look for, with no
more than a warning. The numbers are then wrong by orders of magnitude, so both are refused here.
"""

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError, first_line
from draftsmith.target_facts import gguf_file
from draftsmith.weights import PLAIN, Shards, StoredTensor

OTHERWISE = "name the same model in plain floats as the target"
# What quantizers, their packages and their kernels raise when they cannot do something.
QUANTIZERS_RAISE = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError, AssertionError,
)  # fmt: skip
ACTIVATIONS = ("input", "output", "activation")  # scales of what flows through a layer: plain weights do without
SCALES = re.compile("scale|SCB|absmax")  # how quantizers name the scales of a weight


def quantization(config: Any) -> dict[str, Any] | None:
    """config.json's `quantization_config`; None for plain floats."""
    found = (c.to_dict().get("quantization_config") for c in (config, config.get_text_config(decoder=True)))
    return next((q for q in found if q is not None), None)


def check_method(directory: Path, config: Any) -> None:
    """UserError when transformers would read the weights wrongly: it skips methods that it does not know."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known

    stored = quantization(config)
    if stored is None:
        return
    if stored.get("load_in_8bit") or stored.get("load_in_4bit"):  # bitsandbytes names itself so
        return
    method = stored.get("quant_method")
    if str(method) not in known:
        raise UserError(
            f"{directory / 'config.json'}: quantization_config.quant_method is {method!r}, which this version of "
            f"transformers does not read; take the model in a form that it reads (fp8, compressed-tensors), or {OTHERWISE}"
        )
    block = stored.get("weight_block_size")  # of fp8
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise UserError(
            f"{directory / 'config.json'}: quantization_config.weight_block_size is {block!r}, not two numbers; {OTHERWISE}"
        )
    groups = stored.get("config_groups") or {}  # of compressed-tensors
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise UserError(
            f"{directory / 'config.json'}: quantization_config.config_groups is no table of tables; {OTHERWISE}"
        )
    schemes = [(g.get("weights"), g.get("format")) for g in groups.values()]
    if any(scheme != schemes[0] for scheme in schemes):
        raise UserError(
            f"{directory / 'config.json'}: quantization_config.config_groups has several schemes, of which transformers would "
            f"take one for all layers; {OTHERWISE}"
        )


def to_build_from(part: Any, config: Any) -> Any:
    """`part` (the config or its text part) to build a model from. It says how the weights are stored, which in multimodal
    models only the outer one does, and asks for them in the compute dtype where the quantizer can give them."""
    stored = quantization(config)
    if stored is None:
        return part
    part = copy.deepcopy(part)
    part.quantization_config = {**stored, "dequantize": True} if is_widened(config) else stored
    return part


def is_widened(config: Any) -> bool:
    """Whether the weights are turned into the compute dtype while they are loaded.

    So is every format whose quantizer can do it: the layers are then those of the plain model, on every device and in every
    mode, and no activations are rounded. MXFP4, a quarter of the size, keeps transformers' own kernels, which need accelerate.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known

    stored = quantization(config) or {}
    method = stored.get("quant_method")
    if method not in known or (method == "mxfp4" and find_spec("accelerate")):
        return bool(stored.get("load_in_8bit"))  # bitsandbytes' 8 bits depend on the row's other tokens
    return "dequantize" in inspect.signature(known[method].__init__).parameters


def storage_report(directory: Path, config: Any) -> str:
    """How the weights are stored, for a run's start; "" for plain floats."""
    if gguf := gguf_file(directory):
        return f", {gguf.name} turned into it"
    if quantization(config) is None:
        return ""
    return f", quantised by {_method(config)}{', turned into it' if is_widened(config) else ''}"


def check_plain(tensors: list[StoredTensor]) -> None:
    """Refuse quantised tensors of a model whose config.json says nothing of quantisation."""
    for tensor in tensors:
        buffer = tensor.dtype in ("BOOL", "I64") or tensor.name.rpartition(".")[2] == "bias"  # masks of old GPT-2 files
        if tensor.dtype not in PLAIN and len(tensor.shape) > 1 and not buffer:
            raise UserError(
                f"{tensor.path}: {tensor.name} is quantised ({tensor.dtype}), but config.json has no quantization_config that "
                f"says how; take the model in a form that transformers reads (fp8, compressed-tensors), or {OTHERWISE}"
            )


def check_scaled(tensors: list[StoredTensor], shards: Shards, config: Any) -> None:
    """Refuse quantised weights among `tensors` without a scale, which transformers takes for plain ones, and scales of FP8
    blocks that it would lay over the weight in blocks of another size: it divides the weight evenly."""
    beside: dict[str, list[str]] = {}
    for name in shards.tensors:
        module, found, leaf = name.partition(".weight")
        if not found:
            module, _, leaf = name.rpartition(".")
        if SCALES.search(leaf) and not leaf.lstrip("._").startswith(ACTIVATIONS):
            beside.setdefault(module, []).append(name)
    for weight in tensors:
        if weight.dtype in (*PLAIN, "BOOL", "I64") or len(weight.shape) < 2 or not weight.name.endswith(".weight"):
            continue
        scales = beside.get(weight.name.removesuffix(".weight"))
        if not scales:
            raise UserError(
                f"{weight.path}: {weight.name} is quantised ({weight.dtype}), but no scale lies beside it; fetch the model "
                f"again, or {OTHERWISE}"
            )
        scale, block = shards.tensors[scales[0]], (quantization(config) or {}).get("weight_block_size")
        if block and weight.dtype.startswith("F8") and len(scale.shape) == len(weight.shape) == 2:
            _check_blocks(weight, scale, block)


def _check_blocks(weight: StoredTensor, scale: StoredTensor, block: list[int]) -> None:
    grid = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    even = all(n % b == 0 or n < b for n, b in zip(weight.shape, block, strict=True))
    if scale.shape == grid and even:
        return
    if scale.shape != grid and scale.dtype not in PLAIN:
        return  # MXFP8 and MXFP4 layers of such checkpoints have blocks of their own
    why = "transformers needs whole blocks" if scale.shape == grid else f"they ask for {list(grid)}"
    raise UserError(
        f"{scale.path}: {scale.name} is {list(scale.shape)}, {weight.name} {list(weight.shape)}, blocks are {block} by "
        f"quantization_config.weight_block_size: {why}; {OTHERWISE}"
    )


def check_all_read(unread: list[str], shards: Shards, config: Any) -> None:
    """Refuse a model with a quantised weight that was read and a tensor of its (a scale, an order) that was not."""
    for name in sorted(set(unread) & shards.tensors.keys()):
        module, _, leaf = name.rpartition(".")
        weight = shards.tensors.get(f"{module}.weight")
        if weight is None or weight.dtype in PLAIN or weight.name in unread or leaf.startswith(ACTIVATIONS):
            continue
        raise UserError(
            f"{weight.path}: {reader(config)} reads {weight.name} ({weight.dtype}) but not {leaf} "
            f"beside it, so its numbers would be wrong; {OTHERWISE}"
        )


class _Heard(logging.Handler):
    """The text of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


@contextlib.contextmanager
def with_reasons() -> Iterator[None]:
    """transformers raises that tensors cannot be converted and logs why: raises both in one, and logs nothing."""
    logger, heard = logging.getLogger("transformers.modeling_utils"), _Heard()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(heard)
    try:
        yield
    except RuntimeError as error:
        if found := re.search(r"^(.*)\nError: (\w+) on tensors destined for (.+?)\. Ckpt", heard.text, re.MULTILINE):
            raise RuntimeError(f"{found[2]} fails on {found[3]}: {found[1]}") from error
        raise
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
        logger.propagate = propagate


def cannot_load(directory: Path, config: Any, error: Exception, what: str = "") -> UserError:
    """What transformers raised while it loaded the model, as one line; `what`: " as a ..." """
    if quantization(config) is None:
        return UserError(f"{directory}: transformers cannot load it{what}: {first_line(error)}")
    todo = f"install what is missing, or {OTHERWISE}" if isinstance(error, ImportError) else OTHERWISE
    return UserError(f"{_named(directory, config)}, which transformers cannot load here: {_reason(error)}; {todo}")


def cannot_run(directory: Path, config: Any, dtype: torch.dtype, device: torch.device, error: Exception) -> UserError:
    """What a quantizer's layers raised when they ran for the first time, as one line."""
    todo = f"set the dtype to bfloat16 (some know no other), or {OTHERWISE}" if dtype == torch.float32 else OTHERWISE
    spelled = str(dtype).removeprefix("torch.")
    return UserError(
        f"{_named(directory, config)}, whose layers do not run on {device} in {spelled}: {_reason(error)}; {todo}"
    )


def _named(directory: Path, config: Any) -> str:
    return f"{directory / 'config.json'}: quantization_config.quant_method is {_method(config)!r}"


def _reason(error: Exception) -> str:
    """The whole message (pydantic's first line says nothing) with the error's name where it has none, in one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:400].rstrip(".")


def reader(config: Any) -> str:
    """Who reads the weights, for messages."""
    return f"transformers' quantizer for {_method(config)}"


def _method(config: Any) -> str:
    stored = quantization(config) or {}
    return str(stored.get("quant_method", "an unnamed quantizer"))
