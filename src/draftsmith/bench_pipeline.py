"""`draftsmith bench pipeline`: whole runs of `draftsmith train` on random weights, in several topologies on one device.

Writes a target of the asked shape (as many layers as a run reads, random weights in bfloat16) and a prepared corpus of
random documents to disk, trains on them through the command line, and reads the figures from each run's own events:
loader, prefill, hand-over, step, update and log are all included, compilation is not. One more colocated run under
torch's profiler gives the share of the time in which the device ran nothing.
"""

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.bench_target import SHAPES
from draftsmith.data.shards import FORMAT, Batch, Manifest, ShardWriter
from draftsmith.errors import UserError
from draftsmith.history import read_run
from draftsmith.run import write_json

Way = Literal["colocated", "split", "threads", "pinned", "two"]
WAYS: dict[Way, dict[str, Any]] = {
    "colocated": {},
    "split": {"targets": 1, "trainers": 1},
    "threads": {"targets": 1, "trainers": 1, "workers": "threads"},
    "pinned": {"targets": 1, "trainers": 1, "transport": "pinned"},
    "two": {"trainers": 2},
}


@dataclass(frozen=True)
class BenchPipelineOptions:
    """Speed of whole training runs on random weights."""

    out: Path = Path("runs/bench_pipeline")
    """Directory for the target (16 GB for qwen3-8b), the corpus and the runs; what is there already is used again."""
    shape: Literal["qwen3-8b", "qwen3-4b", "qwen3-0.6b", "tiny"] = "qwen3-8b"
    ways: tuple[Way, ...] = ("colocated", "split", "threads")
    """split, threads and pinned: one target and one trainer; two: two colocated trainers."""
    tokens: int = 4096
    """Tokens of a unit (T)."""
    anchors: int = 1904
    """Draft blocks of a unit (A); 1,904 are 256 for every 550 tokens."""
    block: int = 16
    mean: int = 550
    """Mean tokens of a document."""
    per_step: int = 4
    """Units per optimizer step."""
    steps: int = 120
    """Optimizer steps of each run."""
    skip: int = 20
    """Steps at a run's start that its figures leave out."""
    save: int = 0
    """Save a checkpoint after so many steps, too, and say how much it held up the run; best a multiple of 10 behind `skip`."""
    idle: bool = True
    """Profile a colocated run for the device's idle share (CUDA)."""
    json: Path | None = None
    """Write the figures to this file too."""


@dataclass(frozen=True)
class Figures:
    """One run after its first steps."""

    way: str
    samples_per_second: float
    tokens_per_second: float
    anchors_per_sample: float
    useful_tflops: float
    trainers_wait: float
    targets_wait: float | None
    bound_by: str
    memory_gib: tuple[float, float]
    """At the first and at the last of the records."""
    loss: tuple[float, float]

    def line(self) -> str:
        wait = "-" if self.targets_wait is None else f"{self.targets_wait:.1%}"
        first, last = self.memory_gib
        return (
            f"{self.way:10} {self.samples_per_second:8.2f} {self.tokens_per_second:10,.0f} {self.anchors_per_sample:8.1f} "
            f"{self.useful_tflops:8.1f} {self.trainers_wait:8.1%} {wait:>8} {first:7.2f} -> {last:.2f} "
            f"{self.loss[0]:7.3f} -> {self.loss[1]:.3f}  {self.bound_by}"
        )


HEAD = (
    "way         samples/s   tokens/s  anchors/s. TFLOP/s  tr.wait  ta.wait   memory GiB       loss           bound by"
)


