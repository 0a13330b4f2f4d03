"""Every knob of a run: frozen dataclasses, read from a TOML recipe, overridden by dotted flags, checked. Imports no torch.

A recipe is strict: an unknown or misspelt key is an error that names the file and suggests the nearest key.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from draftsmith.errors import UserError

Mode = Literal["auto", "eager", "compile", "reduce-overhead", "graph"]
SinkName = Literal["tensorboard", "wandb"]

# A slip of the finger must not ask for memory or threads that no machine has; other numbers end at 2^53.
MOST = {
    "drafter.layers": 256, "drafter.block": 1024, "unit.tokens": 2**24 - 1, "unit.anchors": 2**20, "unit.per_step": 2**16,
    "optim.lr": 1000, "optim.epochs": 1000, "optim.steps": 10**9, "run.save_minutes": 10**7, "run.time_limit": 10**7,
    "topology.first_patience": 10**8, "topology.patience": 10**8, "run.threads": 1024,
    "topology.targets": 1024, "topology.trainers": 1024, "topology.slots": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class TargetConfig:
    """The frozen LLM."""

    model: str
    """Directory in Hugging Face layout, or a hub id."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    taps: tuple[int, ...] = ()
    """0-based decoder layers whose output conditions the drafter, in order. Empty: z-lab's rule for `drafter.layers` taps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of the prefill. auto: bfloat16 on CUDA, float32 on CPU."""
    mask_token: int | None = None
    """Id of the mask token, a vocabulary row that no text uses. Required for training; `init` finds one."""
    chat_template: str | None = None
    """File with a chat template that replaces the model's own."""
    template_options: dict[str, bool | int | str] = field(default_factory=dict)
    """Options given to the chat template, e.g. enable_thinking; part of the export's metadata."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model."""


@dataclass(frozen=True)
class DataConfig:
    """The prepared corpus."""

    corpus: str
    """Directory written by `draftsmith prepare`."""


@dataclass(frozen=True)
class DrafterConfig:
    """The trained model."""

    kind: Literal["dflash"] = "dflash"
    layers: int = 5
    """Draft layers (D)."""
    block: int = 16
    """Block size (B): the anchor and B-1 drafted tokens."""
    init: Literal["random", "target"] = "target"
    """Start from random weights, or from copies of the target's last layers where shapes fit."""
    window: int | None = None
    """Sliding window in tokens of the layers listed in `sliding_layers`."""
    sliding_layers: tuple[int, ...] = ()
    """Draft layers with sliding attention (causal inside the block); the others attend fully."""


@dataclass(frozen=True)
class UnitConfig:
    """The fixed shape of a unit (one packed row)."""

    tokens: int = 4096
    """Tokens of a row (T)."""
    anchors: int = 1024
    """Draft blocks of a row (A)."""
    anchor_rate: float | None = None
    """Anchors that a supervised token asks for when rows are packed, 0 < rate <= 1; None: what fills T and A alike."""
    per_step: int = 1
    """Units per optimizer step over all trainers (G)."""


@dataclass(frozen=True)
class LossConfig:
    """How slots of a block are weighted."""

    weighting: Literal["decay", "dpace"] = "decay"
    gamma: float = 7.0
    """decay: weight exp(-(k-1)/gamma) of slot k; the paper takes 7, 5, 4 for B = 16, 10, 8. 0: no decay."""
    alpha: float = 0.5
    """dpace: smoothing of the confidences."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW on float32 masters."""

    lr: float = 6e-4
    steps: int | None = None
    """Optimizer steps; None: as many as `epochs` give."""
    epochs: float = 6.0
    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine: warm-up, then a half cosine to min_lr_ratio. wsd: warm-up, constant, then linear decay."""
    warmup: float = 0.04
    """Share of the steps that warm up."""
    decay: float = 0.2
    """wsd: share of the steps that decay at the end."""
    min_lr_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only; norm weights never decay."""
    clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    max_skipped: int = 10
    """The run ends at a log step before which at least so many updates in a row were skipped: not finite, or nothing scored."""


