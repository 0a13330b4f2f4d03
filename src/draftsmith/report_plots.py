"""The figures of the report: runs in, plotly figures with a title and a sentence that reads them out. Imports no torch.

Colours are the light theme's; PALETTE pairs each with its dark twin, and the page swaps them. They keep apart for readers
with colour-blindness (after Okabe and Ito), and no figure tells anything by colour alone: lines are named at hover, in the
legend and in the table below each figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from draftsmith.events import WAIT_PREFIX
from draftsmith.history import Run, Session

SERIES = ("#0b6bb0", "#c8590a", "#0a8466", "#a8549a", "#a87900", "#3a97c9", "#5b6472")
SERIES_DARK = ("#5aaef0", "#f29b57", "#3fc79f", "#dd92cf", "#e0b84a", "#86c9ee", "#a3adba")
INK, INK_DARK = "#4a5260", "#aab3c0"
GRID, GRID_DARK = "#e4e7ec", "#2c333d"
FAINT, FAINT_DARK = "#b8c4d6", "#4a5a70"
WAIT, WAIT_DARK = "#d9a441", "#c79236"
PALETTE = dict(
    zip((*SERIES, INK, GRID, FAINT, WAIT), (*SERIES_DARK, INK_DARK, GRID_DARK, FAINT_DARK, WAIT_DARK), strict=True)
)
HATCHES = ("/", "x", "-", ".", "|", "+")
BARS = 1500  # of a timeline; it is cut there
POINTS = 600  # of a line; longer courses are means over equal parts
SPAN_ORDER = ("step", "prefill", "pull", "update", "evaluate", "checkpoint")


@dataclass(frozen=True)
class Table:
    """A table of the page. `differs`: rows to tint; `left`: columns aligned left, the others hold numbers."""

    label: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    differs: frozenset[int] = frozenset()
    left: int = 1


@dataclass(frozen=True)
class Figure:
    """A plot with its words: `reading` says in a sentence what the plot shows, `table` holds its numbers."""

    key: str
    title: str
    reading: str
    plot: go.Figure
    table: Table
    wide: bool = False
    dark: dict[str, str] = field(default_factory=dict)
    """Colours beyond PALETTE and their dark twins."""


@dataclass(frozen=True)
class Line:
    """One course: x and y [n] float64."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: str
    dots: bool = False
    width: float = 2.0
    dash: str = "solid"
    named: bool = True
    """In the legend and the table."""


def lines(
    key: str,
    title: str,
    unit: str,
    courses: Sequence[Line],
    reading: str,
    zero: bool = False,
    tickformat: str = "",
    dark: dict[str, str] | None = None,
) -> Figure | None:
    """Courses over steps; None if there is nothing to draw. `zero`: the y axis begins there."""
    shown = [line for line in (_finite(line) for line in courses) if len(line.x)]
    if not shown:
        return None
    plot = go.Figure(layout=_layout(unit, legend=sum(line.named for line in shown) > 1))
    for line in shown:
        x, y = thin(line.x, line.y)
        plot.add_scatter(
            x=_plain(x), y=_plain(y), name=line.name, mode="lines+markers" if line.dots else "lines",
            line={"color": line.color, "width": line.width, "dash": line.dash}, marker={"size": 5, "color": line.color},
            showlegend=line.named, hoverinfo=None if line.named else "skip",
            hovertemplate="%{y:,.4~g}" if line.named else None,
        )  # fmt: skip
    plot.update_yaxes(rangemode="tozero" if zero else "normal", tickformat=tickformat)
    plot.update_xaxes(title_text="step")
    named = [line for line in shown if line.named]
    head = ("step", *(line.name for line in named))
    return Figure(key, title, reading, plot, Table(title, head, _line_rows(named)), dark=dark or {})


def bars(
    key: str,
    title: str,
    unit: str,
    labels: Sequence[str],
    series: dict[str, Sequence[float]],
    reading: str,
    x_title: str,
    colors: Sequence[str] = SERIES,
) -> Figure:
    """Grouped bars, a series a colour."""
    plot = go.Figure(layout=_layout(unit, legend=len(series) > 1))
    for i, (name, values) in enumerate(series.items()):
        marker = {"color": colors[i % len(colors)], "line": {"width": 0}}
        plot.add_bar(x=list(labels), y=_plain(values), name=name, marker=marker, hovertemplate="%{y:,.4~g}")
    plot.update_layout(bargap=0.25, barmode="group")
    plot.update_xaxes(title_text=x_title, type="category", tickformat="")
    plot.update_yaxes(rangemode="tozero")
    rows = tuple((label, *(f"{values[i]:,.4g}" for values in series.values())) for i, label in enumerate(labels))
    return Figure(key, title, reading, plot, Table(title, (x_title, *series), rows))


