"""Rows whose text already went through the target's chat template: assistant turns are found by the template's own
header and end-of-turn texts, which are learnt from two renderings of a made-up conversation."""

import re
from bisect import bisect_left

from draftsmith.data.mask import Rendered
from draftsmith.data.template import ChatTemplate, Message, TemplateRefusal, TextSide
from draftsmith.data.tools import Rejection

_WORDS = ("zebra", "quartz", "fjord", "sphinx")  # stand for texts of turns; no template contains them


class RenderedFinder:
    """Finds the assistant's characters in rendered text. Special tokens in it are the template's and stay tokens."""

    def __init__(self, side: TextSide):
        longest_first = sorted((re.escape(t) for t in side.special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or "(?!)")
        self._headers: list[str] = []
        try:
            self._headers = self._learn(ChatTemplate(side))
        except TemplateRefusal:
            pass  # a template that cannot render a plain conversation; `find` refuses rows

    def find(self, text: str, last_turn_only: bool) -> Rendered:
        """Spans from each assistant header to the next special token, that token included."""
        if not self._headers:
            raise Rejection("mask-not-proved", "the template's assistant header could not be learnt")
        spans: list[tuple[int, int]] = []
        specials = [(m.start(), m.end()) for m in self._special.finditer(text)]
        starts = [s for s, _ in specials]
        at = 0
        while (start := self._next_header(text, at)) is not None:
            following = bisect_left(starts, start)
            end = specials[following][1] if following < len(specials) else len(text)
            if end > start:
                spans.append((start, end))
            at = max(start, end)
        if not spans:
            raise Rejection("no-assistant", f"the text has no assistant turn ({self._headers[-1]!r})")
        return Rendered(text, spans[-1:] if last_turn_only else spans, [])

    def _next_header(self, text: str, at: int) -> int | None:
        """Where the next assistant turn's own text begins: after the longest header that stands there."""
        short = self._headers[-1]
        found = text.find(short, at)
        if found < 0:
            return None
        return found + len(next(h for h in self._headers if text.startswith(h, found)))

    def _learn(self, template: ChatTemplate) -> list[str]:
        """Assistant headers, longest first: as a prompt ends for generation, and as the template repeats it later."""
        user, reply, user2, reply2 = _WORDS
        turns: list[Message] = [
            {"role": "user", "content": user}, {"role": "assistant", "content": reply},
            {"role": "user", "content": user2}, {"role": "assistant", "content": reply2},
        ]  # fmt: skip
        whole = template.render(turns, None)
        prompt = template.render(turns[:1], None, prompt=True).partition(user)[2]
        history = whole.partition(user)[2].partition(reply)[0]
        last = whole.partition(user2)[2].partition(reply2)[0]
        own = template.render(turns[:1], None).partition(user)[2]  # closes the user turn, no part of the header
        headers = {prompt} | {h for h in (history, last) if h.strip() and prompt.startswith(h)}
        bare = {h.removeprefix(own) if h.removeprefix(own).strip() else h for h in headers if h.strip()}
        return sorted(bare, key=len, reverse=True)
