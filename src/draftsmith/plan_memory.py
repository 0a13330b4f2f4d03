"""Memory of each role, by arithmetic, before anything is loaded.

What stays for the whole run is exact. What a micro-step adds is what autograd keeps of the drafter's forward (formulas
below; tests hold them to what it really keeps) and the larger of two working sets: the loss over a chunk of head rows,
or the backward pass of the last layer's MLP.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.attention import CHUNK_QUERIES, block_chunks
from draftsmith.drafters.dflash import DFlashShape
from draftsmith.loss import CHUNK_ROWS
from draftsmith.rates import GIB, KnownTarget
from draftsmith.step_modes import Resolved
from draftsmith.unit import Unit, UnitShape

Role = Literal["both", "trainer", "target"]

# Bytes that a process holds before its first tensor: libraries in host memory; context, kernels and library workspaces
# in device memory.
HOST_PROCESS = 0.45 * GIB
DEVICE_CONTEXT = 0.75 * GIB


@dataclass(frozen=True)
class TargetSize:
    """What of a target its layers up to the last tap come to."""

    parameters: int
    """Of the layers up to the last tap and of everything beside the layers (embedding, norms)."""
    active: float
    """Parameters that one token passes: routed experts count by the share that is used, the embedding not at all."""
    layers: int
    """Up to the last tap."""
    hidden_size: int
    intermediate_size: int
    """Of the MLPs that a token passes."""
    head_width: int
    """Query heads x head size."""
    kv_width: int
    """Key/value heads x head size."""
    vocab_size: int
    tied: bool


def target_size(directory: Path, taps: tuple[int, ...], trust_remote_code: bool = False) -> TargetSize:
    """From config.json alone: the model is built without memory and its parameters are counted."""
    import torch

    from draftsmith.target_facts import describe, read_config
    from draftsmith.target_load import decoder_class, find_layers

    facts, config = describe(directory, trust_remote_code), read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        decoder = decoder_class(directory, config, text, trust_remote_code)(text)
    layers = list(decoder.get_submodule(find_layers(decoder, facts.num_layers)))
    count = max(taps) + 1
    beside = sum(p.numel() for p in decoder.parameters()) - sum(p.numel() for x in layers for p in x.parameters())
    kept = [(n, p.numel()) for x in layers[:count] for n, p in x.named_parameters()]
    share = _routed_share(text)
    active = sum(n * (share if ".experts." in f".{name}." else 1.0) for name, n in kept)
    attention = facts.hidden_size * facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads)
    return TargetSize(
        parameters=beside + sum(n for _, n in kept),
        active=active,
        layers=count,
        hidden_size=facts.hidden_size,
        intermediate_size=max(facts.hidden_size, int((active / count - attention) / (3 * facts.hidden_size))),
        head_width=facts.num_heads * facts.head_dim,
        kv_width=facts.num_kv_heads * facts.head_dim,
        vocab_size=facts.vocab_size,
        tied=facts.tied,
    )


def _routed_share(text: Any) -> float:
    """Share of the routed experts that a token passes."""
    values = text.to_dict()
    every = values.get("num_experts") or values.get("n_routed_experts") or values.get("num_local_experts")
    return values.get("num_experts_per_tok", 1) / every if every else 1.0


def known_size(known: KnownTarget, taps: tuple[int, ...]) -> TargetSize:
    """Of a published dense target."""
    k, count = known, max(taps) + 1
    heads, kv = k.num_heads * k.head_dim, k.num_kv_heads * k.head_dim
    layer = k.hidden_size * (2 * heads + 2 * kv) + 3 * k.hidden_size * k.intermediate_size
    return TargetSize(
        count * layer + k.vocab_size * k.hidden_size, count * layer, count, k.hidden_size, k.intermediate_size, heads, kv,
        k.vocab_size, k.tied,
    )  # fmt: skip


@dataclass(frozen=True)
class Compute:
    """How a worker computes."""

    device: Literal["cuda", "cpu"]
    item: int
    """Bytes of the compute dtype."""
    mode: Resolved
    recompute: bool = False
    """run.checkpoint_activations."""

    @property
    def compiled(self) -> bool:
        return self.mode != "eager"


@dataclass(frozen=True)
class Line:
    name: str
    bytes: int


@dataclass(frozen=True)
class Budget:
    """What a role needs on its device."""

    role: Role
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        """Everything, the process's own share included."""
        return sum(line.bytes for line in self.lines)

    @property
    def tensors(self) -> int:
        """What torch's allocator counts: everything but the process's own share."""
        return self.total - sum(line.bytes for line in self.lines if line.name == PROCESS)


