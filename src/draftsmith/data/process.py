"""Rows -> documents: the part of `prepare` that worker processes do. A pure function of (target's text side, rules, rows).

Imports neither torch nor transformers.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftsmith.data.conversations import Conversation, PlainText, RowRules, TokenRow, detect_shape, parse_row
from draftsmith.data.encode import Document, Encoder
from draftsmith.data.mask import Masker, Rendered
from draftsmith.data.rendered import RenderedFinder
from draftsmith.data.shards import count_anchors
from draftsmith.data.sources import Chunk
from draftsmith.data.template import TemplateRefusal, TextSide
from draftsmith.data.tools import Rejection, without_nulls

_DETAIL = 300  # characters of a rejection's detail that are kept


@dataclass(frozen=True)
class ProcessRules:
    """What turns rows into documents, besides the target."""

    rows: RowRules = field(default_factory=RowRules)
    max_tokens: int = 4096
    truncate: bool = False
    mask_reasoning: bool = False
    held_out: float = 0.02
    seed: int = 0


class Rejected(NamedTuple):
    """A row that was not kept."""

    line: int
    reason: str
    detail: str


class ChunkResult(NamedTuple):
    """What became of a chunk: documents flat, in the rows' order, and the rejected rows."""

    file: int
    rows: int
    tokens: np.ndarray  # int32 [sum of lengths]
    mask: np.ndarray  # uint8 [sum of lengths]
    lengths: np.ndarray  # int64 [documents]
    anchors: np.ndarray  # int32 [documents]
    lines: np.ndarray  # int64 [documents], line or row number in the file
    held_out: np.ndarray  # bool [documents]
    copies: np.ndarray  # int64 [documents], times that the source's weight stores the document; 0: not drawn
    content: np.ndarray  # uint64 [documents], hash of the whole content
    rejected: list[Rejected]
    shapes: Counter[str]
    notes: Counter[str]


class RowProcessor:
    """Call it with a chunk. Caches what depends on the template alone."""

    def __init__(self, side: TextSide, rules: ProcessRules):
        self._rules, self._encoder = rules, Encoder(side)
        self._masker = Masker(side, rules.mask_reasoning) if side.template is not None else None
        self._finder = RenderedFinder(side) if side.template is not None else None

    def __call__(self, chunk: Chunk) -> ChunkResult:
        """Every row of the chunk is in the result once: as a document or as rejected."""
        rejected: list[Rejected] = []
        shapes: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        ready: list[tuple[int, Rendered | Document, np.ndarray]] = []
        rows = chunk.decoded()
        for line, row in zip(chunk.lines, rows, strict=True):
            try:
                ready.append((line, *self._read(row, shapes, notes, chunk.columnar)))
            except Rejection as no:
                rejected.append(Rejected(line, no.reason, no.detail[:_DETAIL]))
        texts = [item for _, item, _ in ready if isinstance(item, Rendered)]
        encoded = iter(self._encoder.encode(texts))
        documents: list[tuple[int, Document, np.ndarray]] = []
        for line, item, hashes in ready:
            try:
                document = self._fit(next(encoded) if isinstance(item, Rendered) else item, notes)
            except Rejection as no:
                rejected.append(Rejected(line, no.reason, no.detail[:_DETAIL]))
            else:
                documents.append((line, document, hashes))
        return _result(chunk, len(rows), documents, sorted(rejected), shapes, notes, self._rules)

    def _read(
        self, row: Any, shapes: Counter[str], notes: Counter[str], columnar: bool
    ) -> tuple[Rendered | Document, np.ndarray]:
        """(text with spans or a finished document, [prompt hash, content hash] uint64)."""
        if isinstance(row, bytes):
            row = decode_json(row)
        if isinstance(row, Rejection):
            raise row
        if columnar:
            row = without_nulls(row)
        parsed = parse_row(row, self._rules.rows)
        rules_shape = self._rules.rows.shape
        shapes[rules_shape if rules_shape != "auto" else str(detect_shape(row))] += 1
        try:
            hashes = content_hashes(parsed)
            return self._rendered(parsed, notes), hashes
        except UnicodeEncodeError:
            raise Rejection("lone-surrogate", "half of a UTF-16 pair, which is no character") from None
        except TemplateRefusal as error:
            raise Rejection("template-error", str(error)) from None

    def _rendered(self, parsed: Conversation | PlainText | TokenRow, notes: Counter[str]) -> Rendered | Document:
        if isinstance(parsed, TokenRow):
            return self._encoder.check_tokens(parsed.tokens, parsed.mask)
        if isinstance(parsed, PlainText) and not parsed.rendered:
            tokens = self._encoder.encode_text(self._bounded(Rendered(parsed.text, [], [])).text)
            return Document(tokens, np.ones(len(tokens), np.uint8))
        if self._masker is None or self._finder is None:
            raise Rejection("no-template", "the model has no chat template; give one with --chat-template FILE")
        if isinstance(parsed, PlainText):
            return self._bounded(self._finder.find(parsed.text, self._rules.rows.last_turn_only))
        rendered = self._masker.render(parsed)
        notes.update(rendered.notes)
        if parsed.dropped_tail:
            notes["turns-after-last-reply"] += parsed.dropped_tail
        return self._bounded(rendered)

    def _bounded(self, row: Rendered) -> Rendered:
        """Keep texts from the tokenizer that are far too long whatever it makes of them: it needs 200 bytes a byte."""
        most = self._rules.max_tokens * self._encoder.characters_per_token
        if len(row.text) <= most:
            return row
        if not self._rules.truncate:
            raise Rejection(
                "over-long", f"{len(row.text)} characters, far more than {self._rules.max_tokens} tokens hold"
            )
        spans = [(start, min(end, most)) for start, end in row.spans if start < most]
        if row.spans and not spans:
            raise Rejection("supervised-past-limit", f"its first supervised character is number {row.spans[0][0]}")
        return Rendered(row.text[:most], spans, [cut for cut in row.cuts if cut < most], row.notes)

    def _fit(self, document: Document | Rejection, notes: Counter[str]) -> Document:
        """Length limits and the need for an anchor."""
        if isinstance(document, Rejection):
            raise document
        length, limit = len(document.tokens), self._rules.max_tokens
        if length > limit:
            if not self._rules.truncate:
                raise Rejection("over-long", f"{length} tokens, at most {limit}")
            if not count_anchors(document.mask[:limit]) and count_anchors(document.mask):
                raise Rejection("supervised-past-limit", f"{length} tokens, no supervised pair in the first {limit}")
            document = Document(document.tokens[:limit], document.mask[:limit])
            notes["truncated"] += 1
        if not count_anchors(document.mask):
            raise Rejection("no-anchor", "no two supervised tokens in a row")
        return document


