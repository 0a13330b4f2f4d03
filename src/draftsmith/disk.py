"""Making sure that what is written can be, overwrites nothing, and is on the disk. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from draftsmith.errors import UserError


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def reserved(out: Path) -> Iterator[TextIO]:
    """A new file, made before long work so that a place that cannot be written is known then; gone if the work fails."""
    if out.exists():
        raise UserError(f"{out}: exists already; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("x", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from None
    done = False
    try:
        with file:
            yield file
        done = True
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from None
    finally:
        if not done:
            out.unlink(missing_ok=True)
