"""The prepared corpus on disk: flat token, mask and offset files that training memory-maps, complete or absent.

DIR/manifest.json, report.json, rejected.jsonl and, for each split (train, held_out), DIR/SPLIT/ with
  tokens.bin   int32 little endian, all documents one after the other
  mask.bin     uint8, 1 = supervised, as long as tokens.bin
  offsets.bin  int64 [documents + 1], token number of each document's start
  anchors.bin  int32 [documents], valid anchors: positions a with mask[a] and mask[a+1]
Writing goes into a sibling directory that is moved into place when everything is on disk. Imports no torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

import numpy as np

from draftsmith.disk import check_object, flush, lock, read_object
from draftsmith.errors import UserError

FORMAT = 1
SPLITS = ("train", "held_out")
_FILES = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1"), "offsets": np.dtype("<i8"), "anchors": np.dtype("<i4")}
PIECE = 1 << 24  # tokens that are looked at together
_SAMPLES, _SAMPLE = 256, 1 << 14  # so many pieces of so many tokens tell one corpus from another
_BUFFER = 1 << 20  # bytes that each open file may hold back
_OURS = {
    *("manifest.json", "report.json", "rejected.jsonl", "chat_template.jinja", *SPLITS),
    *(f"{split}/{name}.bin" for split in SPLITS for name in _FILES),
    *(f"{mark}{split}.parquet{end}" for split in SPLITS for mark, end in (("", ""), (".", ".tmp"))),  # --parquet
}
"""Everything that a preparation leaves in DIR."""


@dataclass(frozen=True)
class Manifest:
    """What a corpus was made from and what is in it. Training compares the hashes with the target's (template.py)."""

    format: int
    model: str
    """The target as the user named it."""
    tokenizer_hash: str
    vocab_size: int
    template_hash: str | None
    """None: no row was rendered with a chat template."""
    chat_template: str | None = None
    """The file given with --chat-template, as an absolute path."""
    template_options: dict[str, bool | int | str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    """rows_in, kept, rejected {reason: rows}, and per split documents, tokens, supervised, anchors."""
    histogram: dict[str, int] = field(default_factory=dict)
    """Documents by length: {"upper bound in tokens": documents}, powers of two."""


class Corpus:
    """One split, memory-mapped. Opening costs no more than reading the offsets; documents are views into the map."""

    def __init__(self, directory: Path, split: str, manifest: Manifest):
        self.directory, self.split, self.manifest = directory, split, manifest
        folder = directory / split
        arrays = {name: _map(folder / f"{name}.bin", dtype) for name, dtype in _FILES.items()}
        self._tokens, self._mask, self.offsets = arrays["tokens"], arrays["mask"], np.asarray(arrays["offsets"])
        self.lengths = np.diff(self.offsets)  # [documents] int64
        self.anchor_counts = np.asarray(arrays["anchors"], np.int64)  # [documents]
        whole = len(self.offsets) and self.offsets[0] == 0 and self.offsets[-1] == len(self._tokens) == len(self._mask)
        if not whole or len(self.anchor_counts) != len(self.lengths) or (self.lengths < 0).any():
            raise UserError(f"{folder}: the files do not fit together; prepare the corpus again")
        self._check_anchors(folder)

    @classmethod
    def open(cls, directory: Path, split: str) -> Self:
        """Open `split` ("train" or "held_out") of a corpus. UserError if it is none, or of another format."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {SPLITS}")
        return cls(Path(directory), split, read_manifest(Path(directory)))

    def __len__(self) -> int:
        return len(self.lengths)

    def _check_anchors(self, folder: Path) -> None:
        """UserError unless anchors.bin fits the lengths and, in a few documents, the mask: reading all of it takes long."""
        some = np.unique(np.linspace(0, len(self) - 1, min(len(self), 64), dtype=np.int64)).tolist()
        counts = self.anchor_counts
        wrong = np.flatnonzero((counts < 0) | (counts > np.maximum(self.lengths - 1, 0))).tolist()
        wrong += [i for i in some if count_anchors(self.document(i)[1]) != counts[i]]
        if wrong:
            raise UserError(
                f"{folder}: anchors.bin has {counts[wrong[0]]} anchors for document {wrong[0]}, which its mask does not "
                "give; prepare the corpus again"
            )
        if len(self) and not counts.any():
            raise UserError(f"{folder}: no document has anything to train on; prepare the corpus again")

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [length], mask uint8 [length]) of one document, read-only views."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self._tokens[start:end], self._mask[start:end]

    def flat(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, mask) of the flat token numbers [start, end)."""
        return self._tokens[start:end], self._mask[start:end]

    def pieces(self) -> Iterator[np.ndarray]:
        """All tokens, PIECE at a time."""
        return (self._tokens[i : i + PIECE] for i in range(0, len(self._tokens), PIECE))


def identity(*splits: Corpus) -> str:
    """Tells corpora apart by what is in them, wherever they lie (sha256, 16 hex digits): the length and the anchors of
    every document, and the tokens and mask of all documents or, in a large corpus, of pieces spread over it."""
    digest = hashlib.sha256()
    for split in splits:
        for values in (split.offsets, split.anchor_counts):
            digest.update(np.ascontiguousarray(values))
        end = int(split.offsets[-1])
        pieces = min(_SAMPLES, -(-end // _SAMPLE))
        for start in np.linspace(0, max(0, end - _SAMPLE), pieces, dtype=np.int64).tolist():
            for values in split.flat(start, start + _SAMPLE):
                digest.update(values)
    return digest.hexdigest()[:16]


def read_manifest(directory: Path) -> Manifest:
    """manifest.json of a corpus directory."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise UserError(f"{directory}: not a prepared corpus (no manifest.json); `draftsmith prepare` writes one")
    again = "prepare the corpus again"
    values = read_object(path, {}, again)
    if (found := values.get("format")) != FORMAT:
        raise UserError(f"{path}: corpus format {found!r}, this version reads {FORMAT}; {again}")
    needed = {
        "model": str, "tokenizer_hash": str, "vocab_size": int, "template_options": dict, "counts": dict,
        "chat_template": str | None,
    }  # fmt: skip
    check_object(path, values, needed, again)
    rendered = (directory / "chat_template.jinja").exists()  # without a template to compare any would pass
    if "template_hash" not in values or rendered:
        check_object(path, values, {"template_hash": str}, again)
    known = {f.name for f in fields(Manifest)}
    return Manifest(**{name: value for name, value in values.items() if name in known})


def check_free(out: Path, overwrite: bool) -> None:
    """UserError unless a corpus may be written to `out` without the loss of anything but, with `overwrite`, an old corpus."""
    if out.is_symlink():
        raise UserError(f"{out}: is a link; name the directory itself")
    if not out.exists():
        return
    corpus = (out / "manifest.json").is_file() and (out / "train" / "offsets.bin").is_file()
    if not out.is_dir() or (not corpus and any(out.iterdir())):
        raise UserError(f"{out}: exists already and is no prepared corpus; name another --out, or delete it yourself")
    for path in out.rglob("*"):
        if str(path.relative_to(out)) not in _OURS:
            raise UserError(f"{path}: is no part of the corpus {out}; move it elsewhere, or name another --out")
    if not overwrite:
        raise UserError(f"{out}: exists already; name another directory, or add --overwrite")


def count_anchors(mask: np.ndarray) -> int:
    """Valid anchors of one document's mask [n]: positions that are supervised and followed by a supervised one."""
    return int(np.count_nonzero(mask[:-1] & mask[1:]))


@dataclass(frozen=True)
class Batch:
    """Documents for one split, flat."""

    tokens: np.ndarray  # int32 [sum of lengths]
    mask: np.ndarray  # uint8 [sum of lengths]
    lengths: np.ndarray  # int64 [documents]
    anchors: np.ndarray  # int32 [documents]


class ShardWriter:
    """Writes a corpus beside its final place. `commit` makes it appear; until then `save_progress` makes it resumable.

    A preparation that was interrupted leaves its directory; the next writer with the same fingerprint goes on there.
    """

    def __init__(self, out: Path, fingerprint: str, overwrite: bool = False):
        self.out, self.overwrite = Path(out), overwrite
        self.staging = self.out.with_name(f".{self.out.name}.unfinished")
        self.progress: dict[str, Any] | None = None
        """State saved by the interrupted preparation that this one continues; None at a fresh start."""
        self._fingerprint, self._files = fingerprint, {}
        check_free(self.out, overwrite)
        self._lock = self._hold()
        self._sizes = self._take_over()
        for name in self._names():
            self._files[name] = self._open(name)
        if self.progress is None:
            for split in SPLITS:
                self._files[f"{split}/offsets.bin"].write(np.zeros(1, _FILES["offsets"]).tobytes())
        self._ends = {split: self._files[f"{split}/tokens.bin"].tell() // _FILES["tokens"].itemsize for split in SPLITS}

    def append(self, split: str, batch: Batch) -> None:
        """Add documents in order. OSError (disk full) leaves what `save_progress` covered."""
        if not len(batch.lengths):
            return
        ends = self._ends[split] + np.cumsum(batch.lengths)
        self._ends[split] = int(ends[-1])
        for name, values in (
            ("tokens", batch.tokens),
            ("mask", batch.mask),
            ("offsets", ends),
            ("anchors", batch.anchors),
        ):
            self._files[f"{split}/{name}.bin"].write(np.ascontiguousarray(values, _FILES[name]).data)

    def append_line(self, name: str, line: bytes) -> None:
        """Add a line to rejected.jsonl or to another text file among `_names`."""
        self._files[name].write(line)

    def saved_hashes(self) -> np.ndarray:
        """Content hashes (uint64) of the documents that an interrupted preparation kept."""
        self._files["hashes.bin"].flush()
        return np.fromfile(self.staging / "hashes.bin", "<u8")

    def shuffle(self, seed: int) -> None:
        """Put each split's documents into an order drawn from `seed`, with memory for little more than the order."""
        self.close()
        for split in SPLITS:
            _shuffle_split(self.staging / split, seed)

    def save_progress(self, state: dict[str, Any]) -> None:
        """Everything appended so far, with `state`, survives a kill."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        record = {"fingerprint": self._fingerprint, "sizes": sizes, "state": state}
        _write(self.staging / "progress.json", json.dumps(record).encode())

    def commit(self, manifest: Manifest, report: dict[str, Any], extra: dict[str, bytes]) -> None:
        """Put manifest.json, report.json and `extra` files beside the shards and move everything into place."""
        self.close()
        check_free(self.out, self.overwrite)  # it may have appeared, or been added to, in the meantime
        documents = {"manifest.json": asdict(manifest), "report.json": report}
        for name, value in documents.items():
            _write(self.staging / name, json.dumps(value, indent=1, ensure_ascii=False).encode())
        for name, content in extra.items():
            _write(self.staging / name, content)
        for name in ("progress.json", "hashes.bin", "lock"):
            (self.staging / name).unlink(missing_ok=True)
        flush(self.staging)
        old = self.out.with_name(f".{self.out.name}.old")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.out, old)
        os.rename(self.staging, self.out)
        self._lock.close()
        flush(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Flush and close the files; safe to call twice."""
        for file in self._files.values():
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def discard(self) -> None:
        """Close and remove the unfinished directory."""
        for file in self._files.values():
            file.raw.close() if hasattr(file, "raw") else file.close()
        self._lock.close()
        shutil.rmtree(self.staging, ignore_errors=True)

    def _hold(self) -> TextIO:
        """The unfinished directory, made if need be, and its lock; UserError where another process prepares there."""
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            file = (self.staging / "lock").open("a")
        except OSError as error:
            raise UserError(f"{self.out}: cannot be written: {error}") from None
        lock(file, str(self.staging))
        return file

    def _take_over(self) -> dict[str, int]:
        """Sizes to go on from, after checking that the unfinished directory belongs to this preparation."""
        record = self.staging / "progress.json"
        saved = json.loads(record.read_text()) if record.exists() else None
        if saved is not None and saved["fingerprint"] == self._fingerprint:
            self.progress = saved["state"]
            return saved["sizes"]
        if saved is not None and not self.overwrite:
            self._lock.close()
            raise UserError(
                f"{self.staging}: holds an unfinished preparation with other options or inputs; repeat it to finish "
                "it, or drop it with --overwrite"
            )
        try:
            record.unlink(missing_ok=True)  # first, since it vouches for the rest
            for path in self.staging.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            for split in SPLITS:
                (self.staging / split).mkdir()
        except OSError as error:
            raise UserError(f"{self.out}: cannot be written: {error}") from None
        return {}

    def _names(self) -> list[str]:
        return ["rejected.jsonl", "hashes.bin"] + [f"{split}/{name}.bin" for split in SPLITS for name in _FILES]

    def _open(self, name: str) -> BinaryIO:
        path = self.staging / name
        if name not in self._sizes:
            return open(path, "wb", buffering=_BUFFER)
        file = open(path, "r+b", buffering=_BUFFER)
        file.truncate(self._sizes[name])
        file.seek(self._sizes[name])
        return file


def _shuffle_split(folder: Path, seed: int) -> None:
    from draftsmith.unit import hash64

    old = {name: _map(folder / f"{name}.bin", dtype) for name, dtype in _FILES.items()}
    lengths = np.diff(old["offsets"])
    order = np.argsort(hash64(seed, 0x73687566, np.arange(len(lengths))), kind="stable")
    new = {
        "offsets": np.concatenate([[0], np.cumsum(lengths[order])]).astype(_FILES["offsets"]),
        "anchors": old["anchors"][order],
    }
    for name in ("tokens", "mask"):
        with open(folder / f".{name}.shuffled", "wb", buffering=_BUFFER) as file:
            for index in order.tolist():
                file.write(old[name][old["offsets"][index] : old["offsets"][index + 1]].data)
            file.flush()
            os.fsync(file.fileno())
    for name, values in new.items():
        _write(folder / f".{name}.shuffled", np.ascontiguousarray(values).tobytes())
    for name in _FILES:
        os.replace(folder / f".{name}.shuffled", folder / f"{name}.bin")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; prepare the corpus again") from None


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
