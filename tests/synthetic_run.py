"""Run directories written through the event log, with invented but plausible numbers, for tests of what reads them."""

import json
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from draftsmith.events import EvaluationRecord, EventLog, StepRecord

START = 1_750_000_000.0  # seconds since the epoch


class Clock:
    """Replaces the clocks, so that hours of a run are written in a moment."""

    def __init__(self) -> None:
        self.now_ns = int(START * 1e9)
        self._wall_ns = 0

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def set_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock; the monotonic clock goes on."""
        self._wall_ns += int(seconds * 1e9)

    def time_ns(self) -> int:
        return self.now_ns + self._wall_ns

    def monotonic_ns(self) -> int:
        return self.now_ns - int(1e15)


@contextmanager
def invented_time() -> Iterator[Clock]:
    clock = Clock()
    with (
        patch("draftsmith.events.time.time_ns", clock.time_ns),
        patch("draftsmith.events.time.monotonic_ns", clock.monotonic_ns),
    ):
        yield clock


ABOUT = {
    "device": "Invented GPU",
    "corpus": {
        "counts": {"rows_in": 1210, "kept": 1204, "rejected": {"too_long": 4, "no_supervised_token": 2}},
        "histogram": {"64": 31, "128": 214, "256": 402, "512": 391, "1024": 133, "2048": 33},
    },
}


def step_record(step: int, total: int, every: int, seconds: float, noise: random.Random, level: float) -> StepRecord:
    """A log step somewhere on an invented course."""
    part = step / total
    loss = 2.1 + 6.5 * math.exp(-7 * part) - 0.3 * level + noise.gauss(0, 0.06)
    first = 0.82 * (1 - math.exp(-6 * part)) + 0.01 * level
    rate = 61_000 * level + noise.gauss(0, 900)
    return StepRecord(
        step=step,
        loss=loss,
        block_acceptance=1 + 2.4 * (1 - math.exp(-4 * part)),
        slot_accuracy=[first * 0.86**k for k in range(7)],
        lr=6e-4 * min(1.0, part / 0.04) * (0.5 + 0.5 * math.cos(math.pi * part)),
        gradient_norm=0.4 + 3 * math.exp(-9 * part) + abs(noise.gauss(0, 0.05)),
        skipped_updates=int(part > 0.3),
        steps=every,
        seconds=seconds,
        tokens_per_second=rate,
        block_tokens_per_second=rate * 4,
        useful_tflops=rate / 61_000 * 248,
        ceiling_tflops=612.0,
        tokens_used_share=0.985,
        anchors_used_share=0.97,
        memory_bytes=int((37 + 0.4 * min(1, 30 * part)) * 2**30),
        memory_total_bytes=80 * 2**30,
        gpu_utilisation_percent=min(100.0, 96 + noise.gauss(0, 1.5)),
        power_watts=612 + noise.gauss(0, 15),
        recompiles=0,
        replays=step * 8,
    )


def write_run(path: Path, total: int = 600, every: int = 5, level: float = 1.0, split: bool = True) -> Path:
    """A finished run: trainer and (if `split`) two target workers, evaluations, notes, a decoded evaluation."""
    noise = random.Random(total)
    path.mkdir(parents=True)
    write_config(path, lr=6e-4 * level)
    with invented_time() as clock:
        trainer = EventLog(path, "trainer" if split else "both", total_steps=total, about=ABOUT, host="box")
        targets = [EventLog(path, "target", index=i, host="box") for i in range(2 if split else 0)]
        trainer.note("600 steps of 8 x 4096 tokens and 1024 blocks of 8; 41.3 M trained parameters on cuda:0")
        clock.sleep(21.0)
        for step in range(every, total + 1, every):
            begin = clock.now_ns
            for unit in range((step - every) * 2, step * 2):
                _unit(trainer, targets, clock, unit, noise)
            trainer.step(step_record(step, total, every, (clock.now_ns - begin) / 1e9, noise, level))
            for target in targets:
                target.flush()
            if step % (total // 12) == 0:
                with trainer.span("evaluate", step=step):
                    clock.sleep(2.0)
                trainer.evaluation(evaluation_record(step, total, level))
            if step % (total // 3) == 0:
                with trainer.span("checkpoint", step=step):
                    clock.sleep(0.8)
                _checkpoint(path, step)
        for log in (trainer, *targets):
            log.close()
    return path


def _unit(trainer: EventLog, targets: list[EventLog], clock: Clock, unit: int, noise: random.Random) -> None:
    at = clock.monotonic_ns()
    seconds = 0.10 + abs(noise.gauss(0, 0.006))
    wait = 0.012 + abs(noise.gauss(0, 0.008)) if targets else 0.0
    for i, target in enumerate(targets):
        if unit % len(targets) == i:
            target.add_span("prefill", at - int(0.15e9), at + int((seconds - 0.05) * 1e9), unit=unit)
            target.add_span("wait_slot", at - int(0.17e9), at - int(0.15e9), unit=unit)
    if targets:
        with trainer.span("wait_taps", unit=unit):
            clock.sleep(wait)
    else:
        with trainer.span("prefill", unit=unit):
            clock.sleep(0.03)
    with trainer.span("step", unit=unit):
        clock.sleep(seconds)
    if unit % 2:
        with trainer.span("update", unit=unit):
            clock.sleep(0.006)


def write_long_run(path: Path, steps: int) -> None:
    """Every step logged, with two spans each. The lines are made once and numbered, to be quick."""
    noise = random.Random(0)
    with invented_time() as clock:
        log = EventLog(path, total_steps=steps, host="box")
        for name, seconds in (("prefill", 0.02), ("step", 0.08)):
            with log.span(name, unit=1):
                clock.sleep(seconds)
        log.step(step_record(1, steps, 1, 0.1, noise, 1.0))
    *head, prefill, step, busy, record = log.path.read_text().splitlines()
    starts = [json.loads(line)["start"] for line in (prefill, step)]
    moments = [json.loads(line)["t"] for line in (busy, record)]
    with log.path.open("w") as file:
        file.write("\n".join(head) + "\n")
        for i in range(steps):
            for line, key, at in ((prefill, "start", starts[0]), (step, "start", starts[1]), (busy, "t", moments[0])):
                file.write(line.replace(f'"{key}":{at}', f'"{key}":{at + 0.1 * i:.6f}') + "\n")
            moved = record.replace(f'"t":{moments[1]}', f'"t":{moments[1] + 0.1 * i:.6f}')
            file.write(moved.replace('"step":1,', f'"step":{i + 1},') + "\n")


def evaluation_record(step: int, total: int, level: float) -> EvaluationRecord:
    part = step / total
    first = 0.80 * (1 - math.exp(-5 * part)) * (0.9 + 0.1 * level)
    positions = [first * 0.84**k for k in range(7)]
    return EvaluationRecord(
        step=step,
        acceptance_length=1 + sum(positions) * 0.97,
        acceptance_length_micro=1 + sum(positions),
        acceptance_per_position=positions,
        responses=48,
        cycles=1800,
        loss=2.3 + 5 * math.exp(-6 * part),
    )


def write_config(path: Path, lr: float = 6e-4) -> None:
    recipe = {
        "target": {"model": "SmolLM2-135M-Instruct", "taps": [1, 8, 15, 22, 28], "mask_token": 3},
        "data": {"corpus": "corpora/chat"},
        "drafter": {"kind": "dflash", "layers": 2, "block": 8},
        "unit": {"tokens": 4096, "anchors": 1024, "per_step": 8},
        "optim": {"lr": lr, "steps": 600, "betas": [0.9, 0.999]},
        "run": {"seed": 0, "mode": "graph"},
    }
    provenance = {
        "versions": {"draftsmith": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "python": "3.12.4",
        "machine": "Linux x86_64, 16 CPUs",
        "host": "box",
        "git": "f1e75c3",
        "argv": ["draftsmith", "train", "recipe.toml"],
    }
    (path / "config.json").write_text(json.dumps({"recipe": recipe, "attempt": 0, "provenance": provenance}))


def _checkpoint(path: Path, step: int) -> None:
    directory = path / "checkpoints" / f"step_{step}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text("{}")


def dead_pid() -> int:
    """The number of a process that has ended and been waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