def main(options: BenchPipelineOptions) -> int:
    """Run and print the table."""
    target, corpus = options.out / f"target_{options.shape}", options.out / f"corpus_{options.mean}"
    if not (target / "config.json").is_file():
        write_target(target, options.shape)
    if not corpus.is_dir():
        write_corpus(corpus, target, options)
    print(HEAD, flush=True)
    figures = []
    for way in options.ways:
        run = train(options, target, corpus, way, options.steps)
        figures.append(figures_of(run, way, options))
        print(figures[-1].line(), flush=True)
        if options.save:
            print(stall(run, options), flush=True)
        shutil.rmtree(run / "checkpoints")  # 12 GB for qwen3-8b
    values: dict[str, Any] = {"options": str(options), "runs": [vars(f) for f in figures]}
    if options.idle:
        first = options.skip + 10
        run = train(options, target, corpus, "colocated", first + 5, f"{first}:{first + 3}")
        values["idle_share"] = idle_share(run)
        print(f"device idle, colocated, steps {first}..{first + 3} under the profiler: {values['idle_share']}")
    if options.json is not None:
        write_json(options.json, values)
    return 0


def train(
    options: BenchPipelineOptions, target: Path, corpus: Path, way: Way, steps: int, profile: str | None = None
) -> Path:
    """One run of `draftsmith train`; its output goes to the terminal when it fails."""
    run = options.out / f"run_{way}{'_profiled' if profile else ''}"
    shutil.rmtree(run, ignore_errors=True)
    layers = SHAPES[options.shape]["num_hidden_layers"]
    recipe = {
        "target": {"model": str(target), "mask_token": vocabulary(options.shape) - 1, "taps": taps_of(layers)},
        "data": {"corpus": str(corpus)},
        "drafter": {"layers": 5, "block": options.block, "init": "random"},
        "unit": {"tokens": options.tokens, "anchors": options.anchors, "per_step": options.per_step},
        "optim": {"steps": steps, "lr": 1e-4},
        "run": {
            "log_every": 10,
            "evaluate_every": 0,
            "evaluate_units": 1,
            "save_every": options.save or 10**9,
            "keep_last": 2 if options.save else 1,
        },
        "topology": WAYS[way],
    }
    written = options.out / f"{run.name}.json"
    write_json(written, {"recipe": recipe})
    argv = [sys.executable, "-m", "draftsmith", "train", str(written), "--run", str(run)]
    out = subprocess.run(
        argv + (["--profile", profile] if profile else []), capture_output=True, text=True, check=False
    )
    if out.returncode != 0:
        raise UserError(f"{way}: exit code {out.returncode}\n{out.stdout[-2000:]}\n{out.stderr[-6000:]}")
    return run


def figures_of(path: Path, way: str, options: BenchPipelineOptions) -> Figures:
    """Means over the records after the skipped steps, weighted by their seconds."""
    run = read_run(path)
    config = json.loads((options.out / f"corpus_{options.mean}" / "report.json").read_text())
    kept = [r for r in run.steps if r["step"] > options.skip]
    seconds = sum(r["seconds"] for r in kept)
    steps = sum(r["steps"] for r in kept)

    def mean(name: str) -> float:
        return sum(r[name] * r["seconds"] for r in kept) / seconds

    samples = mean("tokens_per_second") / config["mean_tokens"]
    anchors = steps * options.per_step * options.anchors * mean("anchors_used_share") / seconds
    memory = [r["memory_bytes"] / 2**30 for r in kept if "memory_bytes" in r] or [0.0]
    return Figures(
        way=way,
        samples_per_second=samples,
        tokens_per_second=mean("tokens_per_second"),
        anchors_per_sample=anchors / samples,
        useful_tflops=mean("useful_tflops"),
        trainers_wait=mean("trainers_wait_share"),
        targets_wait=mean("targets_wait_share") if "targets_wait_share" in kept[-1] else None,
        bound_by=kept[-1]["bound_by"],
        memory_gib=(memory[0], memory[-1]),
        loss=(run.steps[0]["loss"], run.steps[-1]["loss"]),
    )


