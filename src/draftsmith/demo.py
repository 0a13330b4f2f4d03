"""`draftsmith demo`: the whole job on this machine with a small real model, from nothing to a drafter that servers load.

    model -> prompts -> replies -> prepare -> init -> evaluate -> train -> evaluate -> export -> table

Every stage leaves a file or directory that is complete or absent, so a second call goes on where the first one ended.
Each stage calls the same function as the command of its name; the demo has no shortcuts of its own.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.config import Config, load
from draftsmith.demo_display import Display, Stage, result_table
from draftsmith.demo_prompts import demo_prompts
from draftsmith.errors import UserError
from draftsmith.options import DemoOptions

REPLY_BATCH = 64  # prompts that are answered together, and the unit in which replies are kept
FAMILY = "thank-you-notes"


@dataclass(frozen=True)
class Sizes:
    """How much the demo does. Kept with its results; another size does not go on in the same directory."""

    prompts: int
    """Prompts whose replies are trained on, a multiple of REPLY_BATCH."""
    steps: int
    """Optimizer steps."""
    held_out: int
    """Prompts of the trained family that are decoded at the end, and half of them at the beginning."""
    public: int
    """Prompts of each public set."""
    reply_tokens: int = 64
    """Replies, in training and in evaluation, are cut here: later the small model repeats itself, which is easy to draft."""
    tokens: int = 512
    """T of the recipe."""
    anchors: int = 96
    """A of the recipe."""


FULL = Sizes(prompts=1280, steps=300, held_out=32, public=8)
QUICK = Sizes(prompts=128, steps=30, held_out=8, public=2)


@dataclass(frozen=True)
class Job:
    """Where everything lies, and how much of it there is."""

    out: Path
    sizes: Sizes
    cache: Path | None = None

    @property
    def replies(self) -> Path:
        return self.out / "replies.jsonl"

    @property
    def corpus(self) -> Path:
        return self.out / "corpus"

    @property
    def recipe(self) -> Path:
        return self.out / "recipe.toml"

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def drafter(self) -> Path:
        return self.out / "drafter"

    @property
    def untrained(self) -> Path:
        return self.out / "untrained"

    def prompt_files(self) -> list[Path]:
        """The held-out prompts, then the public sets."""
        return [self.out / "prompts" / f"{name}.jsonl" for name in (FAMILY, "humaneval", "mt-bench", "gsm8k")]

    def target(self) -> Path:
        from draftsmith.smollm import smollm_directory

        return smollm_directory(self.cache)

    def config(self) -> Config:
        """The recipe with the demo's sizes, which `draftsmith train` takes as flags."""
        from draftsmith.generate import native_bfloat16

        config, sizes = load(self.recipe), self.sizes
        dtype = "bfloat16" if native_bfloat16() else "float32"  # 1.5 times as fast where the CPU multiplies it
        quarter = max(1, sizes.steps // 4)
        return replace(
            config,
            target=replace(config.target, dtype=dtype),
            unit=replace(config.unit, tokens=sizes.tokens, anchors=sizes.anchors, anchor_rate=None),
            optim=replace(config.optim, steps=sizes.steps),
            run=replace(config.run, evaluate_every=quarter, evaluate_units=1, save_every=quarter),
        )


def main(options: DemoOptions) -> int:
    """Run or go on with the demo; prints the table and the commands that serve the result."""
    summary = run(Job(options.out, QUICK if options.quick else FULL))
    return 0 if summary["identical"] else 1


def run(job: Job) -> dict[str, Any]:
    """All stages; returns the contents of summary.json."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one progress display is enough
    _claim(job)
    display = Display([stage.shown for stage in STAGES])
    with display:
        for stage in STAGES:
            done = stage.done(job)
            display.begin(stage.shown, done)
            if not done:
                display.finish(stage.run(job, display))
    summary = json.loads((job.out / "summary.json").read_text())
    display.output.print(result_table(summary["table"], summary["block_size"]))
    display.note("\n".join([*_closing(summary), "", "serve it:", *summary["commands"]]))
    return summary


def _claim(job: Job) -> None:
    """Refuse to mix two sizes in one directory."""
    file, sizes = job.out / "sizes.json", asdict(job.sizes)
    if file.is_file() and json.loads(file.read_text()) != sizes:
        raise UserError(
            f"{job.out}: holds a demo of another size ({file.name} differs, perhaps --quick); choose another --out"
        )
    job.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(sizes, indent=1))


def _model(job: Job, display: Display) -> str:
    from draftsmith.smollm import SMOLLM_NAME

    display.advance(0.0, "fetching 93 MB if they are not here, converting")
    return f"{SMOLLM_NAME}, in {job.target()}"


def _prompts(job: Job, display: Display) -> str:
    """Held-out prompts of the trained family, and prompts spread evenly over each public set."""
    from draftsmith.smollm import public_prompts

    sets = {FAMILY: [[prompt] for prompt in demo_prompts().held_out[: job.sizes.held_out]]}
    for name, prompts in public_prompts(job.cache).items():
        sets[name] = prompts[:: len(prompts) // job.sizes.public][: job.sizes.public]
    folder = job.out / "prompts"
    temporary = folder.with_name(".prompts")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name, prompts in sets.items():
        lines = [json.dumps({"turns": turns}, ensure_ascii=False) + "\n" for turns in prompts]
        (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    temporary.rename(folder)
    return ", ".join(f"{len(prompts)} {name}" for name, prompts in sets.items())


def _read_replies(job: Job) -> list[str]:
    """Lines of the journal up to the last whole batch; a line cut by an interruption is not whole."""
    if not job.replies.is_file():
        return []
    whole = [line + "\n" for line in job.replies.read_text(encoding="utf-8").split("\n")[:-1]]
    return whole[: len(whole) // REPLY_BATCH * REPLY_BATCH]


def _replies(job: Job, display: Display) -> str:
    """The target's own greedy replies, batch by batch; a line holds the exact tokens and which of them are the reply."""
    from draftsmith.data.template import load_tokenizer
    from draftsmith.generate import Generator, Reply

    kept = _read_replies(job)
    job.replies.write_text("".join(kept), encoding="utf-8")
    prompts = demo_prompts().train[: job.sizes.prompts]
    tokenizer, generator = load_tokenizer(job.target()), Generator.load(job.target())
    answered = len(kept)

    def progress(index: int, reply: Reply) -> None:
        nonlocal answered
        answered += 1
        display.advance(answered / len(prompts), f"{answered} of {len(prompts)}")

    for first in range(len(kept), len(prompts), REPLY_BATCH):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + REPLY_BATCH]]
        ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        replies = generator.generate(ids, job.sizes.reply_tokens, batch=REPLY_BATCH, progress=progress)
        with job.replies.open("a", encoding="utf-8") as journal:
            for prompt, before, reply in zip(prompts[first:], ids, replies, strict=False):
                end = [tokenizer.eos_token_id] if reply.finish == "stop" else []
                row = {
                    "prompt": prompt,
                    "reply": tokenizer.decode(reply.tokens),
                    "finish": reply.finish,
                    "input_ids": before + reply.tokens + end,
                    "loss_mask": [0] * len(before) + [1] * len(reply.tokens + end),
                }
                journal.write(json.dumps(row, ensure_ascii=False) + "\n")
    return f"{len(prompts)} greedy replies of the model, cut at {job.sizes.reply_tokens} tokens"


