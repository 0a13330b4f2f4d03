"""What `regenerate` has got so far: an append-only file, a line a reply, so that no kill loses one or asks for it twice.

The first line names the job. A line that a kill cut off is dropped. Only places are held in memory, never replies.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from draftsmith.disk import lock
from draftsmith.errors import UserError

Message = dict[str, Any]


class Journal:
    """Replies by (row, number of the reply in the row), and rows that failed for good."""

    def __init__(self, path: Path, fingerprint: str):
        """Open or begin the journal at `path`. UserError if it belongs to another job or cannot be written."""
        self.path = path
        self._places: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.failed: dict[int, str] = {}
        self.tokens = 0
        self.cut = 0
        """Replies that ended at the token limit."""
        try:
            self._file = open(path, "a+b")
            lock(self._file, str(path))
            self._file.seek(0)
            if not self._take_over(fingerprint):
                self._write({"job": fingerprint})
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None

    def _take_over(self, fingerprint: str) -> bool:
        """Index the complete lines; cut off what follows the last one. Another job that got no reply leaves the place."""
        at, ours = 0, True
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                ours = record["job"] == fingerprint if at == 0 else ours
                if ours and at:
                    self._index(record, at, len(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._refused(f"damaged at byte {at}; delete it to drop its replies") from None
            at += len(line)
            if at > len(line) and not ours:
                raise self._refused(
                    "belongs to another job (other options or sources); repeat that command to finish it, "
                    "name another --out, or delete the file to drop its replies"
                )
        at = at if ours else 0
        self._file.truncate(at)
        self._file.seek(0, os.SEEK_END)
        return at > 0

    def _refused(self, why: str) -> UserError:
        self._file.close()
        return UserError(f"{self.path}: {why}")

    def count(self, row: int) -> int:
        """Replies of a row that are there, from the first on."""
        return len(self._places.get(row, ()))

    @property
    def replies(self) -> int:
        return sum(map(len, self._places.values()))

    def read(self, row: int) -> list[Message]:
        """The row's replies, in order."""
        found = []
        for _, (at, length) in sorted(self._places.get(row, {}).items()):
            found.append(json.loads(os.pread(self._file.fileno(), length, at))["message"])
        return found

    def add(self, row: int, message: Message, tokens: int) -> None:
        """Keep a reply, on its way to the disk before this returns."""
        record = {"row": row, "reply": self.count(row), "message": message, "tokens": tokens}
        self._index(record, *self._write(record))

    def fail(self, row: int, reason: str) -> None:
        """The row cannot be done. Another run of the same job tries again."""
        self.failed[row] = reason

    def _index(self, record: dict[str, Any], at: int, length: int) -> None:
        self._places[record["row"]][record["reply"]] = (at, length)
        self.tokens += record["tokens"]
        self.cut += record["message"].get("finish_reason") == "length"

    def _write(self, record: dict[str, Any]) -> tuple[int, int]:
        line = json.dumps(record).encode() + b"\n"
        at = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        return at, len(line)

    def close(self) -> None:
        """Every reply is in the file already; one that a full disk refused, still in the buffer, is not tried again."""
        self._file.raw.close()

    def remove(self) -> None:
        """The job is done."""
        self.close()
        self.path.unlink()
