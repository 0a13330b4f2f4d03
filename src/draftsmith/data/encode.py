"""Text with supervised spans -> tokens with a loss mask, in one pass of the tokenizer with offsets."""

from typing import NamedTuple

import numpy as np

from draftsmith.data.conversations import Rejection
from draftsmith.data.mask import Rendered
from draftsmith.data.template import TextSide


class Document(NamedTuple):
    """One row ready to store."""

    tokens: np.ndarray  # int32 [n]
    mask: np.ndarray  # uint8 [n]


class Encoder:
    """The target's tokenizer with plain offsets."""

    def __init__(self, side: TextSide):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(side.tokenizer_json)
        # Its post-processor trims spaces off the offsets; the special tokens it would add are in the template.
        self._tokenizer.post_processor = None
        self._vocab_size = side.vocab_size

    def encode(self, rows: list[Rendered]) -> list[Document | Rejection]:
        """Tokens and masks, row by row."""
        encodings = self._tokenizer.encode_batch([row.text for row in rows], add_special_tokens=False)
        return [self._document(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]

    def _document(self, row: Rendered, encoding) -> Document | Rejection:
        tokens = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(tokens), np.uint8)
        if len(tokens) and tokens.max() >= self._vocab_size:
            return Rejection("token-out-of-range", f"token {tokens.max()} of a vocabulary of {self._vocab_size}")
        for start, end in row.spans:
            first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
            if first is None or last is None or encoding.token_to_chars(first)[0] != start:
                return Rejection("mask-not-proved", f"character {start} lies inside a token")
            mask[first : last + 1] = 1
        return Document(tokens, mask)
