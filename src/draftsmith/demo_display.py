"""What the demo shows: one progress bar over all stages with the time that is left, and the table at the end.

Stages have weights, the seconds they took on a quiet machine with 2 cores; the time left follows from the weight still
to do at the pace seen so far. Where standard error is no terminal, plain lines instead.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftsmith.console import Advance, Console, duration
from draftsmith.events import StepRecord

PLAIN_EVERY_SECONDS = 30.0
FIRST_WEIGHT = 5.0  # weight that must be done before the pace says anything


@dataclass(frozen=True)
class Stage:
    """A part of the demo as the display knows it."""

    name: str
    weight: float


class Display(Console):
    """The demo's console; `train` and `evaluate` report to it as to any other."""

    def __init__(self, stages: list[Stage], output: rich.console.Console | None = None):
        super().__init__(output)
        self.stages = stages
        self.total = sum(stage.weight for stage in stages)
        self.at = -1
        self.skipped = 0.0  # weight that an earlier call has done
        self.fraction = 0.0
        self.text = ""
        self.began = self.said = time.monotonic()
        columns = (TextColumn("[bold]{task.description}"), BarColumn(24), TextColumn("{task.fields[text]}"))
        elapsed = (TimeElapsedColumn(), TextColumn("[cyan]{task.fields[left]}"))
        self.bar = Progress(*columns, *elapsed, console=self.output, transient=True, refresh_per_second=4)
        self.task = self.bar.add_task("demo", total=self.total, text="", left="")

    def __enter__(self) -> "Display":
        if self.output.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.output.is_terminal:
            self.bar.stop()

    def begin(self, stage: Stage, done_before: bool = False) -> None:
        """The next stage starts, or is found complete from an earlier call."""
        self.at += 1
        assert self.stages[self.at] is stage, f"stage {stage.name} is out of turn"
        if done_before:
            self.skipped += stage.weight
            self.note(f"{self._place()} {stage.name}: done before")
        elif not self.output.is_terminal:
            self.note(f"{self._place()} {stage.name}")
        self.advance(1.0 if done_before else 0.0, "")

    def finish(self, text: str) -> None:
        """The stage is complete; `text` says in a few words what came of it."""
        self.advance(1.0, "")
        self.note(f"{self._place()} {self.stages[self.at].name}: {text}")

    def advance(self, fraction: float, text: str) -> None:
        """How far the current stage is, 0 to 1, and what it is at."""
        self.fraction, self.text = min(1.0, fraction), text
        left = self.left()
        shown = f"{duration(left)} left" if left is not None else ""
        stage = self.stages[self.at]
        self.bar.update(
            self.task, description=f"{self._place()} {stage.name}", completed=self.done(), text=text, left=shown
        )
        now = time.monotonic()
        if text and not self.output.is_terminal and now - self.said >= PLAIN_EVERY_SECONDS:
            self.said = now
            self.note(f"{self._place()} {stage.name}: {text}" + (f", {shown} in all" if shown else ""))

    def step(self, record: StepRecord, total: int) -> None:
        """A log step of training."""
        accepted = f", block {record.block_acceptance:.2f}" if record.block_acceptance is not None else ""
        self.advance(record.step / total, f"step {record.step}/{total}, loss {record.loss:.2f}{accepted}")

    @contextmanager
    def progress(self, description: str, total: int | None, unit: str = "items") -> Iterator[Advance]:
        """Counted work of `evaluate`, shown as the current stage; loading is a small part of one."""
        yield Advance(total) if description.startswith("load ") else _StageAdvance(self, total, unit)

    def done(self) -> float:
        """Weight of what is complete."""
        before = sum(stage.weight for stage in self.stages[: self.at])
        return before + self.fraction * self.stages[self.at].weight

    def left(self) -> float | None:
        """Seconds to the end of the demo, once there is a pace."""
        done = self.done() - self.skipped
        if done < FIRST_WEIGHT:
            return None
        return (self.total - self.done()) * (time.monotonic() - self.began) / done

    def _place(self) -> str:
        return f"[{self.at + 1}/{len(self.stages)}]"


class _StageAdvance(Advance):
    """Passes counts on to the display."""

    def __init__(self, display: Display, total: int | None, unit: str):
        super().__init__(total)
        self._display, self._unit = display, unit

    def _show(self) -> None:
        if self.total:
            self._display.advance(self.done / self.total, f"{self.done} of {self.total} {self._unit}")


def result_table(rows: list[dict[str, Any]], block_size: int) -> Table:
    """Acceptance before and after, one line a prompt set. `rows`: set, before, after (figures of evaluate.py)."""
    table = Table(title=f"tokens accepted for each pass of the target (1 = none of the {block_size - 1} drafts)")
    table.add_column("prompts")
    for column in ("answers", "before", "after", "first draft accepted", "passes saved", "identical to plain greedy"):
        table.add_column(column, justify="right")
    for row in rows:
        before, after = row["before"], row["after"]
        table.add_row(
            row["set"],
            str(after["answers"]),
            "–" if before is None else f"{before['acceptance_length']:.2f}",
            f"[bold]{after['acceptance_length']:.2f}[/]",
            f"{after['acceptance_per_position'][0]:.0%}",
            f"{after['target_passes_saved']:.0%}",
            f"{round(after['identical_to_plain_greedy'] * after['answers'])} of {after['answers']}",
        )
    return table
