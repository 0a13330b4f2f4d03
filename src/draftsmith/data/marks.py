"""Marks around the texts of messages, so that one rendering shows where each of them went.

A mark is one private-use character (Unicode planes 15 and 16) that stands inside a text's outer whitespace, where
templates that trim, split or escape leave it alone. Whether a template was led astray all the same is for mask.py to
prove: what it renders without marks must be the marked rendering with the marks taken out.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from draftsmith.data.template import GENERATION_CLOSE, GENERATION_OPEN
from draftsmith.data.tools import Rejection

Message = dict[str, Any]

CUT = "\U0010fff2"  # inside special-token text that a row brought along: the text is tokenised in two pieces there
_FIRST, _MOST = 0xF0000, 0xFFF0  # text n of a conversation stands between the marks _FIRST + 2 n and _FIRST + 2 n + 1
_SPLIT = re.compile("([\U000f0000-\U0010ffff])")
_THINK = re.compile(r"(</?think>)")
THINK_TAGS = ("<think>", "</think>")


class Owner(NamedTuple):
    """What a marked text is."""

    message: int
    reasoning: bool


class Region(NamedTuple):
    """Where a marked text stands in the rendered conversation: characters [start, end) of the unmarked text."""

    number: int
    message: int
    reasoning: bool
    start: int
    end: int

    @property
    def close(self) -> str:
        """The mark that closes it."""
        return chr(_FIRST + 2 * self.number + 1)


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


def read_marks(marked: str, owners: list[Owner]) -> Layout:
    """Take a marked rendering apart; `owners` of the texts by number (Marker)."""
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
            number, closes = divmod(ord(mark) - _FIRST, 2)
            if not closes:
                regular &= opened is None and number < len(owners)
                opened = (number, at)
            elif opened is not None and opened[0] == number and number < len(owners):
                regions.append(Region(number, *owners[number], opened[1], at))
                opened = None
            else:
                regular = False
    return Layout("".join(parts[0::2]), regions, cuts, generated, regular and opened is None and begun is None)


def last_mark(marked: str) -> tuple[str, str]:
    """(the last message mark of a rendering or "", the text after it)."""
    parts = _SPLIT.split(marked)
    tail = [parts[-1]]
    for k in range(len(parts) - 2, 0, -2):
        if parts[k] not in (CUT, GENERATION_OPEN, GENERATION_CLOSE):
            return parts[k], "".join(reversed(tail))
        tail.append(parts[k - 1])
    return "", "".join(reversed(tail))


class Marker:
    """Numbers the texts of one conversation and puts marks around them. `guard` puts cuts into special-token text."""

    def __init__(self, guard: Callable[[str], str]):
        self.owners: list[Owner] = []
        self._guard = guard

    def message(self, message: Message, number: int) -> Message:
        """A copy with marks around its content, its reasoning, and the names and last arguments of its calls."""
        content, own, thought = message["content"], Owner(number, False), Owner(number, True)
        if message["role"] != "assistant":
            return {**message, "content": self._mark(content, own)}
        out = dict(message)
        if THINK_TAGS[1] in content:
            head, end, answer = content.rpartition(THINK_TAGS[1])
            pieces = (piece if piece in THINK_TAGS else self._mark(piece, thought) for piece in _THINK.split(head))
            out["content"] = "".join(pieces) + end + self._mark(answer, own)
        else:
            out["content"] = self._mark(content, own)
        if "reasoning_content" in message:
            out["reasoning_content"] = self._mark(message["reasoning_content"], thought)
            if "thinking" in message:
                out["thinking"] = out["reasoning_content"]
        if "tool_calls" in message:
            out["tool_calls"] = [self._call(call, own) for call in message["tool_calls"]]
        return out

    def _call(self, call: dict[str, Any], owner: Owner) -> dict[str, Any]:
        function = call["function"]
        name, arguments = self._mark(function["name"], owner), guard_all(function["arguments"], self._guard)
        if arguments:  # the last argument, if it is a text, brings a mark close to the end of the call
            last = next(reversed(arguments))
            if isinstance(arguments[last], str):
                arguments = {**arguments, last: self._enclose(arguments[last], owner)}
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _mark(self, text: str, owner: Owner) -> str:
        return self._enclose(self._guard(text), owner)

    def _enclose(self, text: str, owner: Owner) -> str:
        core = text.strip()
        if not core:
            return text
        number = len(self.owners)
        if number >= _MOST:
            raise Rejection("too-many-turns", f"more than {_MOST} texts in one conversation")
        self.owners.append(owner)
        opening, closing = chr(_FIRST + 2 * number), chr(_FIRST + 2 * number + 1)
        if len(core) == len(text):
            return f"{opening}{text}{closing}"
        start = text.index(core[0])
        end = start + len(core)
        return f"{text[:start]}{opening}{core}{closing}{text[end:]}"


def guard_all(value: Any, guard: Callable[[str], str]) -> Any:
    """`guard` on every text in a JSON value, keys included."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): guard_all(item, guard) for key, item in value.items()}
    return [guard_all(item, guard) for item in value] if isinstance(value, list) else value
