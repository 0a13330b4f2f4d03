"""Files of our own: written without overwriting any, made to be on the disk, read with their keys checked. Imports no torch."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from draftsmith.errors import UserError
from draftsmith.kinds import misfit


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


def read_object(path: Path, keys: dict[str, Any], remedy: str) -> dict[str, Any]:
    """The JSON object in a file that we once wrote; UserError, with what to do, where a key is not of its kind."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; {remedy}")
    check_object(path, values, keys, remedy)
    return values


def check_object(path: Path, values: dict[str, Any], keys: dict[str, Any], remedy: str) -> None:
    """UserError where a key of what was read from a file is not of its kind."""
    for key, kind in keys.items():
        if (wrong := misfit(values.get(key), kind, key)) is not None:
            raise UserError(f"{path}: {wrong if key in values else f'{key} is missing'}; {remedy}")


def lock(file: IO[Any], what: str) -> None:
    """Hold an open file for this process until it is closed or the process ends, however it ends; UserError where
    another process holds it. File systems without locks let everybody pass."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{what}: another process is writing it; wait for it, or end it") from None
    except OSError:
        return
