"""What the report shows of one run or of several side by side: sections of figures with the sentences that introduce them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftsmith.console import duration, number
from draftsmith.history import Run
from draftsmith.report_plots import (
    FAINT,
    INK,
    SERIES,
    Figure,
    Line,
    bars,
    lines,
    ramp,
    smooth,
    timeline,
    typical_step_seconds,
    worker_shares,
)
from draftsmith.status import Status


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    key: str
    title: str
    introduction: str
    figures: tuple[Figure, ...]


def sections(runs: Sequence[Run]) -> list[Section]:
    """Every section that has something to show, in reading order."""
    parts = [
        Section("learning", "Is it learning?", LEARNING, _some(learning(runs))),
        Section("speed", "How fast, against what is possible?", SPEED, _some(speed(runs))),
        Section("workers", "Who waits for whom?", WORKERS, _some(workers(runs))),
        Section("memory", "Memory and power", MEMORY, _some(memory(runs))),
        Section("data", "The corpus", DATA, _some([lengths(runs)])),
    ]
    return [part for part in parts if part.figures]


LEARNING = (
    "Acceptance length is the number of tokens that one pass of the target commits: accepted drafts and the bonus token. "
    "It is measured on held-out text, walked as decoding would. The loss is the weighted cross-entropy of training blocks."
)
SPEED = (
    "Useful work is what the drafter's mathematics needs, without recomputation and padding. The ceiling is the same "
    "device's matrix-multiply rate, measured when the run started."
)
WORKERS = "Hatched parts are waiting: for a unit (input), for taps (the target), for a free slot or for other trainers."
MEMORY = "After warm-up, memory should be flat: shapes are fixed."
DATA = "Documents of the prepared corpus by length in tokens."


def learning(runs: Sequence[Run]) -> list[Figure | None]:
    return [acceptance(runs), loss(runs), *positions(runs), gradient(runs), learning_rate(runs)]


def acceptance(runs: Sequence[Run]) -> Figure | None:
    """Held-out acceptance length over steps; for one run also that of the training blocks."""
    courses = [
        Line(_name(runs, run, "held-out walk"), *_evaluated(run, "acceptance_length"), SERIES[i % 7], dots=True)
        for i, run in enumerate(runs)
    ]
    if len(runs) == 1:
        blocks = runs[0].column("block_acceptance")
        courses.append(Line("training blocks", runs[0].column("step"), blocks, FAINT, width=1.5))
    reading = " ".join(filter(None, (_best(runs, run) for run in runs)))
    return lines("acceptance", "Acceptance length", "tokens a pass", courses, reading or "Not evaluated yet.")


def _best(runs: Sequence[Run], run: Run) -> str:
    if not run.evaluations:
        return ""
    best = max(run.evaluations, key=lambda e: e["acceptance_length"])
    who = f"{run.name}: best" if len(runs) > 1 else "Best"
    return f"{who} {best['acceptance_length']:.3f} at step {best['step']:,}, over {best['responses']:,} answers."


def loss(runs: Sequence[Run]) -> Figure | None:
    """Training loss, smoothed over its raw course for one run, and held-out loss."""
    courses, words = [], []
    for i, run in enumerate(runs):
        steps, values = run.column("step"), run.column("loss")
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        if not len(values):
            continue
        if len(runs) == 1:
            courses.append(Line("as measured", steps, values, FAINT, width=1, named=False))
        courses.append(Line(_name(runs, run, "training"), steps, smooth(values), SERIES[i % 7]))
        held_out = _evaluated(run, "loss")
        if len(runs) == 1:
            courses.append(Line("held-out", *held_out, SERIES[1], dots=True))
        words.append(
            f"{_prefix(runs, run)}{values[0]:.3f} at step {steps[0]:,.0f}, {smooth(values)[-1]:.3f} at the end."
        )
    return lines("loss", "Loss", "nats a token", courses, " ".join(words))


def positions(runs: Sequence[Run]) -> list[Figure | None]:
    """Acceptance by position: the newest evaluation of each run, and for one run how it came about."""
    with_walk = [run for run in runs if run.evaluations]
    if not with_walk:
        return [_slots(runs)]
    shares = {run.name: run.evaluations[-1]["acceptance_per_position"] for run in with_walk}
    width = max(len(values) for values in shares.values())
    if len(runs) == 1:
        evaluations = runs[0].evaluations
        picked = {0: evaluations[0], len(evaluations) // 2: evaluations[len(evaluations) // 2], -1: evaluations[-1]}
        shares = {f"step {e['step']:,}": e["acceptance_per_position"] for e in picked.values()}
    percent = {name: [100 * v for v in values] + [0.0] * (width - len(values)) for name, values in shares.items()}
    labels = [str(k + 1) for k in range(width)]
    whose, last = list(percent.items())[-1]
    reading = f"{whose}: the first draft is accepted in {last[0]:.1f}% of the passes, draft {width} in {last[-1]:.1f}%."
    title = "Acceptance by position"
    colors = SERIES if len(runs) > 1 else (FAINT, SERIES[5], SERIES[0])[-len(percent) :]
    chart = bars("positions", title, "% of passes", labels, percent, reading, "drafts accepted, at least", colors)
    return [chart, *([positions_over_time(runs[0])] if len(runs) == 1 and len(runs[0].evaluations) > 1 else [])]


def positions_over_time(run: Run) -> Figure | None:
    steps, table = _table(run.evaluations, "acceptance_per_position")
    return _ramp_lines("positions_over_time", "Acceptance by position over time", "% of passes", steps, 100 * table)


def _slots(runs: Sequence[Run]) -> Figure | None:
    """Without evaluations: how often each slot's best token was right in training."""
    if len(runs) > 1:
        return None
    steps, table = _table(runs[0].steps, "slot_accuracy")
    return _ramp_lines("slots", "Right tokens by slot, in training", "%", steps, 100 * table) if len(steps) else None