def worker_shares(key: str, sessions: Sequence[Session]) -> Figure | None:
    """What each worker did with its time: a stacked bar a worker."""
    totals = {s.worker: span_totals(s) for s in sessions if s.busy_lines}
    if not totals:
        return None
    names = ordered({name for _, sums in totals.values() for name in sums})
    plot = go.Figure(layout=_layout("share of the time", legend=True))
    workers = list(totals)[::-1]
    for name in names:
        shares = [100 * totals[w][1].get(name, 0.0) / totals[w][0] for w in workers]
        plot.add_bar(
            y=workers, x=_plain(shares), name=name, orientation="h",
            marker={"color": span_color(name, names), "pattern": _pattern(name, names), "line": {"width": 0}},
            hovertemplate=f"{name}: %{{x:.1f}}%",
        )  # fmt: skip
    plot.update_layout(barmode="stack", bargap=0.35, height=110 + 34 * len(workers), hovermode="closest")
    plot.update_xaxes(ticksuffix="%", range=[0, 100], title_text=None)
    plot.update_yaxes(title_text=None, showgrid=False, automargin=True)
    rows = tuple(
        (w, *(f"{totals[w][1].get(n, 0.0) / totals[w][0]:.1%}" for n in names), f"{totals[w][0]:,.0f} s")
        for w in totals
    )
    reading = _who_waits({worker: _waiting(sums) / seconds for worker, (seconds, sums) in totals.items()})
    title = "Time by worker"
    return Figure(key, title, reading, plot, Table(title, ("worker", *names, "measured"), rows), wide=True)


def _waiting(sums: dict[str, float]) -> float:
    return sum(value for name, value in sums.items() if name.startswith(WAIT_PREFIX))


def _who_waits(shares: dict[str, float]) -> str:
    most = max(shares, key=lambda worker: shares[worker])
    if shares[most] < 0.0005:
        return "No worker waited for another."
    return f"Waits most: {most}, {shares[most]:.1%} of its time."


def timeline(key: str, sessions: Sequence[Session], seconds: float) -> Figure | None:
    """Every span of a stretch in the middle of the run, a row a worker, on one clock."""
    having = [s for s in sessions if s.span_lines]
    begin = max(having, key=lambda s: len(s.span_lines)).middle() if having else None
    if begin is None:
        return None
    drawn = sorted(stretch(having, begin, begin + seconds), key=lambda bar: bar.start)[:BARS]
    end = begin + seconds if len(drawn) < BARS else drawn[-1].start
    names = ordered({bar.name for bar in drawn})
    plot = go.Figure(layout=_layout("", legend=True))
    times = {name: [bar.seconds for bar in drawn if bar.name == name] for name in names}
    for name in sorted(
        names, key=lambda n: -float(np.median(times[n]))
    ):  # short spans lie on the long ones around them
        own = [bar for bar in drawn if bar.name == name]
        plot.add_bar(
            y=[bar.worker for bar in own], base=_plain([1e3 * (bar.start - begin) for bar in own]),
            x=_plain([1e3 * bar.seconds for bar in own]), name=name, orientation="h",
            customdata=[bar.what for bar in own], legendrank=names.index(name),
            marker={"color": span_color(name, names), "line": {"width": 0}, "pattern": _pattern(name, names)},
            hovertemplate=f"{name} %{{customdata}}<br>%{{x:,.4~g}} ms<extra></extra>",
        )  # fmt: skip
    workers = sorted({s.worker for s in having}, reverse=True)
    plot.update_layout(barmode="overlay", bargap=0.3, height=120 + 38 * len(workers), hovermode="closest")
    plot.update_xaxes(range=[0, (end - begin) * 1e3], title_text="ms", showgrid=True)
    plot.update_yaxes(categoryorder="array", categoryarray=workers, showgrid=False, automargin=True, title_text=None)
    reading = f"{end - begin:.3g} seconds from the middle of the run; draftsmith trace shows all of it."
    rows = tuple((name, f"{len(all_)}", f"{np.median(all_) * 1e3:,.4g} ms") for name, all_ in times.items())
    title = "A stretch of the timeline"
    return Figure(key, title, reading, plot, Table(title, ("span", "times", "median"), rows), wide=True)


@dataclass(frozen=True)
class Bar:
    """A span in the timeline; times in seconds, `what`: its attributes in words."""

    worker: str
    name: str
    start: float
    seconds: float
    what: str


