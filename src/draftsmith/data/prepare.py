"""`draftsmith prepare`: conversations -> token shards, with an account of every row.

    files -> chunks of rows -> [workers: conversation -> text with spans -> tokens with mask] -> shards
Rows in = rows kept + rows rejected by reason, checked chunk by chunk. An interrupted preparation goes on where it was
when the same command is given again.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from draftsmith.console import Console
from draftsmith.data import sources
from draftsmith.data.conversations import RowRules
from draftsmith.data.options import PrepareOptions
from draftsmith.data.pool import map_chunks
from draftsmith.data.process import ChunkResult, ProcessRules
from draftsmith.data.report import PrepareReport, Tally
from draftsmith.data.shards import FORMAT, Batch, Manifest, ShardWriter
from draftsmith.data.template import TextSide, load_text_side, load_tokenizer, template_hash
from draftsmith.errors import UserError

__all__ = ["PrepareReport", "main", "prepare"]

ROWS, BYTES = 256, 1 << 20  # of a chunk
PARALLEL_FROM = 32 << 20  # bytes of input from which worker processes are worth their start
SAVE_EVERY = 20.0  # seconds between points from which an interrupted preparation can go on
_SAME_RESULT = ("show", "workers", "deadline", "overwrite", "parquet")  # options that do not change the shards


def main(options: PrepareOptions) -> None:
    """`draftsmith prepare`."""
    from draftsmith import models
    from draftsmith.data.show import show_documents

    report = prepare(options, Console())
    print(report.summary())
    if options.show:
        directory = models.resolve(options.model, options.revision)
        show_documents(options.out, load_tokenizer(directory, options.trust_remote_code), options.show)


def prepare(options: PrepareOptions, console: Console | None = None) -> PrepareReport:
    """Write the corpus `options.out`. UserError when no row can be kept, the destination is taken, or inputs are missing.

    Nothing is printed without a `console`.
    """
    from draftsmith import models

    _check(options)
    files, remarks = sources.expand(options.sources, options.format)
    directory = models.resolve(options.model, options.revision)
    sources.check_apart(options.out, files, (directory, options.chat_template))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    side = load_text_side(directory, options.chat_template, options.template_options, options.trust_remote_code, now)
    _announce(console, files, remarks)
    writer = ShardWriter(options.out, _fingerprint(options, side, files), options.overwrite)
    try:
        work = _Work(options, side, files, writer)
        try:
            work.run(console)
        except (UserError, KeyboardInterrupt):
            work.save()
            raise
        report = work.commit()
    except OSError as error:
        writer.discard()
        raise UserError(f"{options.out}: cannot be written: {error}; nothing was kept") from None
    finally:
        writer.close()
    if options.parquet:
        from draftsmith.data.parquet import export_parquet

        export_parquet(options.out)
    return report


class _Work:
    """One preparation between its writer's start and its commit."""

    def __init__(self, options: PrepareOptions, side: TextSide, files: list[sources.InputFile], writer: ShardWriter):
        self._options, self._files, self._writer = options, files, writer
        saved = writer.progress or {}
        self._side = dataclasses.replace(side, now=saved.get("now", side.now))
        self._tally = Tally(len(files), saved.get("tally"))
        self._skip = self._done = saved.get("chunks", 0)
        self._seen = set(writer.saved_hashes().tolist()) if options.deduplicate else set()

    def run(self, console: Console | None) -> None:
        """Every chunk that is not done yet."""
        options = self._options
        workers = options.workers or _automatic_workers(self._files)
        chunks = itertools.islice(sources.read_chunks(self._files, ROWS, BYTES), self._skip, None)
        names = [file.name for file in self._files]
        results = map_chunks(chunks, self._side, process_rules(options), workers, options.deadline, names)
        if console is None:
            self._take_all(results, None)
            return
        if self._skip:
            console.note(f"going on after {self._tally.rows_in:,} rows of an interrupted preparation")
        with console.progress("prepare", None, "rows") as bar:
            self._take_all(results, bar.advance)

    def _take_all(self, results: Iterator[ChunkResult], advance: Any) -> None:
        began = saved = time.monotonic()
        spent = self._tally.seconds
        for result in results:
            self._take(result)
            self._done += 1
            self._tally.seconds = spent + time.monotonic() - began
            if advance:
                advance(result.rows)
            if time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        """A point to go on from."""
        self._writer.save_progress({"chunks": self._done, "tally": self._tally.state(), "now": self._side.now})

    def _take(self, result: ChunkResult) -> None:
        """Store one chunk's documents, in order."""
        name = self._files[result.file].name
        rejected = [(no.line, no.reason, no.detail) for no in result.rejected]
        keep = np.ones(len(result.lengths), bool)
        for i, (line, copies, content) in enumerate(
            zip(result.lines.tolist(), result.copies.tolist(), result.content.tolist(), strict=True)
        ):
            if self._options.deduplicate and content in self._seen:
                rejected.append((line, "duplicate", "the same conversation was kept before"))
            elif not copies:
                rejected.append((line, "not-drawn", "by the weight of its source"))
            else:
                self._seen.add(content) if self._options.deduplicate else None
                continue
            keep[i] = False
        if rejected and self._tally.first_rejected is None:
            line, reason, detail = min(rejected)
            self._tally.first_rejected = f"first at {name}:{line}: {reason}{f', {detail}' if detail else ''}"
        for line, reason, detail in sorted(rejected):
            record = {"file": name, "line": line, "reason": reason, "detail": detail}
            self._writer.append_line("rejected.jsonl", json.dumps(record, ensure_ascii=True).encode() + b"\n")
        if self._options.deduplicate:
            self._writer.append_line("hashes.bin", result.content[keep].tobytes())
        self._tally.rows(result, int(keep.sum()), [reason for _, reason, _ in rejected])
        for split, chosen in (("train", keep & ~result.held_out), ("held_out", keep & result.held_out)):
            self._store(split, result, np.flatnonzero(chosen))

    def _store(self, split: str, result: ChunkResult, chosen: np.ndarray) -> None:
        order = np.repeat(chosen, result.copies[chosen])
        self._tally.notes["copies"] += len(order) - len(chosen)
        if not len(order):
            return
        ends = np.cumsum(result.lengths)
        lengths = result.lengths[order]
        # Token numbers of the chosen documents, one after the other.
        starts = (ends - result.lengths)[order]
        at = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        mask = result.mask[at]
        self._writer.append(split, Batch(result.tokens[at], mask, lengths, result.anchors[order]))
        self._tally.documents(split, lengths, int(mask.sum()), result.anchors[order])

    def commit(self) -> PrepareReport:
        """Move the corpus into place. UserError where no row was kept."""
        options, tally, side = self._options, self._tally, self._side
        report = tally.report(options.out, [f.name for f in self._files], [f.format for f in self._files])
        if not report.kept:
            self._writer.discard()
            counts = ", ".join(f"{reason} {count}" for reason, count in tally.rejected.most_common(3))
            why = f"none of {report.rows_in} rows could be kept ({counts}; {tally.first_rejected})"
            source = options.sources[0] + (" ..." if len(options.sources) > 1 else "")
            raise UserError(f"{source}: {why if report.rows_in else 'there are no rows'}; nothing was written")
        rendered = any(shape not in ("text", "tokens") for file in tally.files for shape in file["shapes"])
        manifest = Manifest(
            FORMAT,
            options.model,
            side.tokenizer_hash,
            side.vocab_size,
            template_hash(side.template, side.template_options, side.tool_template) if rendered else None,
            str(options.chat_template.resolve()) if options.chat_template else None,
            dict(options.template_options),
            json.loads(json.dumps(dataclasses.asdict(options), default=str)),
            {"rows_in": report.rows_in, "kept": report.kept, "rejected": report.rejected, "splits": report.splits},
            report.histogram,
        )
        if options.shuffle:
            self._writer.shuffle(options.seed)
        extra = {"chat_template.jinja": side.template.encode()} if side.template and rendered else {}
        self._writer.commit(manifest, report.to_json(), extra)
        return report


