"""`draftsmith bench target`: speed of the prefill on random weights, with the chip's ceilings measured in the same run.

Useful work of a row: 2 x tokens x matmul weights of the layers up to the last tap, plus 4 x heads x head_dim x the
causal pairs of each document, n (n + 1) / 2. Embedding, norms and rotations are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.bench import device_of
from draftsmith.config import Mode
from draftsmith.drafters.dflash import default_taps
from draftsmith.errors import UserError
from draftsmith.job import dtype_of
from draftsmith.step_modes import resolve_mode
from draftsmith.target import RowPlan, Target
from draftsmith.target_attention import PACKED, register
from draftsmith.target_load import find_layers

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8
    ),
    "qwen3-4b": dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8
    ),
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BenchTargetOptions:
    """Speed of the target's prefill on random weights."""

    shape: Literal["qwen3-8b", "qwen3-4b", "qwen3-0.6b", "tiny"] = "qwen3-8b"
    tokens: int = 16384
    """Tokens of a packed row."""
    doc: int = 2048
    """Tokens of a document; 0: log-normal lengths, median 400, sigma 1, at most 8,192."""
    taps: int = 5
    mode: Mode = "auto"
    seconds: float = 5.0
    """How long each figure is measured; shorter ones are not sustained."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on CUDA, float32 on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: bool = False
    """Also list where the device's time goes."""


@dataclass(frozen=True)
class Row:
    """One packed row on the device."""

    ids: Tensor
    positions: Tensor
    documents: Tensor
    lengths: tuple[int, ...]  # of the real documents; what is left of the row is unused


def main(options: BenchTargetOptions) -> None:
    """Print the figures."""
    for line in bench_target(options):
        print(line, flush=True)


def bench_target(o: BenchTargetOptions) -> list[str]:
    """Measure as told; returns what to print. UserError for a device or mode that is not to be had."""
    device = device_of(o.device)
    dtype, mode = dtype_of(o.dtype, device), resolve_mode(o.mode, device)
    config = _config(o)
    taps = default_taps(config.num_hidden_layers, o.taps)
    rows = [_row(lengths, o.tokens, config.vocab_size, device) for lengths in _lengths(o)]
    plan = RowPlan(o.tokens, max(max(r.lengths) for r in rows))
    lines = [_device_name(device), f"torch {torch.__version__}, rows of {o.tokens}: {_describe(rows, o.tokens)}"]
    decoder, reference = _decoder(config, max(taps) + 1, dtype, device), None
    out = torch.zeros(o.tokens, len(taps) * config.hidden_size, dtype=dtype, device=device)
    with torch.no_grad():
        if mode != "eager":
            eager = Target.over(decoder, taps, device)
            eager.prefill(rows[0].ids, rows[0].positions, rows[0].documents, out)
            reference = out.clone()
            for hook in eager.hooks:
                hook.remove()
            del eager
        started = perf_counter()
        target = Target.over(decoder, taps, device, mode=mode, rows=plan)
        lines += [f"{note}" for note in target.report()] + [f"set up in {perf_counter() - started:.0f} s"]
        _run(target, rows[0], out)
        if reference is not None:
            lines.append(
                f"against eager, median token's relative difference a tap: {_agreement(out, reference, len(taps))}"
            )
        turn = iter(range(1 << 62))
        seconds = _sustained(lambda: _run(target, rows[next(turn) % len(rows)], out), o.seconds, device)
    gemms = _gemms(config)
    used = sum(sum(r.lengths) for r in rows) / len(rows)
    flops = float(np.mean([_row_flops(r.lengths, o.tokens, config, max(taps) + 1) for r in rows]))
    lines.append(
        f"useful work a row: 2 x {o.tokens} x {max(taps) + 1} layers x {sum(a * b for a, b in gemms) / 1e6:.1f} M weights "
        f"+ 4 x {config.num_attention_heads} x {config.head_dim} x causal pairs = {flops / 1e12:.1f} TFLOP"
    )
    lines.append(
        f"prefill, mode {mode}: {seconds * 1e3:.1f} ms a row, {used / seconds:,.0f} tok/s used, "
        f"{flops / seconds / 1e12:.0f} TFLOP/s"
    )
    lines += _ceilings(o, gemms, max(taps) + 1, dtype, device, used)
    if o.profile and device.type == "cuda":
        lines += _profile(lambda: _run(target, rows[0], out))
    return lines


def _config(o: BenchTargetOptions) -> Any:
    from transformers import Qwen3Config

    values = {"head_dim": 128, "vocab_size": 151936, **SHAPES[o.shape]}
    return Qwen3Config(max_position_embeddings=max(40960, o.tokens), tie_word_embeddings=False, **values)


