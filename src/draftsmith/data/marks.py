"""Marks around the texts of messages, so that one rendering shows where each of them went.

A mark is one private-use character (Unicode planes 15 and 16) that stands inside a text's outer whitespace, where
templates that trim, split or escape leave it alone. Whether a template was led astray all the same is for mask.py to
prove: what it renders without marks must be the marked rendering with the marks taken out.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from draftsmith.data.template import GENERATION_CLOSE, GENERATION_OPEN

Message = dict[str, Any]

CUT = "\U0010fff2"  # inside special-token text that a row brought along: the text is tokenised in two pieces there
_CONTENT, _REASONING = 0xF0000, 0x100000  # first mark of each kind; message i has the pair base + 2 i, base + 2 i + 1
_SPLIT = re.compile("([\U000f0000-\U0010ffff])")
_THINK = re.compile(r"(</?think>)")
THINK_TAGS = ("<think>", "</think>")


class Region(NamedTuple):
    """Where a marked text stands in the rendered conversation: characters [start, end) of the unmarked text."""

    message: int
    reasoning: bool
    start: int
    end: int


class Layout(NamedTuple):
    """A marked rendering, taken apart."""

    text: str
    """The rendering without marks."""
    regions: list[Region]
    """In order of place; what the template repeats stands here twice."""
    cuts: list[int]
    generated: list[tuple[int, int]]
    """What generation tags enclose."""
    regular: bool
    """Every mark has its other half, and none is inside another."""


def read_marks(marked: str) -> Layout:
    """Take a marked rendering apart."""
    parts = _SPLIT.split(marked)
    regions, cuts, generated, regular = [], [], [], True
    at, opened, begun = 0, None, None
    for text, mark in zip(parts[0::2], parts[1::2], strict=False):
        at += len(text)
        if mark == CUT:
            cuts.append(at)
        elif mark == GENERATION_OPEN:
            begun = at
        elif mark == GENERATION_CLOSE:
            regular &= begun is not None
            generated.append((begun or 0, at))
            begun = None
        else:
            code = ord(mark)
            if not code & 1:
                regular &= opened is None
                opened = (code, at)
            elif opened is not None and opened[0] == code - 1:
                base = _REASONING if code >= _REASONING else _CONTENT
                regions.append(Region((code - base) >> 1, base == _REASONING, opened[1], at))
                opened = None
            else:
                regular = False
    return Layout("".join(parts[0::2]), regions, cuts, generated, regular and opened is None and begun is None)


def close_mark(region: Region) -> str:
    """The mark that closes a region."""
    return chr((_REASONING if region.reasoning else _CONTENT) + 2 * region.message + 1)


def last_mark(marked: str) -> tuple[str, str]:
    """(the last message mark of a rendering or "", the text after it)."""
    parts = _SPLIT.split(marked)
    tail = [parts[-1]]
    for k in range(len(parts) - 2, 0, -2):
        if parts[k] not in (CUT, GENERATION_OPEN, GENERATION_CLOSE):
            return parts[k], "".join(reversed(tail))
        tail.append(parts[k - 1])
    return "", "".join(reversed(tail))


def mark_message(message: Message, number: int, guard: Callable[[str], str]) -> Message:
    """A copy with marks around its content, its reasoning, and the names and last arguments of its calls. `guard` puts
    cuts into special-token text."""
    base = _CONTENT + 2 * number
    pair = chr(base), chr(base + 1)
    content = message["content"]
    if message["role"] != "assistant":
        return {**message, "content": _mark(guard(content), pair)}
    thought = chr(_REASONING + 2 * number), chr(_REASONING + 2 * number + 1)
    out = dict(message)
    if "</think>" in content:
        head, end, answer = content.rpartition("</think>")
        pieces = (piece if piece in THINK_TAGS else _mark(guard(piece), thought) for piece in _THINK.split(head))
        out["content"] = "".join(pieces) + end + _mark(guard(answer), pair)
    else:
        out["content"] = _mark(guard(content), pair)
    for name in ("reasoning_content", "thinking"):
        if name in message:
            out[name] = _mark(guard(message[name]), thought)
    if "tool_calls" in message:
        out["tool_calls"] = [_mark_call(call, pair, guard) for call in message["tool_calls"]]
    return out


def guard_all(value: Any, guard: Callable[[str], str]) -> Any:
    """`guard` on every text in a JSON value, keys included."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): guard_all(item, guard) for key, item in value.items()}
    return [guard_all(item, guard) for item in value] if isinstance(value, list) else value


def _mark_call(call: dict[str, Any], pair: tuple[str, str], guard: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    arguments = guard_all(function["arguments"], guard)
    if arguments:  # the last argument, if it is a text, brings a mark close to the end of the call
        last = next(reversed(arguments))
        if isinstance(arguments[last], str):
            arguments = {**arguments, last: _mark(arguments[last], pair)}
    return {**call, "function": {"name": _mark(guard(function["name"]), pair), "arguments": arguments}}


def _mark(text: str, pair: tuple[str, str]) -> str:
    core = text.strip()
    if len(core) == len(text):
        return f"{pair[0]}{text}{pair[1]}" if text else text
    if not core:
        return text
    start = text.index(core[0])
    end = start + len(core)
    return f"{text[:start]}{pair[0]}{core}{pair[1]}{text[end:]}"
