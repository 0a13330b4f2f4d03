"""Which characters of a rendered conversation the assistant wrote, proved row by row.

The proof is the rendered-prefix property: what a server renders before turn i, generation prompt included, is a
prefix of the whole text; turn i's own text begins there.
"""

import re
from typing import NamedTuple

from draftsmith.data.conversations import Conversation, Rejection
from draftsmith.data.template import ChatTemplate, TextSide


class Rendered(NamedTuple):
    """A conversation as text with the supervised character ranges [start, end), ascending."""

    text: str
    spans: list[tuple[int, int]]


class Masker:
    """Renders conversations and finds the assistant's characters."""

    def __init__(self, side: TextSide):
        self._template = ChatTemplate(side)
        longest_first = sorted(side.special_tokens, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special_next = re.compile(rf"\s*(?:{pattern})")
        self._special_any = re.compile(f"(?:{pattern})")

    def render(self, conversation: Conversation) -> Rendered:
        """Text and spans, by rendering every prefix."""
        messages, tools = conversation.messages, conversation.tools
        text = self._template.render(messages, tools)
        spans = []
        for i, trained in enumerate(conversation.trained):
            if not trained:
                continue
            before = self._template.render(messages[:i], tools, prompt=True)
            after = self._template.render(messages[: i + 1], tools)
            if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
                raise Rejection("mask-not-proved", f"turn {i}: the prompt before it is no prefix of the whole")
            spans.append((len(before), self._turn_end(text, len(before), len(after))))
        return Rendered(text, spans)

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """Cut after the end-of-turn token: the turn's last special token, or the one that follows the turn (GLM's next
        role token is what its model stops on)."""
        specials = list(self._special_any.finditer(text, start, end))
        if specials and not text[specials[-1].end() : end].strip():
            return specials[-1].end()
        following = self._special_next.match(text, end)
        return following.end() if following else end
