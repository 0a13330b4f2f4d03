"""Making sure that what was written is on the disk. Imports no torch."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
