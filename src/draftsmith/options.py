"""Options of the commands, as tyro parses them. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class InitOptions:
    """Writes a recipe; every choice stands in it with its reason."""

    target: Positional[str]
    """Directory in Hugging Face layout, or a hub id."""
    corpus: Positional[Path]
    """Directory written by `draftsmith prepare`."""
    out: Path = Path("recipe.toml")
    """Recipe to write; an existing file is not overwritten."""
    revision: str | None = None
    """Hub revision of the target."""
    layers: int | None = None
    """Draft layers; default 5, or 2 on a CPU."""
    block: int | None = None
    """Block size; default 16, or 8 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model; the recipe then does so too."""


@dataclass(frozen=True)
class RunOptions:
    """What a run's launcher and its workers take alike."""

    TAKES_RECIPE: ClassVar[bool] = True
    recipe: Positional[Path]
    """TOML recipe (`draftsmith init` writes one)."""
    run: Annotated[Path | None, arg(aliases=["--run-directory"])] = None
    """Run directory; default runs/NAME-OF-RECIPE. (torchrun takes --run for an option of its own.)"""
    resume: bool = False
    """Go on from the newest complete checkpoint in the run directory."""
    profile: str | None = None
    """FIRST:LAST: profile these steps of the first trainer, counted from 1 (`draftsmith trace` shows them)."""


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Trains a recipe; any of its keys may be given as a flag."""

    detach: bool = False
    """Train in the background; `status`, `watch` and `stop` work on the run directory."""
    restarts: int = 0
    """Start again so many times from the newest checkpoint when a worker fails."""
    hosts: str = "1"
    """Hosts that train together, "2", or with "1:2" as many as are there; run the same command on each."""
    rendezvous: str | None = None
    """HOST:PORT of one of the hosts, where they meet; needed with several hosts."""
    topology: Literal["recipe", "auto"] = "recipe"
    """auto: the fastest that fits, as `draftsmith plan` measures it on this machine, instead of the recipe's."""
    unchecked: bool = False
    """Train even if the quick half of `draftsmith doctor`, which runs first, finds something wrong."""


@dataclass(frozen=True)
class WorkerOptions(RunOptions):
    """One worker process of a recipe; torchrun or `draftsmith train` starts it."""

    launcher: int | None = None
    """Process id of the launcher, which the worker must not outlive; default: whatever process started it."""


@dataclass(frozen=True)
class StopOptions:
    """Asks a run to checkpoint and end after the step it is at."""

    run: Positional[Path]
    """Run directory."""
    wait: bool = False
    """Return when the run has ended."""


@dataclass(frozen=True)
class DemoOptions:
    """Converts SmolLM2-135M-Instruct, trains a drafter for it, evaluates and exports it."""

    out: Path = Path("runs/demo")
    """Directory for everything the demo writes; a second call goes on where the first ended."""
    quick: bool = False
    """Fewer prompts and steps: shows every stage in about three minutes, with less acceptance."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Decodes prompts with and without the drafter and reports how many of its tokens the target accepts."""

    drafter: Positional[Path]
    """Run directory (its best checkpoint), checkpoint, or exported drafter."""
    prompts: tuple[Path, ...]
    """Files of JSON lines {"turns": ["first question", "second question", ...]}."""
    target: str | None = None
    """Directory or hub id of the target; default: the one the drafter was trained for."""
    revision: str | None = None
    """Hub revision of the target."""
    out: Path | None = None
    """JSON file for all figures and texts; default, for a run directory: a new file in its evaluations/."""
    max_new_tokens: int = 256
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0: greedy. Above: rejection sampling, which follows the target's distribution at this temperature."""
    seed: int = 0
    """Of the random draws, used at a temperature above 0."""
    batch: int = 8
    """Prompts decoded together."""
    limit: int | None = None
    """Only the first prompts of each file."""
    block: int | None = None
    """Block size, at most the trained one."""
    plain: bool = True
    """Also decode without the drafter, to compare texts and speed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU. Only float32 makes greedy outputs exactly comparable."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class ExportOptions:
    """Writes a drafter in the layout of a server, loads it back and compares."""

    source: Positional[Path]
    """Run directory (its best checkpoint), checkpoint, or exported drafter."""
    to: Literal["zlab", "speculators"] = "zlab"
    """zlab: for vLLM, SGLang and z-lab's package. speculators: for vLLM by the directory alone; holds the head, too."""
    out: Path | None = None
    """Directory to write; default SOURCE/export/LAYOUT. An existing one is not overwritten."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the written weights."""
    target: str | None = None
    """Directory or hub id of the target; default: the one the drafter was trained for."""
    revision: str | None = None
    """Hub revision of the target."""


@dataclass(frozen=True)
class PlanOptions:
    """Predicts memory, disk, steps and time of a recipe and ranks topologies, before anything is loaded."""

    TAKES_RECIPE: ClassVar[bool] = True
    recipe: Positional[Path]
    """TOML recipe (`draftsmith init` writes one)."""
    device: str | None = None
    """Plan for this card by the built-in rates (h200, h100, a100-80gb, rtx4090 ...) instead of the devices here."""
    count: int | None = None
    """Devices of one host; default: those here, or 1."""
    measure: bool = True
    """Time both roles for a few units where the devices are here."""
    json: bool = False
    """Print everything as JSON."""


@dataclass(frozen=True)
class DoctorOptions:
    """Runs the recipe's real workers for a few units and says, line by line, whether the run can be trusted."""

    TAKES_RECIPE: ClassVar[bool] = True
    recipe: Positional[Path]
    """TOML recipe (`draftsmith init` writes one)."""
    run: Path | None = None
    """Run directory that will be trained in, which gets doctor.json; default runs/NAME-OF-RECIPE."""
    json: bool = False
    """Print the verdicts as JSON."""