def stall(path: Path, options: BenchPipelineOptions) -> str:
    """How much longer the steps after the first checkpoint took than as many before it."""
    kept = [r for r in read_run(path).steps if options.skip < r["step"] < 2 * options.save]
    usual = np.median([r["seconds"] / r["steps"] for r in kept if r["step"] <= options.save])
    after = [r for r in kept if r["step"] > options.save]
    longer = sum(r["seconds"] - usual * r["steps"] for r in after)
    size = sum(file.stat().st_size for file in (path / "checkpoints" / f"step_{options.save}").iterdir())
    return (
        f"checkpoint of {size / 1e9:.2f} GB after step {options.save}: the {sum(r['steps'] for r in after)} steps after it "
        f"took {longer:.3f} s longer in all, of {usual:.3f} s each"
    )


def idle_share(run: Path) -> str:
    """1 - the union of everything the device ran / the time from the first of it to the last, from the profile."""
    paths = list((run / "profiles").glob("*.json.gz"))
    if not paths:
        return "no profile was written"
    with gzip.open(paths[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        return "nothing ran on a GPU"
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return f"{1 - busy / (end - spans[0][0]):.2%} of {(end - spans[0][0]) / 1e6:.2f} s"


# The target and the corpus --------------------------------------------------------------------------------------------


def taps_of(layers: int) -> list[int]:
    from draftsmith.drafters.dflash import default_taps

    return list(default_taps(layers, 5))


def vocabulary(shape: str) -> int:
    return SHAPES[shape].get("vocab_size", 151936)


def write_target(directory: Path, shape: str) -> None:
    """Random weights in the Hugging Face layout, one file a layer, up to the one after the last tap: by its input
    transformers itself knows the last tap, with which `draftsmith doctor` compares."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    values = {"head_dim": 128, "vocab_size": vocabulary(shape), **SHAPES[shape]}
    config = Qwen3Config(max_position_embeddings=40960, tie_word_embeddings=False, dtype="bfloat16", **values)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    last = max(taps_of(config.num_hidden_layers))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, size in shapes.items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer <= last + 1:
            files.setdefault(f"layer_{layer}.safetensors" if layer >= 0 else "tables.safetensors", {})[name] = size
    directory.mkdir(parents=True, exist_ok=True)
    where = {}
    for file, sizes in files.items():
        tensors = {}
        for name, size in sizes.items():
            ones = len(size) == 1  # norms
            tensor = torch.ones(size, device=device) if ones else torch.randn(size, device=device) * 0.02
            tensors[name] = tensor.bfloat16().cpu()
        save_file(tensors, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(sizes, file)
    if device == "cuda":
        torch.cuda.empty_cache()  # the runs' memory is read from the device
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_tokenizer(directory)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(directory)  # last: it says that the target is complete


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of two words: the corpus holds ids, so nothing is ever tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)


def write_corpus(out: Path, target: Path, options: BenchPipelineOptions) -> None:
    """Random documents of gamma-distributed lengths; the last three quarters of each are supervised."""
    from draftsmith.data.template import load_tokenizer, tokenizer_hash, vocab_size

    rng = np.random.default_rng(0)
    count = max(256, options.steps * options.per_step * options.tokens // options.mean)
    lengths = np.clip(rng.gamma(4.0, options.mean / 4, count).astype(np.int64), 16, options.tokens)
    writer = ShardWriter(out, "bench")
    for split, part in (("train", lengths), ("held_out", lengths[:8])):
        tokens = rng.integers(2, vocabulary(options.shape) - 2, int(part.sum())).astype(np.int32)
        masks = [np.arange(n) >= n // 4 for n in part]
        anchors = np.array([np.count_nonzero(m[:-1] & m[1:]) for m in masks], np.int32)
        writer.append(split, Batch(tokens, np.concatenate(masks).astype(np.uint8), part, anchors))
    tokenizer = load_tokenizer(target)
    manifest = Manifest(FORMAT, str(target), tokenizer_hash(tokenizer), vocab_size(target, tokenizer), None)
    writer.commit(manifest, {"mean_tokens": float(lengths.mean()), "documents": count}, {})