def _table(records: Sequence[dict[str, Any]], field: str) -> tuple[np.ndarray, np.ndarray]:
    """steps [n] and values [n, width] of a field that is a list, of the records where it is as long as in the newest."""
    having = [record for record in records if record.get(field)]
    having = [record for record in having if len(record[field]) == len(having[-1][field])]
    return np.array([r["step"] for r in having], np.float64), np.array([r[field] for r in having], np.float64)


def _ramp_lines(key: str, title: str, unit: str, steps: np.ndarray, table: np.ndarray) -> Figure | None:
    """table [steps, positions]: a line a position, colours from the first to the last."""
    colors, dark = ramp(table.shape[1])
    courses = [Line(f"{k + 1}", steps, table[:, k], colors[k], dots=len(steps) < 40) for k in range(table.shape[1])]
    reading = f"Position 1 went from {table[0, 0]:.1f}% to {table[-1, 0]:.1f}%, position {table.shape[1]} "
    reading += f"from {table[0, -1]:.1f}% to {table[-1, -1]:.1f}%."
    return lines(key, title, unit, courses, reading, zero=True, dark=dark)


def gradient(runs: Sequence[Run]) -> Figure | None:
    skipped = [int(run.steps[-1].get("skipped_updates") or 0) if run.steps else 0 for run in runs]
    said = [
        f"{_prefix(runs, run)}{n or 'no'} {'update' if n == 1 else 'updates'} skipped since the last attempt began."
        for run, n in zip(runs, skipped, strict=True)
    ]
    return _courses(runs, "gradient", "Gradient norm", "before clipping", "gradient_norm", " ".join(said))


def learning_rate(runs: Sequence[Run]) -> Figure | None:
    reading = [
        f"{_prefix(runs, run)}highest {np.nanmax(lr):.2e}." for run in runs if np.isfinite(lr := run.column("lr")).any()
    ]
    return _courses(runs, "lr", "Learning rate", "", "lr", " ".join(reading), tickformat="~g")


def speed(runs: Sequence[Run]) -> list[Figure | None]:
    return [throughput(runs), _rate(runs), _used(runs)]