PROCESS = "process, libraries"


def budget(
    role: Role,
    shape: DFlashShape,
    unit: UnitShape,
    target: TargetSize,
    compute: Compute,
    slots: int,
    chunk_keys: int = 0,
) -> Budget:
    """Lines of one worker. `slots`: those of a target (split), 0 where taps go straight into the step's input.
    `chunk_keys`: `count_chunk_keys` of a typical unit, where attention is the CPU's."""
    lines = [Line(PROCESS, int(HOST_PROCESS if compute.device == "cpu" else DEVICE_CONTEXT))]
    taps = unit.tokens * len(shape.taps) * shape.hidden_size * compute.item
    if role != "trainer":
        lines.append(Line("target's weights up to the last tap", target.parameters * compute.item))
    if role == "target":
        lines.append(Line(f"{slots} slots of taps", slots * taps))
        lines.append(Line("prefill", prefill_bytes(shape, unit, target, compute)))
        return Budget(role, tuple(lines))
    lines += trainer_lines(shape, unit, target, compute)
    if role == "trainer":
        lines.append(Line("staging of taps", taps))
    step = step_bytes(shape, unit, compute, chunk_keys)
    if role == "both":
        # One after the other in the same memory; but a captured graph keeps its memory to itself.
        prefill = prefill_bytes(shape, unit, target, compute)
        if compute.mode in ("graph", "reduce-overhead"):
            lines.append(Line("prefill", prefill))
        else:
            step = max(step, prefill)
    lines.append(Line("activations and loss of a micro-step", step))
    return Budget(role, tuple(lines))


def trainer_lines(shape: DFlashShape, unit: UnitShape, target: TargetSize, compute: Compute) -> list[Line]:
    """What a trainer holds from its first step to its last."""
    P, c = parameter_count(shape), compute.item
    T, A, S = unit.tokens, unit.anchors, unit.block_size - 1
    table = target.vocab_size * shape.hidden_size * c
    return [
        Line("frozen embedding and head", table * (1 if target.tied else 2)),
        Line("float32 masters", 4 * P),
        Line("weights in the compute dtype", c * P if c != 4 else 0),
        Line("float32 gradients", 4 * P),
        Line("AdamW's moments", 8 * P),
        Line("input buffers", 8 * (3 * T + 2 * A + A * S) + A * S + T * len(shape.taps) * shape.hidden_size * c),
    ]


def parameter_count(shape: DFlashShape) -> int:
    """Trained parameters of a drafter."""
    s = shape
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    matrices = s.hidden_size * (2 * heads + 2 * kv) + 3 * s.hidden_size * s.intermediate_size
    norms = 2 * s.hidden_size + 2 * s.head_dim
    return len(s.taps) * s.hidden_size**2 + s.num_layers * (matrices + norms) + 2 * s.hidden_size


def step_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute, chunk_keys: int) -> int:
    """The most that a micro-step adds: what is kept, states and their gradient, and one head chunk or one MLP's backward."""
    chunks = attention_bytes(shape, compute, chunk_keys)
    states = 2 * unit.anchors * (unit.block_size - 1) * shape.hidden_size * compute.item
    logits, mlp = logits_bytes(shape.vocab_size, unit, compute), mlp_bytes(shape, unit, compute)
    if not compute.recompute:
        return saved_bytes(shape, unit, compute) + chunks + states + max(logits, mlp)
    layers, one = range(shape.num_layers), unit.anchors * unit.block_size * shape.hidden_size * compute.item
    loss = len(layers) * one + final_bytes(shape, unit, compute) + logits
    backward = max((i + 1) * one + layer_bytes(shape, unit, compute, i) for i in layers) + chunks // len(layers) + mlp
    return fuse_bytes(shape, unit, compute) + states + max(loss, backward)


def saved_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute) -> int:
    """What autograd keeps of one forward, attention's own copies on the CPU apart (`attention_bytes`).

    N block tokens, n = N without the anchors' slots in the last layer's MLP. Compiled, the partitioner keeps what a GEMM
    reads in the backward pass and recomputes the rest; eager keeps every operation's inputs, norms' in float32.
    """
    inside = sum(layer_bytes(shape, unit, compute, i) for i in range(shape.num_layers))
    return inside + fuse_bytes(shape, unit, compute) + final_bytes(shape, unit, compute)


