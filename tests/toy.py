"""A corpus in memory for tests of the unit law and of everything built on it."""

from pathlib import Path

import numpy as np

from draftsmith.unit import valid_anchors


class MemoryCorpus:
    """unit.Documents over lists of (tokens, loss mask)."""

    def __init__(self, documents: list[tuple[np.ndarray, np.ndarray]]):
        self.documents = documents
        self.lengths = np.array([len(t) for t, _ in documents], np.int64)
        self.anchor_counts = np.array([len(valid_anchors(m)) for _, m in documents], np.int64)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.documents[index]


def random_corpus(lengths, vocab: int = 50, seed: int = 0) -> MemoryCorpus:
    """Documents with a prompt, a supervised answer and, in every third, a second turn."""
    rng = np.random.default_rng(seed)
    documents = []
    for i, n in enumerate(lengths):
        tokens = rng.integers(0, vocab, n).astype(np.int32)
        mask = np.zeros(n, np.uint8)
        prompt = int(n * rng.uniform(0.1, 0.6))
        mask[prompt:] = 1
        if i % 3 == 0 and n > 12:
            gap = prompt + (n - prompt) // 2
            mask[gap : gap + 3] = 0
        documents.append((tokens, mask))
    return MemoryCorpus(documents)


def write_corpus(directory: Path, split: str, corpus: MemoryCorpus) -> None:
    """The files of one prepared split (layout: data/shards.py)."""
    out = directory / split
    out.mkdir(parents=True)
    tokens = np.concatenate([t for t, _ in corpus.documents]).astype("<i4")
    mask = np.concatenate([m for _, m in corpus.documents]).astype(np.uint8)
    tokens.tofile(out / "tokens.bin")
    mask.tofile(out / "mask.bin")
    np.concatenate(([0], np.cumsum(corpus.lengths))).astype("<i8").tofile(out / "offsets.bin")
    corpus.anchor_counts.astype("<i4").tofile(out / "anchors.bin")
