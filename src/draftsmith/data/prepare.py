"""`draftsmith prepare`: conversations -> token shards, with an account of every row.

    files -> rows -> conversation -> text with spans -> tokens with mask -> train / held_out shards
Rows in = rows kept + rows rejected by reason, checked before the corpus appears.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.conversations import Rejection, parse_row
from draftsmith.data.encode import Document, Encoder
from draftsmith.data.mask import Masker, Rendered
from draftsmith.data.options import PrepareOptions
from draftsmith.data.shards import FORMAT, SPLITS, Batch, Manifest, ShardWriter, count_anchors
from draftsmith.data.template import TemplateRefusal, load_text_side, load_tokenizer, template_hash, tokenizer_hash
from draftsmith.errors import UserError


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

    def summary(self) -> str:
        """The account in words, for the terminal."""
        lines = [f"{self.rows_in} rows in = {self.kept} kept + {sum(self.rejected.values())} rejected"]
        lines += [f"  rejected {count:>8}  {reason}" for reason, count in sorted(self.rejected.items())]
        for split, counts in self.splits.items():
            lines.append(
                f"  {split}: {counts['documents']} documents, {counts['tokens']} tokens, {counts['supervised']} supervised"
            )
        return "\n".join([*lines, f"corpus: {self.out}"])


def main(options: PrepareOptions) -> None:
    """`draftsmith prepare`."""
    report = prepare(options)
    print(report.summary())


def prepare(options: PrepareOptions) -> PrepareReport:
    """Write the corpus `options.out`. UserError when nothing can be kept or the destination is taken."""
    from draftsmith import models

    directory = models.resolve(options.model, options.revision)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    side = load_text_side(directory, options.chat_template, options.template_options, options.trust_remote_code, now)
    if side.template is None:
        raise UserError(f"{options.model}: the model has no chat template; give one with --chat-template FILE")
    settings = json.dumps({k: str(v) for k, v in asdict(options).items() if k not in ("show", "workers")})
    writer = ShardWriter(options.out, hashlib.sha256(settings.encode()).hexdigest(), options.overwrite)
    masker, encoder = Masker(side), Encoder(side)
    rejected: Counter[str] = Counter()
    splits = {split: Counter(documents=0, tokens=0, supervised=0, anchors=0) for split in SPLITS}
    histogram: Counter[int] = Counter()
    rows_in = kept = 0
    try:
        for place, row in _rows(options.sources):
            rows_in += 1
            try:
                document, split = _process(row, masker, encoder, options)
            except Rejection as no:
                rejected[no.reason] += 1
                line = {"file": place[0], "line": place[1], "reason": no.reason, "detail": no.detail}
                writer.append_line("rejected.jsonl", json.dumps(line).encode() + b"\n")
                continue
            kept += 1
            anchors = count_anchors(document.mask)
            length = len(document.tokens)
            writer.append(split, Batch(*document, np.array([length]), np.array([anchors])))
            splits[split].update(documents=1, tokens=length, supervised=int(document.mask.sum()), anchors=anchors)
            histogram[1 << (length - 1).bit_length()] += 1
        if rows_in != kept + sum(rejected.values()):
            raise RuntimeError(f"{rows_in} rows in, {kept} kept, {dict(rejected)} rejected: a row is lost")
        if not kept:
            worst = ", ".join(f"{reason} {count}" for reason, count in rejected.most_common(3)) or "no rows"
            raise UserError(f"{' '.join(options.sources)}: no row could be kept ({worst}); nothing was written")
        report = PrepareReport(
            options.out,
            rows_in,
            kept,
            dict(rejected),
            {split: dict(counts) for split, counts in splits.items()},
            {str(bound): histogram[bound] for bound in sorted(histogram)},
        )
        tokenizer = load_tokenizer(directory, options.trust_remote_code)
        manifest = Manifest(
            FORMAT,
            options.model,
            tokenizer_hash(tokenizer),
            side.vocab_size,
            template_hash(side.template, side.template_options, side.tool_template),
            str(options.chat_template.resolve()) if options.chat_template else None,
            dict(options.template_options),
            json.loads(json.dumps(asdict(options), default=str)),
            {"rows_in": rows_in, "kept": kept, "rejected": dict(rejected), "splits": report.splits},
            report.histogram,
        )
        writer.commit(
            manifest,
            json.loads(json.dumps(asdict(report), default=str)),
            {"chat_template.jinja": side.template.encode()},
        )
    except OSError as error:
        writer.discard()
        raise UserError(f"{options.out}: cannot be written: {error}; nothing was kept") from None
    except UserError:
        writer.discard()
        raise
    return report


def _rows(sources: tuple[str, ...]) -> Iterator[tuple[tuple[str, int], bytes]]:
    for source in sources:
        path = Path(source)
        if not path.is_file():
            raise UserError(f"{source}: no such file")
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield (source, number), line


def _process(line: bytes, masker: Masker, encoder: Encoder, options: PrepareOptions) -> tuple[Document, str]:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Rejection("invalid-utf8", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Rejection("invalid-json", str(error)) from None
    conversation = parse_row(row)
    try:
        rendered = masker.render(conversation)
        rendered.text.encode("utf-8")
    except TemplateRefusal as error:
        raise Rejection("template-error", str(error)) from None
    except UnicodeEncodeError:
        raise Rejection("lone-surrogate") from None
    if options.last_turn_only:
        rendered = Rendered(rendered.text, rendered.spans[-1:])
    (document,) = encoder.encode([rendered])
    if isinstance(document, Rejection):
        raise document
    if len(document.tokens) > options.max_tokens:
        if options.over_long == "reject":
            raise Rejection("over-long", f"{len(document.tokens)} tokens")
        document = Document(document.tokens[: options.max_tokens], document.mask[: options.max_tokens])
    if not count_anchors(document.mask):
        raise Rejection("no-anchor", "no two supervised tokens in a row")
    key = json.dumps([m for m in conversation.messages if m["role"] != "assistant"], sort_keys=True)
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return document, "held_out" if share < options.held_out else "train"
