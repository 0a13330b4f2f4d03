"""The command line. Imports no torch: each command's options and code are imported when it is called."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from draftsmith import __version__
from draftsmith.errors import UserError


@dataclass(frozen=True)
class Command:
    """One row of the table: `options` is a dataclass that tyro parses, `run` takes it and returns an exit code or None."""

    summary: str
    options: str
    run: str


COMMANDS = {
    "demo": Command("the whole job on this machine with a small real model", "options:DemoOptions", "demo:main"),
    "init": Command("write a recipe for a target and a corpus", "options:InitOptions", "init:main"),
    "prepare": Command("conversations -> token shards", "data.options:PrepareOptions", "data.prepare:main"),
    "regenerate": Command(
        "replace assistant turns by the target's own replies", "data.options:RegenerateOptions", "data.regenerate:main"
    ),
    "plan": Command("predict memory, time and the best topology", "options:PlanOptions", "plan:main"),
    "doctor": Command("prove a recipe in its topology before it is paid for", "options:DoctorOptions", "doctor:main"),
    "train": Command("train a recipe", "options:TrainOptions", "train:main"),
    "bench step": Command("speed of the training step, with its ceilings", "bench:BenchStepOptions", "bench:main"),
    "bench target": Command(
        "speed of the prefill, with its ceilings", "bench_target:BenchTargetOptions", "bench_target:main"
    ),
    "bench pipeline": Command(
        "speed of whole runs on random weights", "bench_pipeline:BenchPipelineOptions", "bench_pipeline:main"
    ),
    "stop": Command("ask a run to checkpoint and end", "options:StopOptions", "launch:stop"),
    "evaluate": Command("draft-and-verify decoding: acceptance length", "options:EvaluateOptions", "evaluate:main"),
    "export": Command("write a layout that servers load", "options:ExportOptions", "export:main"),
    "status": Command("how a run stands, for people or as JSON", "status:StatusOptions", "status:main"),
    "watch": Command("follow runs live in the terminal", "watch:WatchOptions", "watch:main"),
    "report": Command("one HTML page with a run's plots, or several runs'", "report:ReportOptions", "report:main"),
    "trace": Command("all workers' spans for Perfetto", "trace:TraceOptions", "trace:main"),
    "sink": Command("hand a run's metrics to TensorBoard or W&B", "sinks:SinkOptions", "sinks:main"),
}


def main(argv: list[str] | None = None) -> None:
    """Entry point of `draftsmith` and `python -m draftsmith`; exits with 0, 1 (failed), 2 (user's mistake) or 3 (stopped)."""
    try:
        try:
            command_line(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def command_line(argv: list[str]) -> None:
    """One command line, to its exit."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if argv else 2)
    if argv[0] == "--version":
        print(f"draftsmith {__version__}")
        sys.exit(0)
    if argv[0] == "bench":
        argv = [" ".join(argv[:2]), *argv[2:]]
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        print(f"draftsmith: no command {argv[0]!r}" + (f"; did you mean {near[0]}?" if near else ""), file=sys.stderr)
        print(f"commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(call(argv[0], argv[1:]) or 0)
    except UserError as error:
        print(f"draftsmith {argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"draftsmith {argv[0]}: interrupted", file=sys.stderr)
        sys.exit(130)


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        f"draftsmith trains DFlash drafters for speculative decoding.\n\nusage: draftsmith COMMAND ...\n\n{rows}\n\n"
        + ("`draftsmith COMMAND --help` lists its options.")
    )


def call(name: str, argv: list[str]) -> int | None:
    """Parse one command's options and run it. What `options` does not know goes to the recipe (train --optim.lr 1e-3)."""
    import tyro

    command = COMMANDS[name]
    options_type, run = load(command.options), command.run
    takes_recipe = getattr(options_type, "TAKES_RECIPE", False)
    if not takes_recipe:
        options = tyro.cli(options_type, args=argv, prog=f"draftsmith {name}", description=command.summary)
        return load(run)(options)
    options, config = parse_recipe(options_type, argv, f"draftsmith {name}", command.summary)
    return load(run)(options, config)


def parse_recipe(options_type: type, argv: list[str], prog: str, summary: str) -> tuple[Any, Any]:
    """RECIPE [options] [--section.key value ...] -> (options, checked Config)."""
    import tyro

    from draftsmith import config

    if "--help" in argv or "-h" in argv:
        recipe, default = None, config.Config(config.TargetConfig("MODEL"), config.DataConfig("CORPUS"))
    elif not argv or argv[0].startswith("-"):
        raise UserError(f"the recipe comes first: {prog} RECIPE [--key value ...]")
    else:
        recipe, default = argv[0], config.load(Path(argv[0]))

    @dataclass(frozen=True)
    class Arguments:
        options: Annotated[options_type, tyro.conf.arg(name="")]
        recipe_keys: Annotated[config.Config, tyro.conf.arg(name="")] = default

    parsed = tyro.cli(Arguments, args=argv, prog=prog, description=summary)
    values = config.anchor_paths(parsed.recipe_keys.to_dict(), Path())  # those of flags are relative to here
    return parsed.options, config.from_dict(values, f"{recipe} with flags")


def load(place: str) -> Callable[..., Any]:
    """ "module:name" below draftsmith -> the object."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"draftsmith.{module}"), name)


if __name__ == "__main__":
    main()