def throughput(runs: Sequence[Run]) -> Figure | None:
    """Useful work a second against the ceiling."""
    courses, words = [], []
    for i, run in enumerate(runs):
        steps, useful, ceiling = run.column("step"), run.column("useful_tflops"), run.column("ceiling_tflops")
        if not np.isfinite(useful).any():
            continue
        courses.append(Line(_name(runs, run, "useful"), steps, useful, SERIES[i % 7]))
        word = f"{_prefix(runs, run)}{np.nanmedian(useful):,.3g} TFLOP/s (median)"
        if np.isfinite(ceiling).any():
            color = INK if len(runs) == 1 else SERIES[i % 7]
            courses.append(Line(_name(runs, run, "ceiling", " ceiling"), steps, ceiling, color, dash="dash", width=1.5))
            word += f", {np.nanmedian(useful / ceiling):.0%} of the ceiling"
        if again := run.steps[-1].get("recompiles"):
            word += f"; recompiled {again} times since training began"
        words.append(f"{word}.")
    return lines("throughput", "Useful work", "TFLOP/s", courses, " ".join(words), zero=True)


def _rate(runs: Sequence[Run]) -> Figure | None:
    words = [
        f"{_prefix(runs, run)}{number(np.nanmedian(rate))} context tokens a second (median)."
        for run in runs
        if np.isfinite(rate := run.column("tokens_per_second")).any()
    ]
    return _courses(runs, "rate", "Tokens a second", "tokens/s", "tokens_per_second", " ".join(words), zero=True)


def _used(runs: Sequence[Run]) -> Figure | None:
    """How full units are; one run only, to stay readable."""
    if len(runs) > 1:
        return None
    run, steps = runs[0], runs[0].column("step")
    tokens, anchors = 100 * run.column("tokens_used_share"), 100 * run.column("anchors_used_share")
    if not np.isfinite(tokens).any() or not np.isfinite(anchors).any():
        return None
    courses = [Line("tokens", steps, tokens, SERIES[0]), Line("anchor slots", steps, anchors, SERIES[1])]
    reading = f"Tokens used {np.nanmean(tokens):.1f}%, anchor slots used {np.nanmean(anchors):.1f}% on average."
    return lines("used", "How full units are", "% used", courses, reading)


def workers(runs: Sequence[Run]) -> list[Figure | None]:
    out: list[Figure | None] = []
    for i, run in enumerate(runs):
        figures = (worker_shares(f"shares{i}", run.current()), timeline(f"timeline{i}", run.current(), _stretch(run)))
        out += [_titled(figure, run) if figure and len(runs) > 1 else figure for figure in figures]
    return out


def _stretch(run: Run) -> float:
    """Seconds of about six optimizer steps, within what the eye can read."""
    return float(np.clip(6 * typical_step_seconds(run), 0.01, 60.0))


def _titled(figure: Figure, run: Run) -> Figure:
    return replace(figure, title=f"{figure.title}: {run.name}")


def memory(runs: Sequence[Run]) -> list[Figure | None]:
    courses, words = [], []
    for i, run in enumerate(runs):
        steps, used, total = run.column("step"), run.column("memory_bytes"), run.column("memory_total_bytes")
        if not np.isfinite(used).any():
            continue
        courses.append(Line(_name(runs, run, "used"), steps, used / 2**30, SERIES[i % 7]))
        if len(runs) == 1:
            courses.append(Line("device", steps, total / 2**30, INK, dash="dash", width=1.5))
        words.append(f"{_prefix(runs, run)}peak {np.nanmax(used) / 2**30:,.2f} GiB.")
    return [
        lines("memory", "Memory", "GiB", courses, " ".join(words), zero=True),
        _courses(
            runs,
            "gpu",
            "GPU utilisation",
            "%",
            "gpu_utilisation_percent",
            _mean(runs, "gpu_utilisation_percent", "%"),
            True,
        ),
        _courses(runs, "power", "Power", "W", "power_watts", _mean(runs, "power_watts", "W"), True),
    ]


