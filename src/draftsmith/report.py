"""`draftsmith report RUN [RUN ...]`: one self-contained HTML page about a run, or about several side by side. No torch.

Contract: made from the run directories' files alone, so a copy elsewhere gives the same page; it asks nothing of the
network (a content security policy in the page says so too) and works on a phone, in dark mode and without a mouse.
"""

import base64
import gzip
import html
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tyro.conf import Positional

from draftsmith import __version__
from draftsmith.console import duration, number, or_dash
from draftsmith.errors import UserError
from draftsmith.history import Run, read_run
from draftsmith.report_decoding import Decoding, decoding
from draftsmith.report_plots import PALETTE, Figure, Table
from draftsmith.report_sections import Section, cards, sections
from draftsmith.run import flatten
from draftsmith.status import Status, status_of

SHORT = {"learning": "Learning", "speed": "Speed", "workers": "Workers", "memory": "Memory", "data": "Corpus"}


@dataclass(frozen=True)
class ReportOptions:
    """Writes one HTML page with a run's plots, tables and samples; several runs are compared."""

    runs: Positional[tuple[Path, ...]]
    """Run directories."""
    out: Path | None = None
    """File to write; default RUN/report.html, for several runs report.html here."""


def main(options: ReportOptions) -> int:
    """`draftsmith report`: prints the file's name."""
    if not options.runs:
        raise UserError("report: name at least one run directory")
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    write_report([read_run(path, spans=True) for path in options.runs], out)
    print(out)
    return 0


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page about `runs` to `out`, complete or not at all. UserError if it cannot be written."""
    page = render(runs)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise UserError(f"{out}: the report cannot be written: {error}") from None


def render(runs: Sequence[Run], now: float | None = None) -> str:
    """The page as text. `now`: seconds since the epoch, for runs in progress."""
    now = time.time() if now is None else now
    statuses = [status_of(run, now) for run in runs]
    parts = sections(runs)
    decoded = [run.decoded() for run in runs]
    evaluations = [
        decoding(f"decoding{i}_{j}", name if len(runs) == 1 else f"{run.name}: {name}", result)
        for i, (run, (found, _)) in enumerate(zip(runs, decoded, strict=True))
        for j, (name, result) in enumerate(found)
    ]
    left_out = [text for run, (_, wrong) in zip(runs, decoded, strict=True) for text in (*run.left_out(), *wrong)]
    settings = _comparison("Recipe", runs, [flatten(run.config.get("recipe", {})) for run in runs])
    environment = _comparison("Environment", runs, [_environment(run) for run in runs])
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html"))
    page.globals["scroll_table"] = scroll_table
    return page.render(
        version=__version__,
        names=[run.name for run in runs],
        heads=[_head(run, status) for run, status in zip(runs, statuses, strict=True)],
        comparison=_overview(statuses),
        sections=[{**vars(part), "short": SHORT[part.key]} for part in parts],
        evaluations=evaluations,
        settings=settings,
        environment=environment,
        differing=len(settings.differs),
        notes=[*(_notes(runs[0]) if len(runs) == 1 else []), *(("–", text) for text in left_out)],
        figures_json=_figures_json(parts, evaluations),
        plotly=_plotly(),
        css=_file("page.css"),
        js=_file("page.js"),
    )


def _head(run: Run, status: Status) -> dict[str, Any]:
    recipe = run.config.get("recipe", {})
    drafter, target = recipe.get("drafter", {}), recipe.get("target", {})
    facts = []
    if target.get("model"):
        facts.append(f"{drafter.get('kind', 'drafter')} for {Path(str(target['model'])).name}")
    if drafter.get("layers"):
        facts.append(f"{drafter['layers']} draft layers, blocks of {drafter.get('block')}")
    device = next((s.about["device"] for s in run.current() if s.about.get("device")), None)
    workers = sum(not session.of_device for session in run.current())
    if device or workers:
        facts.append(f"{workers} {'worker' if workers == 1 else 'workers'}" + (f" on {device}" if device else ""))
    if run.sessions:
        begun = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime(min(s.start for s in run.sessions)))
        facts.append(f"begun {begun}")
    return {
        "name": run.name, "state": status.state, "error": status.error,
        "facts": " · ".join(facts), "cards": cards(run, status),
    }  # fmt: skip


def _overview(statuses: Sequence[Status]) -> Table:
    head = ("run", "state", "step", "time", "best acceptance", "at step", "newest", "loss", "tokens/s", "of ceiling")
    rows = []
    for s in statuses:
        share = s.useful_tflops / s.ceiling_tflops if s.useful_tflops and s.ceiling_tflops else None
        rows.append((
            s.run, s.state, f"{s.step:,}", duration(s.elapsed_seconds), or_dash(s.best_acceptance_length, "{:.3f}"),
            or_dash(s.best_step, "{:,}"), or_dash(s.acceptance_length, "{:.3f}"), or_dash(s.loss, "{:.4f}"),
            number(s.tokens_per_second), or_dash(share, "{:.0%}"),
        ))  # fmt: skip
    return Table("Runs", head, tuple(rows), left=2)


def _comparison(label: str, runs: Sequence[Run], values: Sequence[dict[str, Any]]) -> Table:
    """A row a key, a column a run; rows that differ are marked and come first."""
    keys = list(dict.fromkeys(key for part in values for key in part))
    differing = [key for key in keys if any(part.get(key) != values[0].get(key) for part in values)]
    order = differing + [key for key in keys if key not in differing]
    rows = tuple((key, *(_value(part.get(key)) for part in values)) for key in order)
    head = ("key", *(("value",) if len(runs) == 1 else (run.name for run in runs)))
    return Table(label, head, rows, frozenset(range(len(differing))), left=len(head))


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def _environment(run: Run) -> dict[str, Any]:
    provenance = dict(run.config.get("provenance", {}))
    versions = provenance.pop("versions", {})
    argv = provenance.pop("argv", None)
    facts = {**provenance, **{f"version of {name}": version for name, version in versions.items()}}
    if run.steps:
        newest = {name: run.steps[-1].get(name) for name in ("recompiles", "replays", "skipped_updates")}
        facts |= {f"{name} since the last attempt began": value for name, value in newest.items() if value is not None}
    if argv:
        facts["command"] = " ".join([Path(argv[0]).name, *argv[1:]])
    for session in run.current():
        about = {key: value for key, value in session.about.items() if key != "corpus"}
        facts |= {f"{session.worker}: {key}": value for key, value in about.items()}
        corpus = session.about.get("corpus") or {}
        facts |= {f"corpus: {key}": value for key, value in corpus.get("counts", {}).items()}
    return facts


def _notes(run: Run) -> list[tuple[str, str]]:
    begin = min((s.start for s in run.sessions), default=0.0)
    notes = sorted((note["t"], note["text"]) for session in run.sessions for note in session.notes)
    for session in run.sessions:
        if session.attempt and session.index == 0:
            notes.append((session.start, f"attempt {session.attempt + 1} began"))
    return [(duration(max(0.0, t - begin)), text) for t, text in sorted(notes)]


def _figures_json(parts: Sequence[Section], evaluations: Sequence[Decoding]) -> str:
    """Every figure's data and layout, safe inside a script element."""
    drawn: list[Figure] = [f for part in parts for f in part.figures] + [f for e in evaluations for f in e.figures]
    figures = {f.key: {**json.loads(f.plot.to_json()), "twins": f.dark} for f in drawn}
    text = json.dumps({"figures": figures, "palette": PALETTE}, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def scroll_table(table: Table) -> str:
    """A table as HTML that scrolls sideways by itself on narrow screens and by keyboard."""

    def cell(tag: str, column: int, text: str, more: str = "") -> str:
        kind = "n" if column >= table.left else "value" if column else "key"
        return f'<{tag}{more} class="{kind}">{html.escape(text)}</{tag}>'

    head = "".join(cell("th", i, text, ' scope="col"') for i, text in enumerate(table.head))
    rows = []
    for number_, row in enumerate(table.rows):
        mark = ' class="differs"' if number_ in table.differs else ""
        first = cell("th", 0, row[0], ' scope="row"')
        rows.append(f"<tr{mark}>{first}{''.join(cell('td', i, text) for i, text in enumerate(row) if i)}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(table.label)}, table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _plotly() -> str:
    """Plotly's script, gzipped (without a time stamp: the same input gives the same page), as base64."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def _file(name: str) -> str:
    return resources.files("draftsmith").joinpath("page", name).read_text(encoding="utf-8")
