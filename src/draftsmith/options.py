"""Options of the commands, as tyro parses them. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional


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
    """Draft layers; default 5, or 2 for targets of at most 30 layers and 600 hidden units."""
    block: int | None = None
    """Block size; default 16, or 8 on a CPU."""


@dataclass(frozen=True)
class TrainOptions:
    """Trains a recipe; any of its keys may be given as a flag."""

    TAKES_RECIPE: ClassVar[bool] = True
    recipe: Positional[Path]
    """TOML recipe (`draftsmith init` writes one)."""
    run: Path | None = None
    """Run directory; default runs/NAME-OF-RECIPE."""
    resume: bool = False
    """Go on from the newest complete checkpoint in the run directory."""


@dataclass(frozen=True)
class DemoOptions:
    """Converts SmolLM2-135M-Instruct, trains a drafter for it, evaluates and exports it."""

    out: Path = Path("runs/demo")
    """Directory for everything the demo writes; a second call goes on where the first ended."""
    quick: bool = False
    """Fewer prompts and steps: shows every stage in about three minutes, with less acceptance."""