@dataclass(frozen=True)
class RunConfig:
    """How and where the run is carried out."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Mode = "auto"
    """eager, compile, reduce-overhead or graph. auto: graph on CUDA, eager on CPU."""
    threads: int = 0
    """Intra-op CPU threads of a worker; 0: the host's CPUs shared out among its workers. Part of bitwise equality."""
    checkpoint_activations: bool = False
    """Recompute draft layers in the backward pass to save memory."""
    log_every: int = 10
    evaluate_every: int = 200
    """Steps between evaluations on held-out units; 0: never."""
    evaluate_units: int = 2
    save_every: int = 400
    """Steps between checkpoints; the last step always saves. A checkpoint knows its acceptance length, and may be the
    best one, where its step evaluates too: take a multiple of `evaluate_every`."""
    save_minutes: float = 0.0
    """Minutes between checkpoints, besides `save_every`; 0: by steps alone."""
    keep_last: int = 2
    """Checkpoints kept, besides the best one."""
    stop_after: int = 0
    """Checkpoint and end after this step, as a stop by hand would; 0: go on to the end."""
    time_limit: float = 0.0
    """Checkpoint and end after so many minutes, as a stop by hand would; 0: no limit."""
    sinks: tuple[SinkName, ...] = ()
    """Tools that the run's metrics go to while it runs, each in a process of its own: tensorboard, wandb (offline)."""


@dataclass(frozen=True)
class TopologyConfig:
    """The workers of each host. Losses do not depend on it (docs/operations.md says how exactly)."""

    targets: int = 0
    """Target workers, which only prefill; 0: colocated, every trainer prefills its own units."""
    trainers: int = 0
    """Trainer workers; 0: one for each device that no target has (one on a CPU)."""
    devices: tuple[int, ...] = ()
    """CUDA devices given to the targets, then to the trainers, over again if there are more workers; empty: all."""
    workers: Literal["processes", "threads"] = "processes"
    """threads: all workers of a host in one process, for notebooks and debugging."""
    slots: int = 3
    """Units that a target may be ahead; each takes tokens x taps x hidden size of the target's memory."""
    transport: Literal["auto", "pinned"] = "auto"
    """auto: trainers read the targets' GPU memory. pinned: through host memory, where GPUs refuse peer access."""
    first_patience: float = 3600.0
    """Seconds a worker waits for another until the first step is done (loading, compiling)."""
    patience: float = 600.0
    """Seconds a worker waits for another after the first step."""


