"""Files of every accepted format -> rows with their line or row numbers, streaming, in bounded memory.

`read` yields (numbers, rows, columnar): JSON bytes for workers to decode, objects, Rejections for rows that cannot even
be delimited, or Arrow data. A file that breaks half-way ends with one Rejection("unreadable-file").
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.data.tools import Rejection
from draftsmith.errors import UserError, first_line

Rows = Iterator[tuple[int, Any]]
Part = tuple[list[int], Any, bool]

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(?::[\w.-]+)?(?:@[\w.-]+)?")
MAX_ROW = 64 << 20  # bytes of one row; longer ones are rejected without being held in memory
_BLOCK = 1 << 20
_WRAPPERS = re.compile(rb'\s*\{\s*"(data|rows|train|examples|instances|items)"\s*:\s*\[')
_LIST = re.compile(rb"\[\s*\{|\[\s*\n")  # how a list of rows begins, as against a row that is a list
_BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, OSError)


def detect_format(path: Path | None, stream: io.BufferedReader | None = None) -> str:
    """jsonl, json, csv, tsv, parquet or arrow: by the first bytes, then by the name."""
    name = path.name.lower() if path else ""
    if path is not None:
        with open(path, "rb") as file:
            magic = file.read(8)
        if magic[:4] == b"PAR1":
            return "parquet"
        if magic[:6] == b"ARROW1" or magic[:4] == b"\xff\xff\xff\xff":
            return "arrow"
        for ending in (".gz", ".zst"):
            name = name.removesuffix(ending)
        if name.endswith((".parquet", ".arrow", ".feather", ".csv", ".tsv")):
            return {".feather": "arrow"}.get(Path(name).suffix, Path(name).suffix[1:])
    try:
        stream = stream or open_stream(path)
        head = stream.peek(_BLOCK)[:_BLOCK].removeprefix(b"\xef\xbb\xbf").lstrip()
    except _BROKEN:
        return "jsonl"  # reading it gives the rejection
    lines = name.endswith((".jsonl", ".ndjson")) and not _LIST.match(head)
    return "json" if not lines and _is_json_document(head) else "jsonl"


def _is_json_document(head: bytes) -> bool:
    """One JSON value over many lines, or an array; as against an object a line."""
    if head[:1] == b"[" or _WRAPPERS.match(head):
        return True
    if head[:1] != b"{" or b"\n" not in head:
        return False
    first = head[: head.index(b"\n")].strip()
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return first in (b"{",) or first.endswith((b",", b"[", b"{"))  # pretty-printed
    return False


def open_stream(path: Path | None) -> io.BufferedReader:
    """The file's content, unpacked by its first bytes (gzip, zstd); standard input for None."""
    raw = sys.stdin.buffer if path is None else open(path, "rb", buffering=_BLOCK)
    magic = raw.peek(4)[:4] if isinstance(raw, io.BufferedReader) else b""
    if magic[:2] == b"\x1f\x8b":
        # read1, not read: one step at a time, so that a cut-off file gives what is there before it fails
        return io.BufferedReader(_Unpacked(gzip.GzipFile(fileobj=raw).read1), _BLOCK)
    if magic == b"\x28\xb5\x2f\xfd":
        import pyarrow

        return io.BufferedReader(_Unpacked(pyarrow.CompressedInputStream(raw, "zstd").read), _BLOCK)
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BLOCK)


class _Unpacked(io.RawIOBase):
    """A decompressor's read(count) as Python's raw stream."""

    def __init__(self, read: Callable[[int], bytes]):
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read(path: Path | None, name: str, kind: str, rows: int, size: int) -> Iterator[Part]:
    """Chunks of a file. `kind` is a format of `detect_format`, "hub", or "auto" for standard input."""
    if kind in ("parquet", "arrow"):
        yield from _arrow_parts(path, kind, rows)
        return
    if kind == "hub":
        yield from _batched(_hub_rows(name), rows, size)
        return
    stream = None
    if kind == "auto":
        stream = open_stream(path)
        kind = detect_format(path, stream)
    readers: dict[str, Callable[[BinaryIO], Rows]] = {
        "jsonl": _jsonl_rows,
        "json": _json_rows,
        "csv": lambda s: _csv_rows(s, "\t" if ".tsv" in name.lower() else ","),
        "tsv": lambda s: _csv_rows(s, "\t"),
    }
    yield from _batched(_guarded(readers[kind], path, stream), rows, size)


