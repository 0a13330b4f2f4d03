"""What a command prints while it works: plain lines in logs, a live progress display with ETA on a terminal.

Everything goes to standard error; standard output stays free for results.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import rich.console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from draftsmith.events import StepRecord


class Output(rich.console.Console):
    """rich's, but what is printed into a pipe that nobody reads any more is lost, instead of ending the command."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is left in buffers goes there
        os.close(nowhere)


class Console:
    """Lines and progress of one command. Use as a context manager where it shows progress: the terminal is restored.

    `output` is the rich console to print on; the default one writes to standard error.
    """

    def __init__(self, output: rich.console.Console | None = None):
        self.output = output or Output(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._eta = Eta()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the progress display away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, text: str) -> None:
        """One line, now."""
        self.output.print(text, markup=False, soft_wrap=True)

    def step(self, record: StepRecord, total: int) -> None:
        """A log step: a line in plain logs; on a terminal the line scrolls above a bar with the time that is left."""
        self._eta.saw(record.step)
        left = self._eta.seconds(record.step, total)
        self.note(step_line(record, total, left))
        if not self.output.is_terminal:
            return
        if self._progress is None:
            self._progress = _bar(self.output, "steps")
            self._task = self._progress.add_task("train", total=total, completed=record.step, left=left, unit="")
            self._progress.start()
            weakref.finalize(self, self._progress.stop)  # the cursor comes back even if nobody calls close
        self._progress.update(self._task, completed=record.step, left=left)
        if record.step >= total:
            self.close()

    @contextmanager
    def progress(self, description: str, total: int | None, unit: str = "items") -> Iterator["Advance"]:
        """`with console.progress("prepare", len(files), "files") as bar: bar.advance()`. `total` None: unknown.

        On a terminal a bar with ETA; in plain logs a line at the start, every 30 seconds and at the end.
        """
        if not self.output.is_terminal:
            plain = PlainAdvance(self, description, total, unit)
            yield plain
            plain.line()
            return
        with _bar(self.output, unit) as bar:
            task = bar.add_task(description, total=total, left=None, unit=unit)
            yield BarAdvance(bar, task, total)


class Advance:
    """How far a piece of work has come."""

    def __init__(self, total: int | None):
        self.total, self.done, self._eta = total, 0, Eta()
        self._eta.saw(0)

    def advance(self, count: int = 1) -> None:
        """`count` more are done."""
        self.done += count
        self._eta.saw(self.done)
        self._show()

    def left(self) -> float | None:
        """Seconds that the rest will take, or None."""
        return self._eta.seconds(self.done, self.total) if self.total else None

    def _show(self) -> None:
        """Bring what people see up to date."""


# Console.progress, or what takes its place
ShowProgress = Callable[[str, int | None, str], AbstractContextManager[Advance]]


def no_progress(description: str, total: int | None, unit: str) -> AbstractContextManager[Advance]:
    """Where nobody looks on."""
    return nullcontext(Advance(total))


class BarAdvance(Advance):
    """On a terminal."""

    def __init__(self, bar: Progress, task: TaskID, total: int | None):
        super().__init__(total)
        self._bar, self._task = bar, task

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.done, left=self.left())


class PlainAdvance(Advance):
    """In a log file: a line at the start, every 30 seconds, and at the end."""

    EVERY_SECONDS = 30.0

    def __init__(self, console: Console, description: str, total: int | None, unit: str):
        super().__init__(total)
        self._console, self._description, self._unit = console, description, unit
        self._said = time.monotonic()
        console.note(f"{description}: {number(total)} {unit}" if total else f"{description} ...")

    def _show(self) -> None:
        if time.monotonic() - self._said >= self.EVERY_SECONDS and self.done != self.total:
            self.line()

    def line(self) -> None:
        """Say where the work stands."""
        self._said = time.monotonic()
        of, left = f" of {number(self.total)}" if self.total else "", self.left()
        soon = f", {duration(left)} left" if left and self.done != self.total else ""
        self._console.note(f"{self._description}: {number(self.done)}{of} {self._unit}{soon}")


class Eta:
    """Remaining time from the pace of the last observations, so that a slow start (compilation) is forgotten."""

    def __init__(self, window: int = 30):
        self._seen: deque[tuple[float, int]] = deque(maxlen=window)

    def saw(self, done: int) -> None:
        now = time.monotonic()
        if len(self._seen) > 1 and now - self._seen[-2][0] < 0.5:  # at most two entries a second: the window spans time
            self._seen[-1] = (now, done)
        else:
            self._seen.append((now, done))

    def seconds(self, done: int, total: int) -> float | None:
        """None before there is a pace."""
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        if last <= first or end <= begin:
            return None
        return max(0, total - done) * (end - begin) / (last - first)


def step_line(record: StepRecord, total: int, left_seconds: float | None = None) -> str:
    """A log step as one line, the same columns every time."""
    parts = [f"step {record.step:>{len(str(total))}}/{total}", f"loss {record.loss:.4f}"]
    if record.block_acceptance is not None:
        parts.append(f"block {record.block_acceptance:.2f}")
    if record.lr is not None:
        parts.append(f"lr {record.lr:.2e}")
    if record.gradient_norm is not None:
        parts.append(f"norm {record.gradient_norm:.2f}")
    if record.tokens_per_second is not None:
        parts.append(f"{number(record.tokens_per_second)} tok/s")
    if record.useful_tflops is not None:
        parts.append(f"{record.useful_tflops:.3g} TFLOP/s" + _ceiling(record))
    if record.memory_bytes is not None:
        parts.append(f"{record.memory_bytes / 2**30:.1f} GiB")
    if record.targets_wait_share is not None and record.trainers_wait_share is not None:
        parts.append(f"waiting: targets {record.targets_wait_share:.0%}, trainers {record.trainers_wait_share:.0%}")
        parts.append(f"bound by {record.bound_by}")
    elif record.bound_by == "input":
        parts.append("bound by input")
    if record.skipped_updates:
        parts.append(f"skipped {record.skipped_updates}")
    if record.recompiles:
        parts.append(f"recompiled {record.recompiles}")
    if left_seconds is not None:
        parts.append(f"{duration(left_seconds)} left")
    return "  ".join(parts)


def _ceiling(record: StepRecord) -> str:
    if not record.ceiling_tflops or record.useful_tflops is None:
        return ""
    return f" ({record.useful_tflops / record.ceiling_tflops:.0%} of ceiling)"


def or_dash(value: float | None, pattern: str) -> str:
    """A number by a pattern of str.format; None -> a dash."""
    return "–" if value is None else pattern.format(value)


def number(value: float | None) -> str:
    """1234567 -> 1.23 M; None -> a dash."""
    if value is None:
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(1e4, size * 0.9995):  # 999,500 is 1 M, not 1000 k
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in the unit that shows some digits of them."""
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if count >= unit / 4:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds -> 42 s, 3 min 05 s, 2 h 07 min, 1 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


class Left(ProgressColumn):
    """The time that is left, from Eta."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text("" if left is None or task.finished else f"{duration(left)} left", style="cyan")


def _bar(output: rich.console.Console, unit: str) -> Progress:
    count = TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}")
    return Progress(
        SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(None), OptionalTotal(count, unit),
        TimeElapsedColumn(), Left(), console=output, refresh_per_second=4, transient=True,
    )  # fmt: skip


class OptionalTotal(ProgressColumn):
    """`3 of 10 files`, or `3 files` while the total is unknown."""

    def __init__(self, known: TextColumn, unit: str):
        self._known, self._unit = known, unit
        super().__init__()

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.completed:,.0f} {self._unit}")
        return self._known.render(task)