def fuse_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute) -> int:
    """fc and hidden_norm, rotary tables and the embedded rows."""
    c, T, N = compute.item, unit.tokens, unit.anchors * unit.block_size
    rows = 2 if compute.compiled else 2 + _wide(compute)
    tables = 0 if compute.compiled else 2 * (T + N) * shape.head_dim
    return c * (rows * T * shape.hidden_size + tables + 2 * unit.anchors * shape.hidden_size)


def layer_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute, index: int) -> int:
    """Kept of one draft layer."""
    c, s, wide = compute.item, shape, _wide(compute)
    T, N = unit.tokens, unit.anchors * unit.block_size
    n = N if index < s.num_layers - 1 else unit.anchors * (unit.block_size - 1)
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    statistics = 4 * (N * (2 * s.num_heads + s.num_kv_heads) + T * s.num_kv_heads)  # float32: norms and log-sum-exp
    if compute.compiled:
        stream = 2 * s.hidden_size * (N if index else 0)  # residual and its norm
        attention = N * ((heads + 2 * kv) + (heads + kv) + heads) + T * 3 * kv
        mlp = n * (2 * s.hidden_size + 3 * s.intermediate_size)
    else:
        norm = (2 + wide) * s.hidden_size
        stream = norm * (N if index else 0)
        normed = (heads + kv) * (1 if wide == 1 else 3)
        own = heads if compute.device == "cpu" else kv  # the CPU's attention keeps its outputs and their concatenation
        attention = N * ((heads + 2 * kv) + normed + heads + own + heads)
        attention += T * kv * (3 if compute.device == "cpu" else 4 + (2 if wide == 2 else 0))
        mlp = n * (norm + 4 * s.intermediate_size)
    return c * (stream + attention + mlp) + statistics


def final_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute) -> int:
    """Kept of the last norm."""
    rows = unit.anchors * (unit.block_size - 1) * shape.hidden_size
    return compute.item * rows * (1 if compute.compiled else 1 + _wide(compute))


def attention_bytes(shape: DFlashShape, compute: Compute, chunk_keys: int) -> int:
    """The CPU's eager attention keeps keys and values of every chunk of blocks for all query heads, and its mask."""
    if compute.device == "cuda" or compute.compiled:
        return 0
    return shape.num_layers * chunk_keys * compute.item * (2 * shape.num_heads * shape.head_dim + CHUNK_QUERIES)


def count_chunk_keys(unit: Unit) -> int:
    """Keys that the CPU's attention concatenates over all its chunks of blocks of one unit: a chunk's context columns and
    its own blocks."""
    block = unit.labels.shape[1] + 1
    chunks = block_chunks(unit.anchors.tolist(), unit.starts.tolist(), block, len(unit.ids))
    return sum(seen.stop - seen.start + (last - first) * block for first, last, _, seen in chunks)


def logits_bytes(vocab_size: int, unit: UnitShape, compute: Compute) -> int:
    """One chunk of head rows: the kernel turns logits into their gradient in place, the CPU holds three float32 copies."""
    S, c = unit.block_size - 1, compute.item
    chunk = -(-unit.anchors // max(1, round(unit.anchors * S / CHUNK_ROWS[compute.device]))) * S
    return chunk * vocab_size * (c if compute.device == "cuda" else 12 + (c if c < 4 else 0))


def mlp_bytes(shape: DFlashShape, unit: UnitShape, compute: Compute) -> int:
    """Gradients inside the last layer's MLP."""
    widths = shape.hidden_size + (3 if compute.compiled else 5) * shape.intermediate_size
    return unit.anchors * (unit.block_size - 1) * widths * compute.item


def prefill_bytes(shape: DFlashShape, unit: UnitShape, target: TargetSize, compute: Compute) -> int:
    """The target's forward: the taps until they are copied, the residual stream and one layer's widest moment."""
    mlp = 3 * target.intermediate_size + 2 * target.hidden_size
    attention = 2 * (target.head_width + 2 * target.kv_width) + target.head_width + 2 * target.hidden_size
    taps = len(shape.taps) * shape.hidden_size
    return unit.tokens * compute.item * (taps + target.hidden_size + max(mlp, attention))


def _wide(compute: Compute) -> int:
    """Elements of the compute dtype that a norm's float32 input takes where it is kept beside the input itself."""
    return 2 if compute.item == 2 else 1