def stretch(sessions: Sequence[Session], begin: float, end: float) -> Iterator[Bar]:
    """Spans that overlap [begin, end], seconds since the epoch."""
    for session in sessions:
        for spans in session.spans(begin, end):
            for i in np.flatnonzero((spans.start + spans.seconds > begin) & (spans.start < end)):
                what = ", ".join(f"{k} {column[i]}" for k, column in spans.attributes.items() if column[i] is not None)
                yield Bar(session.worker, spans.name, float(spans.start[i]), float(spans.seconds[i]), what)


def typical_step_seconds(run: Run) -> float:
    """Median seconds of an optimizer step, 1.0 where the records do not tell."""
    steps, times = run.column("step"), run.column("t")
    pace = np.diff(times) / np.diff(steps) if len(steps) > 1 else np.array([])
    return float(np.median(pace)) if len(pace) else 1.0


def span_totals(session: Session) -> tuple[float, dict[str, float]]:
    """(seconds measured, seconds by span name) over the whole session."""
    sums: dict[str, float] = {}
    lines_ = session.busy()
    for line in lines_:
        for name, value in line["span_seconds"].items():
            sums[name] = sums.get(name, 0.0) + value
    return max(sum(line["seconds"] for line in lines_), 1e-9), sums


def ordered(names: set[str]) -> list[str]:
    """Work in a fixed order, then other work, then waiting."""
    place = {name: i for i, name in enumerate(SPAN_ORDER)}
    return sorted(names, key=lambda n: (n.startswith(WAIT_PREFIX), place.get(n, len(place)), n))


def span_color(name: str, names: Sequence[str]) -> str:
    """Waiting is always the same colour; work takes the series' colours in order."""
    return WAIT if name.startswith(WAIT_PREFIX) else SERIES[names.index(name) % len(SERIES)]


def ramp(count: int) -> tuple[list[str], dict[str, str]]:
    """`count` colours in order, for positions of a block, and their dark twins."""
    light = _hex(sample_colorscale("Viridis", list(np.linspace(0.0, 0.82, max(count, 2)))))[:count]
    dark = _hex(sample_colorscale("Viridis", list(np.linspace(1.0, 0.3, max(count, 2)))))[:count]
    return light, dict(zip(light, dark, strict=True))


def thin(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points: means over equal parts, at each part's last x. The last part ends at the last point."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points + 1).astype(int)
    return x[edges[1:] - 1], np.add.reduceat(y, edges[:-1]) / np.diff(edges)


def smooth(y: np.ndarray, share: float = 0.03) -> np.ndarray:
    """Centred running mean over `share` of the course's length, over what there is of it at the ends."""
    half = round(len(y) * share / 2)
    sums = np.cumsum(np.concatenate(([0.0], y)))
    at = np.arange(len(y))
    begins, ends = np.maximum(0, at - half), np.minimum(len(y), at + half + 1)
    return (sums[ends] - sums[begins]) / (ends - begins)


def _layout(unit: str, legend: bool) -> go.Layout:
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "exponentformat": "SI"}
    return go.Layout(
        template=None,
        height=280,
        margin={"l": 56, "r": 12, "t": 8, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        hovermode="x unified",
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        xaxis={**axis, "showgrid": False, "tickformat": "~s", "title": {"standoff": 6}},
        yaxis={**axis, "title": {"text": unit, "standoff": 6}, "automargin": True},
    )


def _finite(line: Line) -> Line:
    known = np.isfinite(line.x) & np.isfinite(line.y)
    return Line(line.name, line.x[known], line.y[known], line.color, line.dots, line.width, line.dash, line.named)


def _line_rows(courses: Sequence[Line]) -> tuple[tuple[str, ...], ...]:
    """Up to 12 steps spread over the run, the nearest value of each course at or before it."""
    steps = np.unique(np.concatenate([line.x for line in courses])) if courses else np.array([])
    picked = steps[np.unique(np.linspace(0, len(steps) - 1, min(12, len(steps))).astype(int))] if len(steps) else steps
    rows = []
    for step in picked:
        at = [np.searchsorted(line.x, step, side="right") - 1 for line in courses]
        cells = (f"{line.y[i]:,.4g}" if i >= 0 else "" for line, i in zip(courses, at, strict=True))
        rows.append((f"{step:,.0f}", *cells))
    return tuple(rows)


def _pattern(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Hatching for waiting, another one for each thing waited for, so that nothing hangs on colour alone."""
    waits = [n for n in names if n.startswith(WAIT_PREFIX)]
    return {"shape": HATCHES[waits.index(name) % len(HATCHES)] if name in waits else "", "size": 6, "solidity": 0.3}


def _plain(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _hex(colors: Sequence[str]) -> list[str]:
    parts = [[round(float(c)) for c in color.removeprefix("rgb(").removesuffix(")").split(",")] for color in colors]
    return ["#{:02x}{:02x}{:02x}".format(*rgb) for rgb in parts]