@dataclass(frozen=True)
class Config:
    """A recipe."""

    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    unit: UnitConfig = field(default_factory=UnitConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def load(path: Path) -> Config:
    """Read and check a TOML recipe; relative paths in it are relative to the recipe's own directory, and become absolute.

    A .json file is a resolved recipe as a run directory's config.json holds it; its paths are taken as they stand.
    """
    if path.suffix == ".json":
        return from_dict(read_resolved(path), str(path))
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; `draftsmith init TARGET CORPUS` writes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot be read as TOML: {error}") from None
    return from_dict(anchor_paths(values, path.parent), str(path))


def read_resolved(path: Path) -> dict[str, Any]:
    """The nested dict under "recipe" of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as a resolved recipe: {error!r}") from None


def from_dict(values: dict[str, Any], source: str) -> Config:
    """Validate a nested dict; `source` names it in errors."""
    _check_keys(values, Config, source, "")
    try:
        config = _ADAPTER.validate_json(json.dumps(values, default=str))  # lists become tuples, nothing else changes
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}: {where}: {first['msg']}, got {first.get('input')!r}") from None
    check(config, source)
    return config


def check(config: Config, source: str) -> None:
    """What types cannot say."""
    c = config
    rules = [
        (bool(c.target.model), "target.model", "is empty; name a directory in Hugging Face layout, or a hub id"),
        (c.target.chat_template != "", "target.chat_template", "is empty; name a file, or leave the key out"),
        (bool(c.data.corpus), "data.corpus", "is empty; name a directory that `draftsmith prepare` wrote"),
        (c.drafter.layers >= 1, "drafter.layers", "must be at least 1"),
        (c.drafter.window is None or c.drafter.window >= 1, "drafter.window", "must be at least 1"),
        (c.drafter.block >= 2, "drafter.block", "must be at least 2 (the anchor and one drafted token)"),
        (c.unit.tokens >= 16, "unit.tokens", "must be at least 16"),
        (c.unit.anchors >= 1, "unit.anchors", "must be at least 1"),
        (c.unit.anchor_rate is None or 0 < c.unit.anchor_rate <= 1, "unit.anchor_rate", "must be in (0, 1]"),
        (c.unit.per_step >= 1, "unit.per_step", "must be at least 1"),
        (c.loss.gamma >= 0, "loss.gamma", "must not be negative"),
        (0 <= c.loss.alpha <= 1, "loss.alpha", "must be in [0, 1]"),
        (c.optim.lr > 0, "optim.lr", "must be positive"),
        (c.optim.steps is None or c.optim.steps >= 1, "optim.steps", "must be at least 1"),
        (c.optim.epochs > 0, "optim.epochs", "must be positive"),
        (0 <= c.optim.warmup < 1, "optim.warmup", "is a share of the steps, in [0, 1)"),
        (0 <= c.optim.decay <= 1, "optim.decay", "is a share of the steps, in [0, 1]"),
        (0 <= c.optim.min_lr_ratio <= 1, "optim.min_lr_ratio", "must be in [0, 1]"),
        (all(0 <= b < 1 for b in c.optim.betas), "optim.betas", "must be in [0, 1)"),
        (c.optim.eps > 0, "optim.eps", "must be positive"),
        (c.optim.weight_decay >= 0, "optim.weight_decay", "must not be negative"),
        (c.optim.clip >= 0, "optim.clip", "must not be negative"),
        (c.optim.max_skipped >= 1, "optim.max_skipped", "must be at least 1"),
        (c.run.threads >= 0, "run.threads", "must not be negative"),
        (c.run.log_every >= 1, "run.log_every", "must be at least 1"),
        (c.run.evaluate_every >= 0, "run.evaluate_every", "must not be negative"),
        (c.run.evaluate_units >= 1, "run.evaluate_units", "must be at least 1"),
        (c.run.save_every >= 1, "run.save_every", "must be at least 1"),
        (c.run.keep_last >= 1, "run.keep_last", "must be at least 1"),
        (c.run.stop_after >= 0, "run.stop_after", "must not be negative"),
        (c.run.save_minutes >= 0, "run.save_minutes", "must not be negative"),
        (c.run.time_limit >= 0, "run.time_limit", "must not be negative"),
        (len(set(c.run.sinks)) == len(c.run.sinks), "run.sinks", "names a sink twice"),
        (c.topology.targets >= 0, "topology.targets", "must not be negative"),
        (c.topology.trainers >= 0, "topology.trainers", "must not be negative"),
        (all(d >= 0 for d in c.topology.devices), "topology.devices", "must not be negative"),
        (c.topology.slots >= 1, "topology.slots", "must be at least 1; 3 let a target work ahead"),
        (c.topology.patience > 0, "topology.patience", "must be positive"),
        (c.topology.first_patience > 0, "topology.first_patience", "must be positive"),
        (
            not c.drafter.sliding_layers or bool(c.drafter.window),
            "drafter.window",
            "is needed by drafter.sliding_layers",
        ),
        (
            all(0 <= i < c.drafter.layers for i in c.drafter.sliding_layers),
            "drafter.sliding_layers",
            f"must be layers 0..{c.drafter.layers - 1}",
        ),
        *((abs(value) <= most, key, f"must be at most {most}") for key, value, most in _numbers(c)),
    ]
    for good, key, message in rules:
        if not good:
            raise UserError(f"{source}: {key} {message}")


def _numbers(config: Config) -> Iterator[tuple[str, int | float, int]]:
    """Every key that holds a number, its value, and the most it may be."""
    for name, section in config.to_dict().items():
        for key, value in section.items():
            if isinstance(value, int | float):
                yield f"{name}.{key}", value, MOST.get(f"{name}.{key}", 2**53)


def config_hash(config: Config) -> str:
    """Identifies the resolved recipe in messages and checkpoints (sha256, 16 hex digits)."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def anchor_paths(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """A recipe whose paths are absolute: they are written relative to `base`. A target stays as is, since it may be a hub
    id, unless that directory exists."""
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for section, key in (("data", "corpus"), ("target", "model"), ("target", "chat_template")):
        of = values.get(section)
        if isinstance(of, dict) and isinstance(of.get(key), str) and of[key]:
            path = (base / Path(of[key]).expanduser()).resolve()
            if key != "model" or path.is_dir():
                of[key] = str(path)
    return values


def _check_keys(values: dict[str, Any], cls: type, source: str, prefix: str) -> None:
    known = {f.name: f for f in fields(cls)}
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or [p for p in _all_keys(Config) if p.endswith(f".{key}")]
            hint = f"; did you mean {prefix if near[0] in known else ''}{near[0]}?" if near else ""
            raise UserError(f"{source}: unknown key {prefix}{key}{hint} (known here: {', '.join(known)})")
        if is_dataclass(hints[key]) and isinstance(value, dict):
            _check_keys(value, hints[key], source, f"{prefix}{key}.")


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    out = []
    for name, hint in get_type_hints(cls).items():
        out += _all_keys(hint, f"{prefix}{name}.") if is_dataclass(hint) else [prefix + name]
    return out


def _strict(cls: type) -> TypeAdapter:
    """pydantic validation of plain dataclasses: no unknown keys, finite numbers, nothing taken for another type."""
    for hint in get_type_hints(cls).values():
        if is_dataclass(hint):
            _strict(hint)
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return TypeAdapter(cls)


_ADAPTER = _strict(Config)
