"""`draftsmith bench step`: how fast the training step is here, with its ceilings measured in the same run.

Random weights and random documents, never zeros or NaN (they make the tensor cores faster). The useful work is counted
by one formula (drafters/dflash.py, useful_flops); the ceilings are a large matrix product alone and the step's own list
of matrix products alone, both run long enough for the card to reach its power limit.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from draftsmith.config import Mode
from draftsmith.errors import UserError

if TYPE_CHECKING:
    import torch

    from draftsmith.drafters.dflash import DFlashShape
    from draftsmith.step import TrainStep
    from draftsmith.unit import Unit, UnitShape

# hidden, intermediate, query heads, kv heads, target layers of the targets whose drafters are measured
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 16, 8, 28),
    "qwen3-4b": (2560, 9728, 32, 8, 36),
    "qwen3-8b": (4096, 12288, 32, 8, 36),
    "qwen3-32b": (5120, 25600, 64, 8, 64),
    "tiny": (64, 128, 4, 2, 8),
}
VOCAB = {"tiny": 512}  # the others: Qwen3's 151,936


@dataclass(frozen=True)
class BenchStepOptions:
    """Speed of the training step on this machine."""

    shape: Literal["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "tiny"] = "qwen3-8b"
    """Target whose drafter is measured (5 layers, 5 taps, random weights)."""
    tokens: int = 16384
    """Tokens of a unit (T)."""
    doc: int = 2048
    """Tokens of each document."""
    anchors: int = 1024
    """Draft blocks of a unit (A)."""
    block: int = 16
    mode: Mode = "auto"
    attention: Literal["reference", "op", "flex"] | None = None
    """Attention implementation instead of the device's own choice."""
    recompute: bool = False
    """Recompute draft layers in the backward pass."""
    micro_steps: int = 1
    """Units per optimizer step."""
    window: int | None = None
    """Sliding window of all draft layers but the last."""
    steps: int = 30
    """Timed steps; the median is reported."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ceilings: bool = True
    """Measure the two ceilings too (CUDA; about 8 seconds)."""
    profile: bool = False
    """List the kernels of one step by time (CUDA)."""
    json: Annotated[Path | None, "file"] = None
    """Write the figures to this file too."""


class RandomDocuments:
    """unit.Documents: `count` documents of one length, random tokens, all of them supervised."""

    def __init__(self, count: int, length: int, vocab: int):
        import numpy as np

        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, vocab, (count, length)).astype(np.int32)
        self.lengths = np.full(count, length, np.int64)
        self.anchor_counts = self.lengths - 1

    def document(self, index: int):
        import numpy as np

        return self.tokens[index], np.ones(self.tokens.shape[1], np.uint8)


def drafter_shape(options: BenchStepOptions) -> "DFlashShape":
    from draftsmith.drafters.dflash import DFlashShape, default_taps

    hidden, intermediate, heads, kv_heads, layers = SHAPES[options.shape]
    vocab = VOCAB.get(options.shape, 151936)
    return DFlashShape(
        hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=16 if options.shape == "tiny" else 128, num_layers=5, vocab_size=vocab, block_size=options.block,
        mask_token=vocab - 1, taps=default_taps(layers, 5), num_target_layers=layers, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e6}, max_positions=40960, windows=(options.window,) * 4 + (None,),
    )  # fmt: skip


def make_units(options: BenchStepOptions, count: int) -> "tuple[UnitShape, list[Unit]]":
    """`count` different units of the asked shape."""
    from draftsmith.unit import UnitSequence, UnitShape

    if options.tokens % options.doc or options.tokens < options.doc:
        raise UserError(f"--tokens {options.tokens} has to be a multiple of --doc {options.doc}")
    rate = min(1.0, options.anchors / options.tokens)
    shape = UnitShape(options.tokens, options.anchors, options.block, rate)
    corpus = RandomDocuments(options.tokens // options.doc * 4, options.doc, VOCAB.get(options.shape, 151936))
    units = UnitSequence(corpus, shape, seed=0)
    return shape, [units.unit(u) for u in range(count)]


def make_step(options: BenchStepOptions, unit_shape: "UnitShape", device: "torch.device") -> "TrainStep":
    """A step with random weights, tables and taps; bf16 on CUDA, float32 on the CPU."""
    import torch

    from draftsmith.config import LossConfig, OptimConfig
    from draftsmith.drafters.dflash import DFlash
    from draftsmith.loss import Head
    from draftsmith.step import Tables, TrainStep

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = drafter_shape(options)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    with device:
        drafter = DFlash(shape)
    with torch.no_grad():
        for p in drafter.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.02, generator=generator)
    tables = Tables(normal(shape.vocab_size, shape.hidden_size), 1.0, Head(normal(shape.vocab_size, shape.hidden_size)))
    step = TrainStep(
        drafter, tables, unit_shape, LossConfig(), OptimConfig(), dtype, device, options.recompute,
        mode=options.mode, attention=options.attention,
    )  # fmt: skip
    step.static.taps.normal_(0, 1, generator=generator)
    return step


def device_of(wanted: str) -> "torch.device":
    """auto: CUDA where there is one; UserError where it is asked for and there is none."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no CUDA device")
    return torch.device("cuda" if torch.cuda.is_available() and wanted != "cpu" else "cpu")