def _prepare(job: Job, display: Display) -> str:
    from draftsmith.data.options import PrepareOptions
    from draftsmith.data.prepare import prepare

    report = prepare(PrepareOptions((str(job.replies),), str(job.target()), job.corpus, held_out=0.02))
    return report.summary().splitlines()[0]


def _init(job: Job, display: Display) -> str:
    """The recipe, and a checkpoint of the drafter before its first step."""
    from draftsmith import checkpoint
    from draftsmith.drafters.dflash import to_zlab
    from draftsmith.init import write_recipe
    from draftsmith.job import make_drafter
    from draftsmith.options import InitOptions
    from draftsmith.run import provenance

    if not job.recipe.exists():
        write_recipe(InitOptions(str(job.target()), job.corpus, job.recipe))
    config = job.config()
    drafter = make_drafter(config, job.target())
    tensors = {n: t.detach().contiguous() for n, t in to_zlab(dict(drafter.named_parameters()), drafter.shape).items()}
    state = {"format": checkpoint.FORMAT, "step": 0, "drafter": drafter.shape.to_dict(), "recipe": config.to_dict()}
    state |= {"optimizer_step": 0, "acceptance_length": None, "provenance": provenance()}
    job.untrained.mkdir(exist_ok=True)
    checkpoint.write(job.untrained, 0, {"model.safetensors": tensors}, state)
    c = config
    return (
        f"{job.recipe}: {c.drafter.layers} draft layers, blocks of {c.drafter.block}, taps {list(c.target.taps)}, "
        f"{c.optim.steps} steps of {c.unit.tokens} tokens and {c.unit.anchors} blocks"
    )


