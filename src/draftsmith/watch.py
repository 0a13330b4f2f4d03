"""`draftsmith watch RUN [RUN ...]`: a live view in the terminal, from the runs' files only; no port, no torch.

Works on running, finished and dead runs, here or in a shared or copied directory. Ends when no run is running any more.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from draftsmith.console import duration, number, or_dash
from draftsmith.errors import UserError
from draftsmith.events import WAIT_PREFIX
from draftsmith.history import Follower, Run
from draftsmith.status import Status, WorkerStatus, status_of

BLOCKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"running": "green", "finished": "blue", "stopped": "yellow", "failed": "red", "killed": "red"}
SPAN_STYLES = ("blue", "cyan", "magenta", "green", "bright_blue", "bright_cyan")


@dataclass(frozen=True)
class WatchOptions:
    """Follows runs in the terminal."""

    runs: Positional[tuple[Path, ...]]
    """Run directories."""
    every: float = 2.0
    """Seconds between looks at the files."""
    once: bool = False
    """Print one picture and leave."""


def main(options: WatchOptions, output: rich.console.Console | None = None) -> int:
    """`draftsmith watch`."""
    if not options.runs:
        raise UserError("watch: name at least one run directory")
    output = output or rich.console.Console()
    followers = [Follower(path) for path in options.runs]
    runs = [follower.poll() for follower in followers]
    if options.once or not output.is_terminal:
        output.print(view(runs, time.time()))
        return 0
    try:
        with Live(console=output, auto_refresh=False, screen=True) as live:
            while any(run.state() in ("running", "empty") for run in runs):
                live.update(view(runs, time.time()), refresh=True)
                time.sleep(options.every)
                runs = [follower.poll() for follower in followers]
    except KeyboardInterrupt:
        pass  # the usual way to leave; the runs go on
    output.print(view(runs, time.time()))
    return 0


def view(runs: list[Run], now: float) -> RenderableType:
    """The picture at the time `now` (seconds since the epoch): one run in full, several as a table to compare."""
    return run_view(runs[0], now) if len(runs) == 1 else runs_view([(run, status_of(run, now)) for run in runs])


def runs_view(runs: list[tuple[Run, Status]]) -> Table:
    """A row for each run."""
    table = Table(expand=True, header_style="dim", box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, style="bold")
    table.add_column("state", no_wrap=True)
    for name in ("step", "acceptance", "best", "loss", "tokens/s", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("acceptance over time", ratio=1, no_wrap=True, style="blue")
    for run, status in runs:
        lengths = np.array([e["acceptance_length"] for e in run.evaluations], np.float64)
        total = f" / {status.total_steps:,}" if status.total_steps else ""
        table.add_row(
            status.run,
            Text(status.state, style=STATE_STYLES.get(status.state, "white")),
            f"{status.step:,}{total}",
            or_dash(status.acceptance_length, "{:.3f}"),
            or_dash(status.best_acceptance_length, "{:.3f}"),
            or_dash(status.loss, "{:.4f}"),
            number(status.tokens_per_second),
            duration(status.left_seconds) if status.left_seconds is not None else "",
            Spark(lengths),
        )
    return table


def run_view(run: Run, now: float) -> Panel:
    """One run: how far, how good, how fast, who waits, what it said last."""
    status = status_of(run, now)
    style = STATE_STYLES.get(status.state, "white")
    title = Text.assemble((f" {status.run} ", "bold"), (f" {status.state} ", f"reverse {style}"), " ")
    parts: list[RenderableType] = [_advance(status), Text(), _figures(run, status)]
    if any(worker.span_shares for worker in status.workers):
        parts += [Text(), *_workers(status)]
    if status.error:
        parts += [Text(), Text(status.error, style="red")]
    notes = sorted((note["t"], note["text"]) for session in run.current() for note in session.notes)
    parts += [Text(text, style="dim", overflow="ellipsis", no_wrap=True) for _, text in notes[-3:]]
    return Panel(Group(*parts), title=title, title_align="left", border_style=style, padding=(1, 2))


def _advance(status: Status) -> Table:
    """Bar, counts, time."""
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    for _ in range(3):
        line.add_column(justify="right", no_wrap=True)
    total = status.total_steps
    of = f" / {total:,} ({status.step / total:.0%})" if total else ""
    left = f"{duration(status.left_seconds)} left" if status.left_seconds is not None else ""
    bar = ProgressBar(total=total or 1, completed=status.step if total else 0, complete_style="blue")
    line.add_row(bar, f"step {status.step:,}{of}", f"{duration(status.elapsed_seconds)} so far", left)
    return line


def _figures(run: Run, status: Status) -> Table:
    """Name, value, course over the run, remark."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(ratio=1, style="blue", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    lengths = np.array([e["acceptance_length"] for e in run.evaluations], np.float64)
    if len(lengths):
        best = f"best {status.best_acceptance_length:.3f} at step {status.best_step:,}"
        table.add_row("acceptance length", f"{lengths[-1]:.3f}", Spark(lengths), best)
    rows = (
        ("loss", "loss", "{:.4f}", _troubles(status), False),
        ("block acceptance", "block_acceptance", "{:.3f}", "training blocks", False),
        ("gradient norm", "gradient_norm", "{:.3g}", "", False),
        ("tokens/s", "tokens_per_second", "", "", True),
        ("useful TFLOP/s", "useful_tflops", "{:.3g}", _ceiling(status), True),
        ("GPU utilisation", "gpu_utilisation_percent", "{:.0f} %", "", True),
        ("power", "power_watts", "{:.0f} W", "", True),
    )
    for name, field, pattern, remark, from_zero in rows:
        values = run.column(field)
        if np.isfinite(values).any():
            newest = values[np.isfinite(values)][-1]
            course = Spark(values, from_zero)
            table.add_row(name, pattern.format(newest) if pattern else number(newest), course, remark)
    memory = run.column("memory_bytes") / 2**30
    if np.isfinite(memory).any():
        newest = memory[np.isfinite(memory)][-1]
        table.add_row("memory", f"{newest:.2f} GiB", Spark(memory, True), f"peak {np.nanmax(memory):.2f} GiB")
    return table