def one_step(step: "TrainStep", units: "list[Unit]", first: int, micro_steps: int) -> None:
    """Optimizer step from units first, first + 1, ..., as a trainer would run it."""
    for i in range(micro_steps):
        step.static.load(units[(first + i) % len(units)])
        step.accumulate()
    step.update(1e-4)


def measure(options: BenchStepOptions) -> dict:
    """All figures of one run as a flat dict; times in milliseconds."""
    import torch

    from draftsmith.drafters.dflash import useful_flops

    device = device_of(options.device)
    cuda = device.type == "cuda"
    unit_shape, units = make_units(options, 8)
    step = make_step(options, unit_shape, device)
    n = options.micro_steps
    begin = time.perf_counter()
    one_step(step, units, 0, n)
    first_loss = step.read().loss
    figures = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "mode": step.mode,
        "attention": step.attention.kind,
        "parameters": step.flat.total,
        "first_step_s": time.perf_counter() - begin,
        "first_loss": first_loss,
    }
    for i in range(3):
        one_step(step, units, n * (i + 1), n)
    timer = _cuda_times if cuda else _cpu_times
    figures |= timer(lambda i: one_step(step, units, n * i, n), options.steps)
    useful = useful_flops(step.drafter.shape, options.tokens, options.anchors) * n
    seconds = figures["step_ms"] / 1e3
    figures |= {
        "loss": step.read().loss,
        "useful_tflop": useful / 1e12,
        "useful_tflops": useful / seconds / 1e12,
        "tokens_per_s": options.tokens * n / seconds,
        "block_tokens_per_s": options.anchors * options.block * n / seconds,
    }
    if cuda:
        figures |= watch(lambda i: one_step(step, units, n * i, n))
    if cuda and options.profile:
        for line in profile(lambda: one_step(step, units, 0, n)):
            print(line)
    if cuda and options.ceilings:
        del step
        torch.cuda.empty_cache()
        figures |= ceilings(drafter_shape(options), options.tokens, options.anchors)
        figures["step_over_gemms"] = figures["step_ms"] / (figures["gemm_list_ms"] * n)
        figures["share_of_matmul"] = figures["useful_tflops"] / figures["matmul_tflops"]
    return figures


def _cuda_times(run: Callable[[int], None], count: int) -> dict:
    import torch

    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    enqueue = []
    events[0].record()
    for i in range(count):
        begin = time.perf_counter()
        run(i)
        enqueue.append(1e3 * (time.perf_counter() - begin))
        events[i + 1].record()
        events[max(0, i - 1)].synchronize()  # stay two steps ahead, as a trainer that logs does
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    return {"step_ms": statistics.median(times), "step_ms_max": max(times), "enqueue_ms": statistics.median(enqueue)}


