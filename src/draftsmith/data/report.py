"""The account of a preparation: counted chunk by chunk, checked, told in words, kept in report.json."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.process import ChunkResult
from draftsmith.data.shards import SPLITS

_COUNTS = ("documents", "tokens", "supervised", "anchors")
NOTES = {
    "turns-after-last-reply": "turns after the last assistant turn were left out",
    "prompt-tail-left-out": "rows whose last turn lacks the end of the generation prompt (thinking mode of data and "
    "--template-options may differ)",
    "last-turn-alone": "rows are trained on their last turn alone, since the template renders earlier turns otherwise "
    "before it",
    "reasoning-left-out": "assistant turns whose reasoning the template does not render",
    "turn-left-out": "turns that the template does not render",
    "truncated": "documents were cut at --max-tokens",
    "copies": "further copies were stored for weights above 1",
}


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did; report.json holds the same."""

    out: Path
    rows_in: int
    kept: int
    rejected: dict[str, int]
    """Rows by reason."""
    splits: dict[str, dict[str, int]]
    """documents, tokens, supervised, anchors of each split."""
    histogram: dict[str, int] = field(default_factory=dict)
    """Documents by length, {upper bound in tokens: documents}."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """file, format, shapes {shape: rows}, rows, kept, rejected of each input file."""
    notes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))

    def summary(self) -> str:
        """The account in words, for the terminal."""
        lost = sum(self.rejected.values())
        lines = [f"{self.rows_in:,} rows in = {self.kept:,} kept + {lost:,} rejected"]
        width = len(f"{max([0, *self.rejected.values()]):,}")
        lines += [f"  rejected {n:>{width},}  {reason}" for reason, n in sorted(self.rejected.items())]
        if lost:
            lines.append(f"  each with file, line and reason in {self.out / 'rejected.jsonl'}")
        lines += [f"  note: {n:,} {NOTES[name]}" for name, n in sorted(self.notes.items()) if n]
        for split, counts in self.splits.items():
            share = counts["supervised"] / counts["tokens"] if counts["tokens"] else 0.0
            lines.append(
                f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {share:.0%} of them supervised, "
                f"{counts['anchors']:,} valid anchors"
            )
        if self.histogram:
            total = sum(self.histogram.values())
            shown = ", ".join(f"<= {bound}: {n / total:.0%}" for bound, n in self.histogram.items())
            lines.append(f"lengths in tokens: {shown}")
        tokens = sum(counts["tokens"] for counts in self.splits.values())
        if self.seconds > 0:
            lines.append(f"{self.seconds:.1f} seconds, {tokens / self.seconds:,.0f} tokens/s")
        return "\n".join([*lines, f"corpus: {self.out}"])


class Tally:
    """Counts while the work goes on; can be saved and taken up again."""

    def __init__(self, files: int, state: dict[str, Any] | None = None):
        state = state or {}
        self.rows_in, self.kept = state.get("rows_in", 0), state.get("kept", 0)
        self.rejected: Counter[str] = Counter(state.get("rejected"))
        self.notes: Counter[str] = Counter(state.get("notes"))
        self.splits = state.get("splits") or {split: dict.fromkeys(_COUNTS, 0) for split in SPLITS}
        self.histogram: Counter[int] = Counter({int(k): n for k, n in state.get("histogram", {}).items()})
        self.files = state.get("files") or [{"shapes": {}, "rows": 0, "kept": 0, "rejected": 0} for _ in range(files)]
        self.seconds = state.get("seconds", 0.0)
        self.first_rejected: str | None = state.get("first_rejected")
        """In words, for the case that no row is kept."""

    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(vars(self)))

    def rows(self, result: ChunkResult, kept: int, rejected: list[str]) -> None:
        """Account for one chunk's rows. RuntimeError unless kept and rejected make up the chunk."""
        if result.rows != kept + len(rejected):
            raise RuntimeError(f"{result.rows} rows in, {kept} kept, {len(rejected)} rejected: rows are lost")
        self.rows_in += result.rows
        self.kept += kept
        self.rejected.update(rejected)
        self.notes.update(result.notes)
        file = self.files[result.file]
        file["rows"] += result.rows
        file["kept"] += kept
        file["rejected"] += len(rejected)
        for shape, count in result.shapes.items():
            file["shapes"][shape] = file["shapes"].get(shape, 0) + count

    def documents(self, split: str, lengths: np.ndarray, supervised: int, anchors: np.ndarray) -> None:
        """Account for stored documents; `lengths` and `anchors` [documents]."""
        counts = self.splits[split]
        counts["documents"] += len(lengths)
        counts["tokens"] += int(lengths.sum())
        counts["supervised"] += supervised
        counts["anchors"] += int(anchors.sum())
        bounds, found = np.unique(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), return_counts=True)
        self.histogram.update({1 << bound: count for bound, count in zip(bounds.tolist(), found.tolist(), strict=True)})

    def report(self, out: Path, names: list[str], formats: list[str]) -> PrepareReport:
        files = [
            {"file": name, "format": kind, **counts}
            for name, kind, counts in zip(names, formats, self.files, strict=True)
        ]
        histogram = {str(bound): self.histogram[bound] for bound in sorted(self.histogram)}
        return PrepareReport(
            out, self.rows_in, self.kept, dict(self.rejected), self.splits, histogram, files,
            dict(self.notes), round(self.seconds, 3),
        )  # fmt: skip