def _mean(runs: Sequence[Run], field: str, unit: str) -> str:
    known = [(run, values) for run in runs if np.isfinite(values := run.column(field)).any()]
    return " ".join(f"{_prefix(runs, run)}{np.nanmean(values):,.0f} {unit} on average." for run, values in known)


def lengths(runs: Sequence[Run]) -> Figure | None:
    """Histogram of document lengths that the trainer noted from its corpus."""
    found = {}
    for run in runs:
        corpus = next((s.about["corpus"] for s in run.current() if s.about.get("corpus")), None)
        if corpus and corpus.get("histogram"):
            found[run.name] = {int(bound): int(count) for bound, count in corpus["histogram"].items()}
    if not found:
        return None
    bounds = sorted(set().union(*found.values()))
    series = {name: [float(histogram.get(b, 0)) for b in bounds] for name, histogram in found.items()}
    if len(series) > 1 and all(values == next(iter(series.values())) for values in series.values()):
        series = {"all runs": next(iter(series.values()))}
    labels = [f"{bound // 2 + 1:,}–{bound:,}" if bound > 1 else "1" for bound in bounds]
    total = {name: sum(values) for name, values in series.items()}
    alone = len(runs) == 1
    reading = " ".join(f"{'' if alone else f'{name}: '}{count:,.0f} documents." for name, count in total.items())
    return bars("lengths", "Length of documents", "documents", labels, series, reading, "tokens")


def cards(run: Run, status: Status) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of what one wants to know first."""
    out = []
    if status.best_acceptance_length is not None:
        remark = f"held-out, best, at step {status.best_step:,}"
        out.append(("Acceptance length", f"{status.best_acceptance_length:.3f}", remark))
    if status.loss is not None:
        out.append(("Loss", f"{status.loss:.3f}", "last log step, training"))
    total = f"of {status.total_steps:,}" if status.total_steps else ""
    out.append(("Steps", f"{status.step:,}", total))
    left = (
        f"{duration(status.left_seconds)} left"
        if status.left_seconds is not None
        else f"{run.attempt + 1} {'attempt' if run.attempt == 0 else 'attempts'}"
    )
    out.append(("Time", duration(status.elapsed_seconds), left))
    rate, useful, ceiling = (run.column(f) for f in ("tokens_per_second", "useful_tflops", "ceiling_tflops"))
    if np.isfinite(rate).any():
        share = useful / ceiling
        of = f"{np.nanmedian(share):.0%} of the ceiling, median" if np.isfinite(share).any() else "median"
        out.append(("Tokens a second", number(float(np.nanmedian(rate))), of))
    memory_used = run.column("memory_bytes")
    if np.isfinite(memory_used).any():
        out.append(("Memory", f"{np.nanmax(memory_used) / 2**30:,.1f} GiB", "peak"))
    return out


def _courses(
    runs: Sequence[Run],
    key: str,
    title: str,
    unit: str,
    field: str,
    reading: str,
    zero: bool = False,
    tickformat: str = "",
) -> Figure | None:
    """One field of the step records, a line a run."""
    courses = [
        Line(_name(runs, run, title), run.column("step"), run.column(field), SERIES[i % 7])
        for i, run in enumerate(runs)
    ]
    return lines(key, title, unit, courses, reading, zero=zero, tickformat=tickformat)


def _evaluated(run: Run, field: str) -> tuple[np.ndarray, np.ndarray]:
    having = [e for e in run.evaluations if e.get(field) is not None]
    return np.array([e["step"] for e in having], np.float64), np.array([e[field] for e in having], np.float64)


def _name(runs: Sequence[Run], run: Run, alone: str, suffix: str = "") -> str:
    """A line's name: what it is if there is one run, whose it is if there are several."""
    return alone if len(runs) == 1 else run.name + suffix


def _prefix(runs: Sequence[Run], run: Run) -> str:
    return "" if len(runs) == 1 else f"{run.name}: "


def _some(figures: Sequence[Figure | None]) -> tuple[Figure, ...]:
    """Those there are, each with a reading that begins like a sentence."""
    return tuple(replace(f, reading=f.reading[:1].upper() + f.reading[1:]) for f in figures if f)