def _guarded(reader: Callable[[BinaryIO], Rows], path: Path | None, stream: io.BufferedReader | None) -> Rows:
    """Rows until the file breaks, then a Rejection for the next number."""
    number = 0
    try:
        stream = stream or open_stream(path)
        bom = stream.peek(4)[:4]
        if bom[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise Rejection("unreadable-file", "UTF-16; save the file as UTF-8")
        if bom[:3] == b"\xef\xbb\xbf":
            stream.read(3)
        for number, row in reader(stream):  # noqa: B007 - the number is needed when the next one fails
            yield number, row
    except Rejection as no:
        yield number + 1, no
    except _BROKEN as error:
        yield number + 1, Rejection("unreadable-file", f"breaks after row {number}: {error}")
    finally:
        if stream is not None and path is not None:
            stream.close()


def _batched(rows: Rows, count: int, size: int) -> Iterator[Part]:
    """Group rows; text rows also by their bytes, objects by a guess of 1 KiB each."""
    lines: list[int] = []
    held: list[Any] = []
    weight = 0
    for line, row in rows:
        lines.append(line)
        held.append(row)
        weight += len(row) if isinstance(row, bytes) else 1024
        if len(held) >= count or weight >= size:
            yield lines, held, False
            lines, held, weight = [], [], 0
    if held:
        yield lines, held, False


def _jsonl_rows(stream: BinaryIO) -> Rows:
    number = 0
    while line := stream.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            while line and not line.endswith(b"\n"):
                line = stream.readline(_BLOCK)
            yield number, Rejection("row-too-big", f"more than {MAX_ROW >> 20} MiB")
        elif not line.isspace():
            yield number, line


def _json_rows(stream: BinaryIO) -> Rows:
    """Rows of an array, of an object's row list ({"data": [...]}), or objects one after the other (pretty-printed)."""
    buffer = _JsonBuffer(stream)
    head = buffer.peek()
    wrapper = _WRAPPERS.match(head.encode("utf-8", "surrogateescape"))
    if wrapper:
        buffer.skip(len(wrapper[0].decode()))
    elif head[:1] == "[":
        buffer.skip(1)
    inside = bool(wrapper) or head[:1] == "["
    number = 0
    while (start := buffer.peek()[:1]) and not (inside and start == "]"):
        if start == ",":
            buffer.skip(1)
            continue
        number += 1
        yield number, buffer.value(number)
    if inside and not start:
        raise Rejection("unreadable-file", f"the list is cut off after row {number}")


class _JsonBuffer:
    """Decodes JSON values one after the other from a stream, holding little more than one of them."""

    def __init__(self, stream: BinaryIO):
        self._text, self._at = "", 0
        self._decode = json.JSONDecoder(object_pairs_hook=self._object).raw_decode
        self._twice: str | None = None
        self._bytes = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")

    def peek(self) -> str:
        """Text from the next thing that is no whitespace; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text) or not self._fill(_BLOCK):
                return self._text[self._at : self._at + 256]

    def skip(self, count: int) -> None:
        self._at += count

    def value(self, number: int) -> Any:
        """The next value. Rejection where there is none: what follows cannot be delimited any more."""
        need = _BLOCK
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                text, self._at = self._text[self._at : end], end
                return self._checked(value, text)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - 16
                self._twice = None
                if cut_off and len(self._text) - self._at < MAX_ROW and self._fill(need):
                    need *= 2
                    continue
                raise Rejection("unreadable-file", f"row {number} is no JSON ({error.msg}); the rest is lost") from None
            except (RecursionError, ValueError) as error:
                raise Rejection("unreadable-file", f"row {number}: {error}; the rest is lost") from None

    def _fill(self, count: int) -> bool:
        more = self._bytes.read(count)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            self._twice = next(key for key in keys if keys.count(key) > 1)
        return values

    def _checked(self, value: Any, text: str) -> Any:
        twice, self._twice = self._twice, None
        if twice is not None:
            return Rejection("duplicate-key", f"{twice!r} stands more than once in an object")
        return value if _is_text(text) else Rejection("invalid-utf8", "bytes that are no UTF-8")


def _is_text(text: str) -> bool:
    """Whether bytes that were read with surrogateescape were UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _csv_rows(stream: BinaryIO, delimiter: str) -> Rows:
    csv.field_size_limit(MAX_ROW)
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                yield reader.line_num, Rejection("bad-csv-row", "more or fewer fields than the header has")
            elif not _is_text("".join(row.values())):
                yield reader.line_num, Rejection("invalid-utf8", "bytes that are no UTF-8")
            else:
                yield reader.line_num, {key: value for key, value in row.items() if value != ""}
    except csv.Error as error:
        raise Rejection("unreadable-file", f"line {reader.line_num}: {error}") from None


def _arrow_parts(path: Path | None, kind: str, rows: int) -> Iterator[Part]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        if kind == "parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=rows)
        else:
            batches = _arrow_batches(path)
        for batch in batches:
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                yield list(range(number + 1, number + 1 + part.num_rows)), part, True
                number += part.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        yield [number + 1], [Rejection("unreadable-file", f"breaks after row {number}: {first_line(error)}")], False


def _arrow_batches(path: Path | None) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)


def _hub_rows(name: str) -> Rows:
    """Rows of ORG/NAME[:CONFIG][@SPLIT] (split train by default), streamed by `datasets`."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(f"{name}: reading from the hub needs more packages: pip install 'draftsmith[hub]'") from None
    place, _, split = name.partition("@")
    place, _, config = place.partition(":")
    try:
        data = datasets.load_dataset(place, config or None, split=split or "train", streaming=True)
        yield from enumerate(data, 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: no such file, and as a hub data set it cannot be read: {first_line(error)}") from None