def _before(job: Job, display: Display) -> str:
    result = _evaluate(job, display, job.untrained, job.prompt_files()[:1], job.sizes.held_out // 2, plain=False)
    _write(job.out / "before.json", result)
    return f"acceptance length {result['all']['acceptance_length']:.2f} on held-out prompts"


def _train(job: Job, display: Display) -> str:
    from draftsmith.checkpoint import list_checkpoints
    from draftsmith.run import EXIT_DONE
    from draftsmith.train import train

    if train(job.config(), job.run, resume=(job.run / "config.json").is_file(), console=display) != EXIT_DONE:
        raise KeyboardInterrupt  # it has saved a checkpoint; the next call goes on from there
    return f"checkpoint {list_checkpoints(job.run)[-1].path}"


def _after(job: Job, display: Display) -> str:
    result = _evaluate(job, display, job.run, job.prompt_files(), None, plain=True)
    _write(job.out / "after.json", result)
    return f"acceptance length {result['sets'][FAMILY]['acceptance_length']:.2f} on held-out prompts"


def _evaluate(
    job: Job, display: Display, drafter: Path, files: list[Path], limit: int | None, plain: bool
) -> dict[str, Any]:
    """In float32 on the CPU, where greedy texts with and without a drafter must be equal."""
    from draftsmith.evaluate import evaluate
    from draftsmith.options import EvaluateOptions

    options = EvaluateOptions(
        drafter, tuple(files), limit=limit, plain=plain, max_new_tokens=job.sizes.reply_tokens, batch=16, dtype="float32",
    )  # fmt: skip
    return evaluate(options, display)


def _export(job: Job, display: Display) -> str:
    from draftsmith.export import export

    export(job.run, job.drafter, "zlab", target=str(job.target()))
    return f"{job.drafter}, loaded back and equal"


def _summary(job: Job, display: Display) -> str:
    from draftsmith.export import serve_commands

    before, after = (json.loads((job.out / f"{name}.json").read_text()) for name in ("before", "after"))
    rows = [{"set": n, "before": before["sets"].get(n), "after": figures} for n, figures in after["sets"].items()]
    summary = {
        "table": rows,
        "block_size": after["block_size"],
        "identical": after["all"]["identical_to_plain_greedy"] == 1.0,
        "speed_up_here": after["all"]["speed_up"],
        "target": str(job.target()),
        "drafter": str(job.drafter.resolve()),
        "commands": serve_commands(str(job.target()), job.drafter.resolve(), "zlab", after["block_size"]),
        "sizes": asdict(job.sizes),
    }
    _write(job.out / "summary.json", summary)
    return str(job.out / "summary.json")


def _closing(summary: dict[str, Any]) -> list[str]:
    """What the table does and does not say."""
    lines = [
        "Greedy texts with the drafter are the model's own, token for token, in float32."
        if summary["identical"]
        else "ERROR: a greedy text with the drafter differs from the model's own; please report it.",
        "The drafter saw notes of the first kind only; the public sets show how little that carries over.",
        f"Speed on this CPU: {summary['speed_up_here']:.2f} x plain decoding. Passes saved turn into time on devices that "
        "verify a block as fast as one token; a CPU does not.",
    ]
    return lines


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True)
class DemoStage:
    """`run` returns what to say of it; `done` says that an earlier call has completed it."""

    shown: Stage
    run: Callable[[Job, Display], str]
    done: Callable[[Job], bool]


def _trained(job: Job) -> bool:
    from draftsmith.checkpoint import list_checkpoints

    return any(found.step == job.sizes.steps for found in list_checkpoints(job.run))


STAGES = (  # weights: seconds on 2 quiet cores (records/demo.md)
    DemoStage(Stage("model", 10), _model, lambda job: False),
    DemoStage(Stage("prompts", 1), _prompts, lambda job: (job.out / "prompts").is_dir()),
    DemoStage(Stage("replies", 200), _replies, lambda job: len(_read_replies(job)) >= job.sizes.prompts),
    DemoStage(Stage("prepare", 5), _prepare, lambda job: job.corpus.is_dir()),
    DemoStage(Stage("init", 3), _init, lambda job: (job.untrained / "checkpoints" / "step_0").is_dir()),
    DemoStage(Stage("evaluate before", 40), _before, lambda job: (job.out / "before.json").is_file()),
    DemoStage(Stage("train", 300), _train, _trained),
    DemoStage(Stage("evaluate after", 100), _after, lambda job: (job.out / "after.json").is_file()),
    DemoStage(Stage("export", 5), _export, lambda job: job.drafter.is_dir()),
    DemoStage(Stage("table", 1), _summary, lambda job: (job.out / "summary.json").is_file()),
)