def process_rules(options: PrepareOptions) -> ProcessRules:
    """What workers need of the options."""
    rows = RowRules(options.shape, options.last_turn_only, options.skip_leading_assistant, options.reasoning == "drop")
    return ProcessRules(
        rows,
        options.max_tokens,
        options.over_long == "truncate",
        options.reasoning == "mask",
        options.held_out,
        options.seed,
    )


def _check(options: PrepareOptions) -> None:
    rules = [
        (options.max_tokens >= 2, "--max-tokens", "must be at least 2"),
        (0 <= options.held_out < 1, "--held-out", "is a share of the rows, in [0, 1)"),
        (options.workers >= 0, "--workers", "must not be negative"),
        (options.deadline > 0, "--deadline", "must be positive"),
        (options.show >= 0, "--show", "must not be negative"),
    ]
    for good, flag, message in rules:
        if not good:
            raise UserError(f"{flag} {message}")


def _announce(console: Console | None, files: list[sources.InputFile], remarks: list[str]) -> None:
    if console is None:
        return
    for remark in remarks:
        console.note(remark)
    for file in files[:20]:
        weight = f", weight {file.weight:g}" if file.weight != 1 else ""
        console.note(f"{file.name}: {file.format}{sources.first_shape(file)}{weight}")
    if len(files) > 20:
        console.note(f"... and {len(files) - 20} more files")


def _automatic_workers(files: list[sources.InputFile]) -> int:
    """None (0) for little input: starting processes takes longer than the work."""
    if sources.total_bytes(files) < PARALLEL_FROM:
        return 0
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return available if available > 1 else 0


def _fingerprint(options: PrepareOptions, side: TextSide, files: list[sources.InputFile]) -> str:
    """Two preparations with the same fingerprint write the same shards."""
    settings = {k: str(v) for k, v in dataclasses.asdict(options).items() if k not in _SAME_RESULT}
    parts = [settings, side.tokenizer_hash, side.template, side.tool_template, sources.fingerprint(files)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