def decode_json(line: bytes) -> Any:
    """One JSON value from bytes; Rejection for bad UTF-8, bad JSON or a key that stands twice in an object."""
    try:
        return _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Rejection("invalid-utf8", f"byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise Rejection("invalid-json", str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(k for k, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise Rejection("duplicate-key", f"{twice!r} stands more than once in an object")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def content_hashes(parsed: Conversation | PlainText | TokenRow) -> np.ndarray:
    """[prompt hash, content hash], uint64. The prompt hash leaves out what the assistant says, so that replies of another
    model or another sample of replies fall into the same split. UnicodeEncodeError for lone surrogates."""
    prompt, whole = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    if isinstance(parsed, Conversation):
        for message in parsed.messages:
            extra = [v for k, v in message.items() if k not in ("role", "content")]
            tail = json.dumps(extra, ensure_ascii=False) if extra else ""
            data = f"{message['role']}\0{message['content']}\0{tail}\1".encode()
            whole.update(data)
            if message["role"] != "assistant":
                prompt.update(data)
        if parsed.tools:
            data = json.dumps(parsed.tools, ensure_ascii=False, sort_keys=True).encode()
            whole.update(data)
            prompt.update(data)
    else:
        data = parsed.text.encode() if isinstance(parsed, PlainText) else json.dumps(parsed.tokens).encode()
        whole.update(data)
        prompt.update(data)
    return np.frombuffer(prompt.digest() + whole.digest(), "<u8")


def _result(
    chunk: Chunk,
    rows: int,
    documents: list[tuple[int, Document, np.ndarray]],
    rejected: list[Rejected],
    shapes: Counter[str],
    notes: Counter[str],
    rules: ProcessRules,
) -> ChunkResult:
    hashes = np.array([h for _, _, h in documents], np.uint64).reshape(-1, 2)
    share = hashes[:, 0] / 2.0**64
    held_out = share < rules.held_out
    return ChunkResult(
        chunk.file,
        rows,
        np.concatenate([d.tokens for _, d, _ in documents] or [np.zeros(0, np.int32)]),
        np.concatenate([d.mask for _, d, _ in documents] or [np.zeros(0, np.uint8)]),
        np.array([len(d.tokens) for _, d, _ in documents], np.int64),
        np.array([count_anchors(d.mask) for _, d, _ in documents], np.int32),
        np.array([line for line, _, _ in documents], np.int64),
        held_out,
        _copies(hashes[:, 1], held_out, chunk.weight, rules.seed),
        hashes[:, 1],
        rejected,
        shapes,
        notes,
    )


def _copies(content: np.ndarray, held_out: np.ndarray, weight: float, seed: int) -> np.ndarray:
    """Copies of each document by its source's weight: the whole part for all, the rest for a share drawn by hash.
    Held-out documents are never repeated."""
    from draftsmith.unit import hash64

    whole = int(weight)
    drawn = hash64(seed, 0x77656967, content) / 2.0**64 < weight - whole
    copies = np.full(len(content), whole, np.int64) + drawn
    return np.where(held_out, np.minimum(copies, 1), copies)
