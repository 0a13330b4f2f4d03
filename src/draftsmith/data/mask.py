"""Which characters of a rendered conversation the assistant wrote, proved row by row, in two renderings of the whole.

1. The conversation is rendered as it is, and once more with marks (marks.py). Without the marks both must be equal:
   then the marks show where every message's text stands, and what lies between two of them is the template's own.
2. Rendered-prefix property: a turn's text begins where the prompt that a server renders before it ends, generation
   prompt included. For the last turn that prompt is rendered and must be a prefix of the whole text. For earlier turns
   the text between two messages decides, and what a prompt adds there is rendered once for each such text and kept.
   A template may leave out, when it repeats a turn, the thought that its prompt ends with ("<think>\n"), nothing else.
3. A turn ends with its end-of-turn token: the first stop token, else the last special token, that the template closes
   it with.
Rows whose template looks at what marks change are proved by rendering every prefix; rows without proof are refused.
"""

import re
from typing import Any, NamedTuple

from draftsmith.data.conversations import Conversation
from draftsmith.data.marks import (
    CUT,
    THINK_TAGS,
    Layout,
    Marker,
    Owner,
    Region,
    guard_all,
    last_mark,
    read_marks,
)
from draftsmith.data.template import ChatTemplate, Message, TextSide
from draftsmith.data.tools import Rejection

_CACHE_LIMIT = 4096  # texts between messages that are kept; templates have a dozen, odd rows may bring more
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")  # an opened or an empty thought at the end of a prompt
_REASONING_FIELD = re.compile(r"""(?:\.|\[\s*['"])(?:reasoning_content|thinking)\b""")


class Rendered(NamedTuple):
    """A conversation as text with its supervised character ranges [start, end), ascending."""

    text: str
    spans: list[tuple[int, int]]
    cuts: list[int]
    """Places where the text is tokenised in pieces: inside special-token text that the row brought along."""
    notes: tuple[str, ...] = ()


