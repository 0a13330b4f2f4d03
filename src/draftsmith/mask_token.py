"""The mask token: a vocabulary row of the target that no text uses, so that the drafter can learn what it means."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.shards import Corpus
from draftsmith.data.template import load_tokenizer, named_stops
from draftsmith.errors import UserError
from draftsmith.target_facts import describe

# Special tokens that chat never produces although the tokenizer knows them, most wanted first.
RESERVED = re.compile(
    r"reserved|unused|extra_id|empty_output|<\|?(mask|spare|placeholder)|dummy|\[control_\d+\]", re.IGNORECASE
)
MASK_NAMES = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")


def unused_rows(rows: int, tokenizer: Any) -> range:
    """Those of the target's `rows` embedding rows that lie behind the last id of its tokenizer."""
    return range(max(tokenizer.get_vocab().values()) + 1, rows)


def find_mask_token(
    directory: Path, trust_remote_code: bool = False, corpora: Sequence[Corpus] = ()
) -> tuple[int, str]:
    """(id, reason) of a row that no text uses: a mask token of the model's own, else the first embedding row behind
    the tokenizer or in a gap of its ids, else a reserved special token that the chat template does not write, else a
    token of ordinary text that these corpora do not hold. UserError when there is none."""
    tokenizer = load_tokenizer(directory, trust_remote_code)
    rows = describe(directory, trust_remote_code).vocab_size
    used = tokens_in_use(directory, tokenizer)
    if (found := _spare_row(tokenizer, rows, used)) or (corpora and (found := _absent(tokenizer, rows, used, corpora))):
        return found
    raise UserError(
        f"{directory}: every vocabulary row is in use; set target.mask_token to a token that your texts never hold"
    )


def _spare_row(tokenizer: Any, rows: int, used: dict[int, str]) -> tuple[int, str] | None:
    """(id, reason) of a row that no text uses by what the tokenizer says."""
    vocabulary = tokenizer.get_vocab()
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special and i < rows}
    for name in MASK_NAMES:
        token = vocabulary.get(name)
        if token in special and token not in used:
            return token, f"the tokenizer's own {name}"
    free = unused_rows(rows, tokenizer) or sorted(
        {*range(rows)} - {*vocabulary.values()} - {*tokenizer.added_tokens_decoder}
    )
    if free:
        return free[0], f"first of {len(free)} embedding rows that the tokenizer does not use"
    spare = {i: t for i, t in special.items() if i not in used}
    for i in sorted(spare, key=lambda i: (RESERVED.search(spare[i]) is None, -i)):
        return i, f"special token {spare[i]}, which the chat template does not write; the vocabulary has no free row"
    return None


def _absent(tokenizer: Any, rows: int, used: dict[int, str], corpora: Sequence[Corpus]) -> tuple[int, str] | None:
    """(id, reason) of the last token of ordinary text that the corpora do not hold."""
    held = np.zeros(rows, dtype=bool)
    for corpus in corpora:
        for ids in corpus.pieces():
            held[ids[ids < rows]] = True
    tokens = {i: t for t, i in tokenizer.get_vocab().items() if i < rows and i not in tokenizer.added_tokens_decoder}
    token = max((i for i in tokens if not held[i] and i not in used), default=None)
    if token is None:
        return None
    return token, f"{json.dumps(tokens[token])}, which the corpus never holds; the vocabulary has no free row"


def check_mask_token(directory: Path, token: int, trust_remote_code: bool = False) -> str:
    """What the mask token is, in words; UserError when the id is no row of the embedding or a token in use. A token of
    ordinary text will do where the vocabulary has no other; whether the corpus holds it is not looked at here."""
    rows = describe(directory, trust_remote_code).vocab_size
    if not 0 <= token < rows:
        raise UserError(f"target.mask_token = {token}: the target's embedding has rows 0..{rows - 1}")
    tokenizer = load_tokenizer(directory, trust_remote_code)
    name = tokenizer.convert_ids_to_tokens(token) if token <= max(tokenizer.get_vocab().values()) else None
    if name is None:
        return f"mask token {token}: an embedding row that the tokenizer does not use"
    used = tokens_in_use(directory, tokenizer)
    known, spare = tokenizer.added_tokens_decoder.get(token), _spare_row(tokenizer, rows, used)
    why, ordinary = used.get(token), known is None or not known.special
    if why or (ordinary and spare):
        other = f"{spare[0]} ({spare[1]})" if spare else "a token that your texts never hold"
        raise UserError(f"target.mask_token = {token} is {name!r}, {why or 'a token of ordinary text'}; take {other}")
    if ordinary:
        return f"mask token {token}: {name!r}, a token of ordinary text, since the vocabulary has no free row"
    return f"mask token {token}: {name}, a special token that the chat template does not write"


def tokens_in_use(directory: Path, tokenizer: Any) -> dict[int, str]:
    """Special tokens that texts hold, with the reason: named roles (eos, pad ...), stop tokens, what templates write."""
    used = dict.fromkeys(named_stops(directory), "a stop token of the model")
    for role, value in tokenizer.special_tokens_map.items():
        if role.startswith("mask"):
            continue
        for name in value if isinstance(value, list | tuple) else (value,):
            if role in ("additional_special_tokens", "extra_special_tokens"):
                continue
            token = tokenizer.convert_tokens_to_ids(str(name))
            if token is not None:
                used[token] = f"the tokenizer's {role}"
    templates = tokenizer.chat_template or ""
    text = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.content in text:
            used.setdefault(token, "which the chat template writes")
    return used