ANSWER = (
    "Photosynthesis is the process by which plants turn light into chemical energy. In the leaves, chlorophyll absorbs "
    "sunlight and uses it to split water; the oxygen leaves the plant, and the hydrogen joins carbon dioxide to form sugar. "
    "The plant burns part of that sugar at night and stores the rest as starch.\n\nIn short:\n\n1. Light is absorbed.\n"
    "2. Water is split into oxygen and hydrogen.\n3. Carbon dioxide becomes sugar."
)
QUESTIONS = (
    "How does photosynthesis work? <b>Keep it short.</b>",
    "Explain to a child why leaves are green & not blue.",
)


def write_evaluation(path: Path) -> None:
    """evaluations/evaluation_001.json as `draftsmith evaluate` writes it, with texts cut at invented places."""
    noise = random.Random(5)
    samples = [_sample(name, question, noise) for name in ("chat", "code") for question in QUESTIONS]
    figures = {
        "answers": 2, "tokens": 176, "target_passes": 52, "acceptance_length": 3.41, "acceptance_length_vllm": 3.39,
        "acceptance_per_position": [0.74, 0.58, 0.43, 0.30, 0.19, 0.10, 0.05], "target_passes_saved": 0.70,
        "identical_to_plain_greedy": 1.0, "tokens_per_second": 88.2, "tokens_per_second_plain": 41.0, "speed_up": 2.15,
    }  # fmt: skip
    code = {**figures, "acceptance_length": 4.02, "acceptance_length_vllm": 4.0, "speed_up": 2.51}
    result = {
        "format": 1, "drafter": "runs/smol", "step": 600, "target": "SmolLM2-135M-Instruct", "block_size": 8,
        "trained_block_size": 8, "device": "cpu", "dtype": "float32", "options": {"temperature": 0.0},
        "all": {**figures, "answers": 4, "acceptance_length": 3.71}, "sets": {"chat": figures, "code": code},
        "samples": samples,
    }  # fmt: skip
    folder = path / "evaluations"
    folder.mkdir(exist_ok=True)
    (folder / "evaluation_001.json").write_text(json.dumps(result))


def _sample(name: str, question: str, noise: random.Random) -> dict[str, object]:
    words = [w for w in ANSWER.replace("\n", " \n").split(" ")]
    tokens = [words[0], *(w if w.startswith("\n") else " " + w for w in words[1:])]
    runs, accepted, at = [["", tokens[0]]], [], 1
    while at < len(tokens):
        n = min(noise.choice((0, 1, 2, 2, 3, 4, 5, 7)), len(tokens) - at - 1)
        runs.append(["".join(tokens[at : at + n]), tokens[at + n]])
        accepted.append(n)
        at += n + 1
    return {
        "set": name, "place": f"{name}.jsonl:1", "turn": 0, "question": question, "text": ANSWER, "prompt_tokens": 24,
        "tokens": list(range(len(tokens))), "finish": "stop", "accepted": accepted, "committed": [n + 1 for n in accepted],
        "runs": runs, "same_as_plain": True,
    }  # fmt: skip