class Masker:
    """Renders conversations and finds the assistant's characters."""

    def __init__(self, side: TextSide, mask_reasoning: bool = False):
        self._plain, self._tagged = ChatTemplate(side), ChatTemplate(side, tagged=True)
        self._mask_reasoning = mask_reasoning
        longest_first = sorted((re.escape(t) for t in side.special_tokens), key=len, reverse=True)
        pattern = "|".join(longest_first) or "(?!)"
        self._stop = re.compile("|".join(map(re.escape, side.stop_tokens)) or "(?!)")
        self._special, self._special_next = re.compile(pattern), re.compile(rf"\s*(?:{pattern})")
        self._takes_reasoning = bool(_REASONING_FIELD.search(side.template or ""))
        self._splits_reasoning = THINK_TAGS[1] in (side.template or "")
        self._starts: dict[tuple[str, bool], tuple[int, int] | None] = {}
        self._ends: dict[tuple[str, bool], int | None] = {}

    def render(self, conversation: Conversation) -> Rendered:
        """Text and spans. Rejection("mask-not-proved") where there is no proof; TemplateRefusal from the template."""
        tools = conversation.tools
        messages = [self._with_reasoning(m) for m in conversation.messages]
        text = self._plain.render(messages, tools)
        marker = Marker(self._guard)
        marked = [marker.message(m, i) for i, m in enumerate(messages)]
        guarded_tools = guard_all(tools, self._guard) if tools else tools
        whole = self._tagged.render(marked, guarded_tools)
        layout = read_marks(whole, marker.owners)
        turns = _turns(layout.regions)
        followed = layout.text == text and layout.regular
        if followed and layout.generated:
            spans, notes = self._tagged_spans(layout, conversation), []
        elif followed and all(i in turns for i, trained in enumerate(conversation.trained) if trained):
            row = _Row(layout, marked, guarded_tools, whole, turns, marker.owners)
            last = len(messages) - 1
            prompt = self._prompt_before(row, last)
            if conversation.trained[last] and not whole.startswith(prompt[: len(prompt) - len(last_mark(prompt)[1])]):
                return self._prompt_and_last_turn(row, prompt)
            spans, notes = self._marked_spans(row, conversation.trained)
        else:
            return Rendered(text, self._every_prefix(text, messages, conversation), [])
        if self._mask_reasoning:
            spans = [_after_reasoning(span, layout.regions) for span in spans]
        return Rendered(text, spans, layout.cuts, (*notes, *_left_out(messages, layout.regions)))

    def _marked_spans(self, row: "_Row", trained: list[bool]) -> tuple[list[tuple[int, int]], list[str]]:
        text, regions = row.layout.text, row.layout.regions
        spans, notes = [], []
        last = len(trained) - 1
        for i in (i for i, yes in enumerate(trained) if yes):
            first, final = row.turns[i]
            before = regions[first - 1].end if first else 0
            after = regions[final].end
            following = regions[final + 1].start if final + 1 < len(regions) else len(text)
            start = self._start(row, i, text[before : regions[first].start])
            end = self._end(row, i, text[after:following], i == last)
            if start is None or end is None:
                raise Rejection("mask-not-proved", f"turn {i}: what is rendered before it is no prefix of the whole")
            if i == last and start[1]:
                notes.append("prompt-tail-left-out")
            spans.append((before + start[0], after + (0 if row.marked[i].get("cut") else end)))
        return spans, notes

    def _start(self, row: "_Row", i: int, opening: str) -> tuple[int, int] | None:
        """(characters of `opening`, the template's text before turn i, that belong to the prompt; characters of the
        prompt's end that the template leaves out of the whole). None: no proof."""
        key = (opening, bool(row.tools))
        if key in self._starts:
            return self._starts[key]
        mark, tail = last_mark(self._prompt_before(row, i))
        first = row.turns[i][0]
        if mark != (row.layout.regions[first - 1].close if first else ""):
            return None
        thought = _THOUGHT.search(tail)
        if opening.startswith(tail):
            found = len(tail), 0
        elif thought and opening.startswith(tail[: thought.start()]):
            found = thought.start(), len(tail) - thought.start()
        else:
            found = None
        return _keep(self._starts, key, found)

    def _prompt_before(self, row: "_Row", i: int) -> str:
        return self._tagged.render(row.marked[:i], row.tools, prompt=True)

    def _end(self, row: "_Row", i: int, closing: str, is_last: bool) -> int | None:
        """Characters of `closing`, the text between turn i's own and the next message's, that belong to the turn."""
        key = (closing, is_last)
        if key in self._ends:
            return self._ends[key]
        tail = closing
        if not is_last:
            mark, tail = last_mark(self._tagged.render(row.marked[: i + 1], row.tools))
            if mark != row.layout.regions[row.turns[i][1]].close:
                return None
        if closing.startswith(tail):
            found = self._turn_end(closing, 0, len(tail))
        else:  # the template closes a last turn otherwise than an earlier one
            special = self._special_next.match(closing)
            found = special.end() if special else None
        return _keep(self._ends, key, found)

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """Cut text[start:end] after its first stop token, or its last special token; where there is neither, take the
        special token that follows (the next role's, which is what models of such templates stop on)."""
        stop = self._stop.search(text, start, end)
        if stop:
            return stop.end()
        specials = list(self._special.finditer(text, start, end))
        if specials and not text[specials[-1].end() : end].strip():
            return specials[-1].end()
        following = self._special_next.match(text, end)
        return following.end() if following else end

    def _tagged_spans(self, layout: Layout, conversation: Conversation) -> list[tuple[int, int]]:
        """By the template's generation tags, one for each assistant turn in order."""
        trained = [
            yes for m, yes in zip(conversation.messages, conversation.trained, strict=True) if m["role"] == "assistant"
        ]
        if len(layout.generated) != len(trained):
            raise Rejection(
                "mask-not-proved", f"{len(layout.generated)} generation tags, {len(trained)} assistant turns"
            )
        spans = []
        for (start, end), yes in zip(layout.generated, trained, strict=True):
            own = max([r.end for r in layout.regions if start <= r.start < end], default=start)
            spans += [(start, self._turn_end(layout.text, own, end))] if yes else []
        return spans

    def _prompt_and_last_turn(self, row: "_Row", prompt: str) -> Rendered:
        """For templates that render earlier turns otherwise once a reply follows (a system prompt that is shown before
        the last question alone): the prompt as a server renders it, and the last turn as the template repeats it."""
        text, regions, last = row.layout.text, row.layout.regions, len(row.marked) - 1
        first, final = row.turns[last]
        before, after = regions[first - 1].end if first else 0, regions[final].end
        start = self._start(row, last, text[before : regions[first].start])
        end = self._end(row, last, text[after:], True)
        if final + 1 != len(regions) or start is None or start[1] or end is None:
            raise Rejection("mask-not-proved", f"turn {last}: what is rendered before it is no prefix of the whole")
        end = 0 if row.marked[last].get("cut") else end
        begin, stop, asked = before + start[0], after + end, read_marks(prompt, row.owners)
        move = len(asked.text) - begin
        cuts = [*asked.cuts, *(c + move for c in row.layout.cuts if begin < c < stop)]
        turn = (len(asked.text), stop + move)
        moved = [r._replace(start=r.start + move, end=r.end + move) for r in regions[first:]]
        span = _after_reasoning(turn, moved) if self._mask_reasoning else turn
        return Rendered(asked.text + text[begin:stop], [span], cuts, ("last-turn-alone",))

    def _every_prefix(self, text: str, messages: list[Message], conversation: Conversation) -> list[tuple[int, int]]:
        """Spans by rendering the prompt before each turn and the conversation up to it: both must be prefixes."""
        strings: list[str] = []
        guard_all([messages, conversation.tools], lambda s: strings.append(s) or s)
        if any(self._guard(s) != s for s in strings):
            raise Rejection("special-token-text", "in a conversation whose template treats it in a way of its own")
        spans = []
        for i in (i for i, yes in enumerate(conversation.trained) if yes):
            before = self._plain.render(messages[:i], conversation.tools, prompt=True)
            after = self._plain.render(messages[: i + 1], conversation.tools)
            if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
                raise Rejection("mask-not-proved", f"turn {i}: what is rendered before it is no prefix of the whole")
            spans.append((len(before), self._turn_end(text, len(before), len(after))))
        return spans

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> Rendered:
        """What a server renders to ask for the next turn; special tokens' text in it stays text."""
        guarded = guard_all([self._with_reasoning(m) for m in messages], self._guard)
        layout = read_marks(self._tagged.render(guarded, guard_all(tools, self._guard), prompt=True), [])
        return Rendered(layout.text, [], layout.cuts)

    def _guard(self, text: str) -> str:
        """Put a cut into every special token's text, but for reasoning tags, which templates look for."""
        return self._special.sub(_cut, text) if self._special.search(text) else text

    def _with_reasoning(self, message: Message) -> Message:
        """Reasoning under the names that templates read, or inside the content where they look for it there."""
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            return message
        if self._takes_reasoning or not self._splits_reasoning:
            return {**message, "thinking": reasoning}
        content = f"{THINK_TAGS[0]}\n{reasoning}\n{THINK_TAGS[1]}\n\n{message['content']}"
        return {**{k: v for k, v in message.items() if k != "reasoning_content"}, "content": content}


