"""`prepare --show N`: documents as text, what is trained on in colour."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from draftsmith.data.shards import Corpus


def show_documents(directory: Path, tokenizer: Any, count: int, console: Console | None = None) -> None:
    """Print the first `count` training documents, decoded by the target's `tokenizer`.

    Supervised tokens are green and underlined, so that they show without colours too.
    """
    console = console or Console(highlight=False, markup=False)
    corpus = Corpus.open(directory, "train")
    for index in range(min(count, len(corpus))):
        tokens, mask = corpus.document(index)
        console.rule(f"document {index}: {len(tokens)} tokens, {int(mask.sum())} supervised")
        text = Text()
        for start, end in _runs(mask):
            part = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
            text.append(part, style="green underline" if mask[start] else "dim")
        console.print(text, soft_wrap=True)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return list(zip(edges, edges[1:], strict=False))
