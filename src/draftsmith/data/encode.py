"""Text with supervised spans -> tokens with a loss mask, in one pass of the tokenizer with offsets.

A span must begin where a token begins. Where a token reaches across (a reply whose first characters the tokenizer joins
with the prompt's last), the text is tokenised in two pieces there: that is how a server sees prompt and reply.
"""

from typing import Any, NamedTuple

import numpy as np

from draftsmith.data.mask import Rendered
from draftsmith.data.template import TextSide
from draftsmith.data.tools import Rejection

_FEW = 32  # spans that are looked up one by one in the tokenizer; each look-up walks the tokens


class Document(NamedTuple):
    """One row ready to store."""

    tokens: np.ndarray  # int32 [n]
    mask: np.ndarray  # uint8 [n]


class Encoder:
    """The target's tokenizer with plain offsets, no truncation, no added tokens."""

    def __init__(self, side: TextSide):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(side.tokenizer_json)
        # Its post-processor trims spaces off the offsets; the special tokens it would add are in the template.
        self._tokenizer.post_processor = None
        self._vocab_size = side.vocab_size
        self._anchor = self._find_anchor(side.special_tokens)
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.characters_per_token = 4 * longest
        """No text has more characters a token (four times the longest token, for tokenizers that normalize)."""

    def encode(self, rows: list[Rendered]) -> list[Document | Rejection]:
        """Tokens and masks, row by row."""
        encodings = self._tokenizer.encode_batch([row.text for row in rows], add_special_tokens=False)
        return [self._document(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]

    def encode_text(self, text: str) -> np.ndarray:
        """Plain text, in which special tokens' text is text: int32 [n]."""
        self._tokenizer.encode_special_tokens = True
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        finally:
            self._tokenizer.encode_special_tokens = False

    def check_tokens(self, tokens: list[int], mask: list[int]) -> Document:
        """Tokens that came as ids. Rejection for ids outside the vocabulary."""
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise Rejection("token-out-of-range", f"id {bad}, vocabulary of {self._vocab_size}")
        return Document(np.array(tokens, np.int32), np.array(mask, np.uint8))

    def _document(self, row: Rendered, encoding: Any) -> Document | Rejection:
        if row.cuts:
            return self._in_pieces(row, row.cuts)
        tokens = np.array(encoding.ids, np.int32)
        if len(row.spans) <= _FEW:
            ranges = [_look_up(encoding, len(tokens), len(row.text), span) for span in row.spans]
            if None not in ranges:
                return self._checked(tokens, ranges)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return self._by_offsets(row, tokens, offsets, [])

    def _by_offsets(
        self, row: Rendered, tokens: np.ndarray, offsets: np.ndarray, cuts: list[int]
    ) -> Document | Rejection:
        """Find spans in offsets [n, 2]; a start inside a token becomes a cut, once."""
        starts, ends = offsets[:, 0], offsets[:, 1]
        if (np.diff(starts) < 0).any() or (np.diff(ends) < 0).any():
            return Rejection("mask-not-proved", "the tokenizer's offsets go backwards")
        first = np.searchsorted(starts, [span[0] for span in row.spans], "left")
        last = np.searchsorted(starts, [span[1] for span in row.spans], "left")
        across = [s[0] for s, at in zip(row.spans, first, strict=True) if at and ends[at - 1] > s[0]]
        if across and not set(across) & set(cuts):
            return self._in_pieces(row, sorted({*row.cuts, *across}))
        if across:
            return Rejection("mask-not-proved", f"character {across[0]} lies inside a token")
        return self._checked(tokens, list(zip(first.tolist(), last.tolist(), strict=True)))

    def _checked(self, tokens: np.ndarray, ranges: list[tuple[int, int]]) -> Document | Rejection:
        if len(tokens) and tokens.max() >= self._vocab_size:
            return Rejection("token-out-of-range", f"id {tokens.max()}, vocabulary of {self._vocab_size}")
        mask = np.zeros(len(tokens), np.uint8)
        for first, end in ranges:
            mask[first:end] = 1
        return Document(tokens, mask)

    def _in_pieces(self, row: Rendered, cuts: list[int]) -> Document | Rejection:
        """Tokenise between the cuts. Each piece but the first follows a special token, whose id is taken off, so that
        tokenizers that put a space before a text do not put one there; the ids must give the text back."""
        bounds = [0, *cuts, len(row.text)]
        tokens, offsets = [], []
        for start, end in zip(bounds, bounds[1:], strict=False):
            anchor = self._anchor if start else ""
            encoding = self._tokenizer.encode(anchor + row.text[start:end], add_special_tokens=False)
            drop = 1 if anchor else 0
            tokens += encoding.ids[drop:]
            offsets += [(a - len(anchor) + start, b - len(anchor) + start) for a, b in encoding.offsets[drop:]]
        if self._tokenizer.decode(tokens, skip_special_tokens=False) != row.text:
            return Rejection("special-token-text", "tokenised in pieces, the text does not come back")
        arrays = np.array(tokens, np.int32), np.array(offsets, np.int64).reshape(-1, 2)
        return self._by_offsets(row, *arrays, cuts)

    def _find_anchor(self, special_tokens: tuple[str, ...]) -> str:
        """A special token that stands alone before a text; "" where there is none."""
        for token in special_tokens:
            ids = self._tokenizer.encode(f"{token}a b", add_special_tokens=False).ids
            if ids and ids[0] == self._tokenizer.token_to_id(token):
                return token
        return ""


def _look_up(encoding: Any, count: int, length: int, span: tuple[int, int]) -> tuple[int, int] | None:
    """Token range of a character span; None where characters have no token or a token reaches across its start."""
    first, last = encoding.char_to_token(span[0]), encoding.char_to_token(span[1] - 1)
    if first is None or last is None or encoding.token_to_chars(first)[0] != span[0]:
        return None
    if first and encoding.token_to_chars(first - 1)[1] > span[0]:
        return None
    while last + 1 < count and encoding.token_to_chars(last + 1)[0] < span[1]:
        last += 1  # several tokens may share the last character's bytes
    return first, last + 1