class _Row(NamedTuple):
    """A conversation in work."""

    layout: Layout
    marked: list[Message]
    tools: list[Any] | None
    whole: str
    turns: dict[int, tuple[int, int]]
    owners: list[Owner]


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()  # filled by texts that vary from row to row; the common ones come back at once
    cache[key] = value
    return value


def _turns(regions: list[Region]) -> dict[int, tuple[int, int]]:
    """message -> (first, last) of its regions, for messages whose regions stand together. A text that stands there again
    (a tool's name in the tool's answer) does not count."""
    turns: dict[int, tuple[int, int]] = {}
    scattered, seen = set(), set()
    for place, region in enumerate(regions):
        if region.number in seen:
            continue
        seen.add(region.number)
        first, last = turns.get(region.message, (place, place - 1))
        if last != place - 1:
            scattered.add(region.message)
        turns[region.message] = (first, place)
    return {message: ends for message, ends in turns.items() if message not in scattered}


def _after_reasoning(span: tuple[int, int], regions: list[Region]) -> tuple[int, int]:
    inside = [r for r in regions if span[0] <= r.start < span[1]]
    thoughts = [r for r in inside if r.reasoning]
    if not thoughts:
        return span
    start = next((r.start for r in inside if r.start >= thoughts[-1].end and not r.reasoning), thoughts[-1].end)
    return start, span[1]


def _left_out(messages: list[Message], regions: list[Region]) -> list[str]:
    """Notes on text of the row that the template does not render."""
    shown, thoughts = {r.message for r in regions if not r.reasoning}, {r.message for r in regions if r.reasoning}
    notes = []
    for i, m in enumerate(messages):
        if i not in shown and m["content"].rpartition(THINK_TAGS[1])[2].strip():
            notes.append("turn-left-out")
        if (
            i not in thoughts
            and m["role"] == "assistant"
            and (m.get("reasoning_content") or THINK_TAGS[1] in m["content"])
        ):
            notes.append("reasoning-left-out")
    return notes


def _cut(found: re.Match[str]) -> str:
    token = found[0]
    if token in THINK_TAGS:
        return token
    if len(token) < 2:
        raise Rejection("special-token-text", f"{token!r} is a special token of one character")
    return f"{token[0]}{CUT}{token[1:]}"
