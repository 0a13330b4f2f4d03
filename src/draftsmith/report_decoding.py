"""The report's part on real decoding: the JSON files of `draftsmith evaluate` as tables, figures and coloured samples."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from draftsmith.report_plots import Figure, Table, bars

SAMPLES = 6  # shown of each evaluation, taken in turn from its sets
LONGEST_QUESTION = 1200  # characters

ROWS = (
    ("answers", "answers", "{:,d}"),
    ("tokens", "tokens", "{:,d}"),
    ("passes of the target", "target_passes", "{:,d}"),
    ("acceptance length, mean over answers", "acceptance_length", "{:.3f}"),
    ("acceptance length, vLLM's", "acceptance_length_vllm", "{:.3f}"),
    ("passes of the target saved", "target_passes_saved", "{:.1%}"),
    ("texts identical to plain greedy", "identical_to_plain_greedy", "{:.1%}"),
    ("tokens a second", "tokens_per_second", "{:,.1f}"),
    ("tokens a second without drafter", "tokens_per_second_plain", "{:,.1f}"),
    ("speed against plain decoding", "speed_up", "{:.2f} ×"),
)


@dataclass(frozen=True)
class Piece:
    """A run of text: `run` (accepted drafts), `run odd` (the next pass's), `bonus` (the target's own token), or plain."""

    kind: str
    text: str
    title: str


@dataclass(frozen=True)
class Sample:
    facts: str
    prompt: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Decoding:
    """One evaluation as the page shows it."""

    title: str
    facts: str
    table: Table
    figures: tuple[Figure, ...]
    samples: tuple[Sample, ...]


def decoding(key: str, name: str, result: dict[str, Any], samples: int = SAMPLES) -> Decoding:
    """`result`: one evaluation JSON; `key` makes the figures' names unique on the page."""
    sets = dict(result["sets"])
    columns = {**sets, "all": result["all"]} if len(sets) > 1 else sets
    rows = tuple(
        (label, *("–" if values.get(field) is None else form.format(values[field]) for values in columns.values()))
        for label, field, form in ROWS
        if any(values.get(field) is not None for values in columns.values())
    )
    step = f" at step {result['step']:,}" if result.get("step") is not None else ""
    temperature = result.get("options", {}).get("temperature", 0.0)
    how = "greedy" if temperature == 0 else f"temperature {temperature}"
    facts = f"{result.get('target')}, blocks of {result['block_size']}, {how}, {result['dtype']} on {result['device']}."
    figures = (_positions(key, columns), _histogram(key, result["samples"]))
    return Decoding(
        f"{name}{step}",
        facts,
        Table(f"{name}: figures by set", ("", *columns), rows),
        tuple(figure for figure in figures if figure),
        tuple(sample(s) for s in _picked(result["samples"], samples)),
    )


def _positions(key: str, columns: dict[str, dict[str, Any]]) -> Figure | None:
    found = {name: values["acceptance_per_position"] for name, values in columns.items()}
    width = max((len(values) for values in found.values()), default=0)
    if not width:
        return None
    shares = {name: [100 * v for v in values] + [0.0] * (width - len(values)) for name, values in found.items()}
    last = list(shares.values())[-1]
    reading = f"The first draft is accepted in {last[0]:.1f}% of the passes, draft {width} in {last[-1]:.1f}%."
    labels = [str(k + 1) for k in range(width)]
    title = "Acceptance by position"
    return bars(f"{key}_positions", title, "% of passes", labels, shares, reading, "drafts accepted, at least")


def _histogram(key: str, samples: list[dict[str, Any]]) -> Figure | None:
    """Passes by accepted drafts."""
    counts = Counter(n for s in samples for n in s["accepted"])
    if not counts:
        return None
    labels = list(range(max(counts) + 1))
    total = counts.total()
    values = {"passes": [100 * counts[n] / total for n in labels]}
    reading = f"{100 * counts[0] / total:.1f}% of {total:,} passes accept no draft; the longest run is {max(counts)}."
    title = "Accepted drafts a pass"
    return bars(f"{key}_accepted", title, "% of passes", [str(n) for n in labels], values, reading, "drafts accepted")


def _picked(samples: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first of every set, then the second of every set, and so on."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for s in samples:
        by_set.setdefault(s["set"], []).append(s)
    longest = max((len(part) for part in by_set.values()), default=0)
    return [part[i] for i in range(longest) for part in by_set.values() if i < len(part)][:count]


def sample(values: dict[str, Any]) -> Sample:
    """A sample's text, cut where passes of the target end."""
    accepted, committed = values["accepted"], values["committed"]
    mean = f", {sum(committed) / len(committed):.2f} tokens a pass" if committed else ""
    facts = f"{values['set']} · {len(values['tokens']):,} tokens in {len(committed):,} passes{mean}"
    if values.get("same_as_plain") is not None:
        facts += (
            " · same text as without the drafter" if values["same_as_plain"] else " · other text than without drafter"
        )
    pieces = []
    for i, (drafts, own) in enumerate(values["runs"][: 1 + min(len(accepted), len(committed))]):
        said = f"pass {i}: {accepted[i - 1]} accepted, {committed[i - 1]} kept" if i else "from the prompt's pass"
        shade = "run odd" if i % 2 else "run"
        pieces += [Piece(kind, text, said) for kind, text in ((shade, drafts), ("bonus", own)) if text]
    question = values["question"]
    if len(question) > LONGEST_QUESTION:
        question = question[:LONGEST_QUESTION] + " …"
    return Sample(facts, question, tuple(pieces))