def _cpu_times(run: Callable[[int], None], count: int) -> dict:
    times = []
    for i in range(count):
        begin = time.perf_counter()
        run(i)
        times.append(1e3 * (time.perf_counter() - begin))
    return {"step_ms": statistics.median(times), "step_ms_max": max(times)}


def watch(run: Callable[[int], None], steps: int = 20) -> dict:
    """Host syncs, launches and memory growth of steady steps."""
    import warnings

    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"], torch.cuda.memory_reserved()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for i in range(steps):
            run(i)
        torch.cuda.set_sync_debug_mode("default")
    syncs = sum("called a synchronizing" in str(w.message) for w in caught)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["allocated_bytes.all.current"], torch.cuda.memory_reserved()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run(0)
        torch.cuda.synchronize()
    counts = {e.key: e.count for e in trace.key_averages()}
    launches = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
    return {
        "syncs_per_step": syncs / steps,
        "graph_launches": counts.get("cudaGraphLaunch", 0),
        "kernel_launches": sum(counts.get(name, 0) for name in launches),
        "growth_bytes": sum(after) - sum(before),
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def profile(run: Callable[[], None], rows: int = 45) -> list[str]:
    """Kernels of one step, longest first, with their share."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    kernels = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    lines = [f"{'ms':>9} {'share':>6} {'count':>5}  kernel   (sum {total / 1e3:.1f} ms)"]
    for e in kernels[:rows]:
        share = e.self_device_time_total / total
        lines.append(f"{e.self_device_time_total / 1e3:9.3f} {share:6.1%} {e.count:5}  {e.key[:150]}")
    return lines


def ceilings(shape: "DFlashShape", tokens: int, anchors: int, seconds: float = 3.0) -> dict:
    """A large bf16 matrix product and the step's own matrix products, each alone and sustained."""
    import torch

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")

    a, b = random(8192, 8192), random(8192, 8192)
    matmul = _sustained(partial(torch.mm, a, b), seconds)
    gemms = _sustained(gemm_list(shape, tokens, anchors, random), seconds)
    return {"matmul_tflops": 2 * 8192**3 / matmul / 1e9, "gemm_list_ms": gemms}


def gemm_list(
    shape: "DFlashShape", tokens: int, anchors: int, random: "Callable[..., torch.Tensor]"
) -> Callable[[], None]:
    """Forward, input and weight gradient of every linear layer, and the head by chunks, on buffers of their own."""
    import torch

    H, n = shape.hidden_size, anchors * shape.block_size
    q, kv = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    linears = [(n, H, q + kv), (tokens, H, kv), (n, q, H), (n, H, 2 * shape.intermediate_size)]
    linears.append((n, shape.intermediate_size, H))
    weights = [random(o, i) for _, i, o in linears]
    inputs = [(random(m, i), random(m, o)) for m, i, o in linears]
    taps, fc, f = random(tokens, len(shape.taps) * H), random(H, len(shape.taps) * H), random(tokens, H)
    rows = anchors * (shape.block_size - 1)
    chunk = -(-rows // max(1, round(rows / 4096)))
    x, head = random(chunk, H), random(shape.vocab_size, H)

    def run() -> None:
        for _ in range(shape.num_layers):
            for w, (a, b) in zip(weights, inputs, strict=True):
                torch.mm(a, w.T)
                torch.mm(b, w)
                torch.mm(b.T, a)
        torch.mm(taps, fc.T)
        torch.mm(f.T, taps)
        for i in range(0, rows, chunk):
            part = x[: min(chunk, rows - i)]
            torch.mm(torch.mm(part, head.T), head)

    return run


def _sustained(run: Callable[[], object], seconds: float) -> float:
    """Milliseconds of `run` as one graph, the mean of the second half of `seconds` of replays."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    count = max(4, round(seconds * 500 / begin.elapsed_time(end)))
    for timed in (False, True):
        if timed:
            begin.record()
        for _ in range(count):
            graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def main(options: BenchStepOptions) -> int:
    figures = measure(options)
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:,.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    if options.json:
        options.json.write_text(json.dumps({"options": asdict(options), **figures}, indent=1, default=str) + "\n")
    return 0