def _troubles(status: Status) -> str:
    known = {"updates skipped": status.skipped_updates, "recompiled": status.recompiles}
    return ", ".join(f"{name}: {count}" for name, count in known.items() if count)


def _ceiling(status: Status) -> str:
    if not status.ceiling_tflops or status.useful_tflops is None:
        return ""
    return f"{status.useful_tflops / status.ceiling_tflops:.0%} of {status.ceiling_tflops:.3g}"


def _workers(status: Status) -> tuple[Table, Text]:
    """Each worker's last log steps as a bar of what it did, and the colours' meaning."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    names = list(dict.fromkeys(name for worker in status.workers for name in worker.span_shares))
    styles = {n: "yellow" if n.startswith(WAIT_PREFIX) else SPAN_STYLES[i % 6] for i, n in enumerate(names)}
    for worker in status.workers:
        role = worker.worker.rpartition(".")[2].rstrip("0123456789")
        slow = "  bottleneck" if status.bottleneck and role in status.bottleneck else ""
        remark = f"last word {duration(worker.silent_seconds)} ago" if status.state == "running" else worker.state
        table.add_row(worker.worker, ShareBar(worker, styles), f"waits {worker.wait_share or 0:.0%}{slow}", remark)
    legend = Text("  ").join(Text(f"■\u00a0{name}", style=styles[name]) for name in names)
    return table, legend


class Spark:
    """A course as block characters, as wide as its column; `from_zero` where the size matters, not the ups and downs."""

    def __init__(self, values: np.ndarray, from_zero: bool = False):
        self._values, self._from_zero = values, from_zero

    def __rich_console__(
        self, _: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        yield Text(sparkline(self._values, min(options.max_width, 60), self._from_zero))


def sparkline(values: np.ndarray, width: int, from_zero: bool = False) -> str:
    """values [n] float64 -> at most `width` block characters; a character is the mean of its part, a gap a space."""
    parts = np.array_split(values, min(width, len(values))) if len(values) else []
    means = np.array([np.nanmean(part) if np.isfinite(part).any() else np.nan for part in parts])
    known = means[np.isfinite(means)]
    if not len(known):
        return ""
    low, high = 0.0 if from_zero else known.min(), known.max()
    scaled = (means - low) / (high - low) if high > low else np.where(np.isfinite(means), 0.5, np.nan)
    return "".join(" " if np.isnan(v) else BLOCKS[min(7, int(v * 8))] for v in scaled)


class ShareBar:
    """Shares of a worker's time as one coloured bar; what is left over is time without a span."""

    def __init__(self, worker: WorkerStatus, styles: dict[str, str]):
        self._worker, self._styles = worker, styles

    def __rich_console__(
        self, _: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        width, bar, done, end = options.max_width, Text(), 0, 0.0
        for name, share in self._worker.span_shares.items():
            end = min(1.0, end + share)
            cells = round(end * width) - done
            bar.append("█" * cells, style=self._styles[name])
            done += cells
        bar.append("░" * (width - done), style="dim")
        yield bar
