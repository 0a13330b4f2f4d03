"""What the user named -> input files with their formats and weights, and chunks of rows read from them in order.

Missing or unreadable files stop `prepare` before it begins; a file that turns out broken half-way gives its good rows
and one rejected row that says where it broke.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data import readers
from draftsmith.data.options import Format
from draftsmith.data.tools import Rejection
from draftsmith.errors import UserError

_EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
_PACKED = ("", ".gz", ".zst")


@dataclass(frozen=True)
class InputFile:
    """One file (or standard input, or hub data set) of a source."""

    name: str
    """As it is shown and recorded."""
    path: Path | None
    format: str
    weight: float = 1.0


@dataclass(frozen=True)
class Chunk:
    """Rows next to each other in a file, the unit of work. `rows`: JSON bytes, decoded rows, Rejections, or Arrow data."""

    file: int
    lines: list[int]
    rows: Any
    weight: float
    columnar: bool = False

    def decoded(self) -> list[Any]:
        """Rows as bytes (JSON), objects or Rejections."""
        return self.rows.to_pylist() if self.columnar else self.rows


def expand(sources: tuple[str, ...], chosen: Format) -> tuple[list[InputFile], list[str]]:
    """(input files in order, remarks for the user). UserError for sources that are not there."""
    if not sources:
        raise UserError("name at least one source: a file, a folder, a glob, - for standard input, or a hub id")
    files: list[InputFile] = []
    remarks: list[str] = []
    for source in sources:
        name, weight = _weight(source)
        if name == "-":
            files.append(InputFile("-", None, chosen, weight))
            continue
        paths = _paths(name, remarks)
        if paths is None:
            files.append(InputFile(name, None, "hub", weight))
            continue
        if not paths:
            raise UserError(f"{name}: has no data files ({', '.join(_EXTENSIONS)}, each also with .gz or .zst)")
        for path in paths:
            files.append(
                InputFile(str(path), path, readers.detect_format(path) if chosen == "auto" else chosen, weight)
            )
    return files, remarks


def read_chunks(files: list[InputFile], rows: int, size: int) -> Iterator[Chunk]:
    """All rows of all files in order, at most `rows` rows and about `size` bytes a chunk."""
    for number, file in enumerate(files):
        for lines, part, columnar in readers.read(file.path, file.name, file.format, rows, size):
            yield Chunk(number, lines, part, file.weight, columnar)


def first_shape(file: InputFile) -> str:
    """ ", SHAPE" of a file's first good row, for the user; "" where it has none or may not be read ahead."""
    from draftsmith.data.conversations import detect_shape
    from draftsmith.data.process import decode_json

    if file.path is None:
        return ""
    chunk = next(read_chunks([file], 8, 1 << 16), None)
    for row in chunk.decoded() if chunk else []:
        try:
            row = decode_json(row) if isinstance(row, bytes) else row
        except Rejection:
            continue
        shape = detect_shape(row) if isinstance(row, dict) else None
        if shape:
            return f", {shape}"
    return ""


def fingerprint(files: list[InputFile]) -> list[Any]:
    """What tells that the inputs are the same as before an interruption; standard input never is."""
    out: list[Any] = []
    for file in files:
        if file.path is None:
            out.append([file.name, os.urandom(8).hex() if file.name == "-" else ""])
        else:
            stat = file.path.stat()
            out.append([file.name, file.format, file.weight, stat.st_size, stat.st_mtime_ns])
    return out


def check_apart(out: Path, files: list[InputFile], others: Sequence[Path | None]) -> None:
    """UserError where `out`, which will be replaced, is one of the inputs or a folder that holds one."""
    place = out.resolve()
    for path in (*(file.path for file in files), *others):
        if path is not None and place in ((real := path.resolve()), *real.parents):
            what = "is read by this command" if place == real else f"holds {path}, which this command reads"
            raise UserError(f"{out}: {what} and would be replaced; name another --out")


def total_bytes(files: list[InputFile]) -> int:
    """Size of the files on disk; 0 for what has none."""
    return sum(file.path.stat().st_size for file in files if file.path is not None)


def _weight(source: str) -> tuple[str, float]:
    name, mark, weight = source.rpartition("::")
    if not mark:
        return source, 1.0
    try:
        value = float(weight)
    except ValueError:
        raise UserError(f"{source}: the weight after :: is no number") from None
    if not 0 < value <= 1000:
        raise UserError(f"{source}: the weight after :: must be above 0 and at most 1000")
    return name, value


def _paths(name: str, remarks: list[str]) -> list[Path] | None:
    """Files behind a name; None for a hub id."""
    path = Path(name)
    if path.is_dir():
        return _folder(path, remarks)
    if path.exists():
        return [_readable(path)]
    if glob.has_magic(name):
        found = sorted(glob.glob(name, recursive=True))
        if not found:
            raise UserError(f"{name}: matches no file")
        return [f for p in found for f in (_folder(Path(p), remarks) if Path(p).is_dir() else [_readable(Path(p))])]
    if readers.HUB_ID.fullmatch(name) and not name.endswith(_EXTENSIONS):
        return None
    if path.is_symlink():
        raise UserError(f"{name}: is a link that leads nowhere")
    raise UserError(f"{name}: no such file")


def _folder(path: Path, remarks: list[str]) -> list[Path]:
    """Data files below a folder, sorted. A saved data set is read as `datasets` wrote it; of several splits, train."""
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = _json(splits).get("splits", [])
        split = "train" if "train" in names or not names else names[0]
        if len(names) > 1:
            remarks.append(f"{path}: only its split {split!r} is read; name the folder of another split to read that")
        return _folder(path / split, remarks)
    state = path / "state.json"
    if state.is_file() and (path / "dataset_info.json").is_file():
        return [_readable(path / item["filename"]) for item in _json(state).get("_data_files", [])]
    corpora = {mark.parent.parent for mark in path.rglob("train/offsets.bin")}
    remarks += [f"{corpus}: is a prepared corpus and was left out" for corpus in sorted(corpora)]
    found, ignored = [], []
    for file in sorted(path.rglob("*")):
        if not file.is_file() or any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if not corpora.isdisjoint(file.parents):
            continue
        stem = file.name.lower()
        known = any(stem.endswith(ext + packed) for ext in _EXTENSIONS for packed in _PACKED)
        (found if known else ignored).append(file)
    if ignored:
        shown = ", ".join(file.name for file in ignored[:3]) + (", ..." if len(ignored) > 3 else "")
        remarks.append(f"{path}: {len(ignored)} files are no data files and were left out ({shown})")
    return [_readable(file) for file in found]


def _readable(path: Path) -> Path:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}