def _decoder(config: Any, count: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Random weights as the family initialises them, layers 0..count-1."""
    from transformers import AutoModel

    register()
    torch.manual_seed(0)
    with device:
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=PACKED)
    name = find_layers(model, config.num_hidden_layers)
    model.set_submodule(name, model.get_submodule(name)[:count])
    return model.to(device).eval().requires_grad_(False)


def _lengths(o: BenchTargetOptions) -> list[list[int]]:
    """Document lengths of the rows that take turns: packed by the unit law, as in a run."""
    from draftsmith.unit import UnitShape, plan_epoch

    if o.doc > o.tokens:
        raise UserError(f"--doc {o.doc}: longer than the row, --tokens {o.tokens}")
    if o.doc:
        return [[o.doc] * (o.tokens // o.doc)]
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(np.log(400), 1.0, 20000))
    lengths = np.maximum(2, drawn[drawn <= min(8192, o.tokens)]).astype(np.int64)[:4096]
    corpus = _Lengths(lengths, np.ones_like(lengths))
    planned = plan_epoch(corpus, UnitShape(o.tokens, o.tokens, 2, 1.0), seed=0, epoch=0)  # type: ignore[arg-type]
    return [[int(lengths[i]) for i in row] for row in planned[:16]]


@dataclass(frozen=True)
class _Lengths:
    """What `plan_epoch` reads of a corpus."""

    lengths: np.ndarray
    anchor_counts: np.ndarray


def _row(lengths: list[int], tokens: int, vocabulary: int, device: torch.device) -> Row:
    rest = tokens - sum(lengths)
    parts = [*lengths, rest] if rest else lengths
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(parts)])
    positions = torch.cat([torch.arange(n) for n in parts])
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    return Row(ids.to(device), positions.to(device), documents.to(device), tuple(lengths))


def _run(target: Target, row: Row, out: Tensor) -> None:
    target.prefill(row.ids, row.positions, row.documents, out)


def _sustained(call: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Mean seconds of a call, run back to back for about `seconds`."""
    for _ in range(2):
        call()
    _wait(device)
    start, calls = perf_counter(), 0
    while not calls or perf_counter() - start < seconds:
        for _ in range(4 if calls else 1):
            call()
            calls += 1
        _wait(device)
    return (perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreement(got: Tensor, want: Tensor, taps: int) -> str:
    differences = []
    for a, b in zip(got.float().chunk(taps, -1), want.float().chunk(taps, -1), strict=True):
        differences.append(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median()))
    return ", ".join(f"{d:.2g}" for d in differences)


def _gemms(config: Any) -> list[tuple[int, int]]:
    """(in, out) of a layer's matmuls, siblings together."""
    h, d = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    return [(h, q + 2 * kv), (q, h), (h, 2 * config.intermediate_size), (config.intermediate_size, h)]


def _row_flops(lengths: tuple[int, ...], tokens: int, config: Any, layers: int) -> float:
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    attention = 4.0 * config.num_attention_heads * config.head_dim * pairs
    return layers * (2.0 * tokens * sum(a * b for a, b in _gemms(config)) + attention)


def _ceilings(
    o: BenchTargetOptions,
    gemms: list[tuple[int, int]],
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    used: float,
) -> list[str]:
    """What the chip sustains: a big square matmul, and the prefill's own matmuls with nothing between them."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    square = _sustained(lambda: torch.mm(a, b), o.seconds, device)
    inputs = {i: torch.randn(o.tokens, i, dtype=dtype, device=device) for i, _ in gemms}
    weights = [torch.randn(w, i, dtype=dtype, device=device) for i, w in gemms]

    def layer() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.T)

    own = _sustained(layer, o.seconds, device) * layers
    flops = 2.0 * o.tokens * layers * sum(i * w for i, w in gemms)
    return [
        f"ceiling, matmul {size}^3 sustained: {2 * size**3 / square / 1e12:.0f} TFLOP/s",
        f"ceiling, the row's own matmuls alone sustained: {own * 1e3:.1f} ms, {flops / own / 1e12:.0f} TFLOP/s, "
        f"{used / own:,.0f} tok/s",
    ]


def _profile(call: Callable[[], None]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    table = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    return [f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:5d} x {e.key[:100]}" for e in table[:16]]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _describe(rows: list[Row], tokens: int) -> str:
    used = sum(sum(r.lengths) for r in rows) / len(rows) / tokens
    counts = [len(r.lengths) for r in rows]
    longest = max(max(r.lengths) for r in rows)
    return f"{len(rows)} different, {min(counts)}-{max(counts)} documents, longest {longest}, tokens used {used:.1%}"
