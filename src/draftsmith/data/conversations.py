"""A row of any accepted shape -> Conversation, PlainText or TokenRow. A row that cannot be used raises Rejection.

docs/data.md shows every shape and every reason. Nothing is repaired by guessing: what is changed (role names,
stringified JSON, typed text parts) is listed there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from draftsmith.data.options import Shape
from draftsmith.data.tools import Rejection, parse_call_message, parse_tool_calls, parse_tools, unstring

Message = dict[str, Any]

SHAPES = tuple(shape for shape in get_args(Shape) if shape != "auto")
MAX_MESSAGES = 30_000  # the loss mask marks each message with characters of its own (mask.py)
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
PROMPTS = ("prompt", "question", "query", "instruction", "input", "problem")
RESPONSES = ("response", "completion", "answer", "output", "chosen", "reply", "solution")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK_END = "</think>"


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them: role, content, and where given reasoning_content, tool_calls, name,
    tool_call_id; `cut` where a reply ended at a token limit and has no end of its own."""

    messages: list[Message]
    tools: list[Any] | None
    trained: list[bool]
    """Message by message: an assistant turn that is trained on. One before the first user turn never is: no server
    generates it."""
    dropped_tail: int = 0
    """Turns after the last assistant turn, which were left out."""


@dataclass(frozen=True)
class PlainText:
    """Text without turns. `rendered`: it went through the target's chat template before."""

    text: str
    rendered: bool


@dataclass(frozen=True)
class TokenRow:
    """Token ids with their loss mask."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class RowRules:
    """What `prepare`'s options say about rows."""

    shape: Shape = "auto"
    last_turn_only: bool = False
    skip_leading_assistant: bool = False
    drop_reasoning: bool = False
    prompts: bool = False
    """Rows without an assistant turn are accepted, turns after the last one are kept (for `regenerate`)."""


def detect_shape(row: dict[str, Any]) -> str | None:
    """The shape of a decoded row by its fields, in the order of docs/data.md; None if it is of no known shape."""
    if _has(row, "input_ids"):
        return "tokens"
    if _has(row, "messages"):
        return "messages"
    if _has(row, "conversations") or _has(row, "conversation"):
        return "conversations"
    if _has(row, "instruction") and _has(row, "output"):
        return "alpaca"
    if _has(row, *PROMPTS) and _has(row, *RESPONSES):
        return "prompt"
    return "text" if _has(row, "text") else None


def parse_row(row: Any, rules: RowRules) -> Conversation | PlainText | TokenRow:
    """One decoded row -> what it means. Rejection with a reason and detail otherwise."""
    if not isinstance(row, dict):
        raise Rejection("not-an-object", f"the row is {_kind(row)}")
    shape = rules.shape if rules.shape != "auto" else detect_shape(row)
    if shape is None and rules.prompts and (_has(row, *PROMPTS) or _has(row, "turns")):
        shape = "prompt"
    if shape is None:
        raise Rejection("unknown-shape", f"fields {', '.join(map(str, list(row)[:8]))}"[:200])
    return _PARSERS[shape](row, rules)


def _messages_row(row: dict[str, Any], rules: RowRules) -> Conversation:
    return _conversation(_first(row, "messages", "conversations", "conversation"), row, rules)


def _alpaca_row(row: dict[str, Any], rules: RowRules) -> Conversation:
    instruction, given, output = row.get("instruction"), row.get("input"), row.get("output")
    if not isinstance(instruction, str) or not isinstance(given or "", str) or not isinstance(output, str):
        raise Rejection("bad-content", "instruction, input and output must be text")
    turns: list[Any] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Rejection("bad-content", "history must be pairs of question and answer")
        turns += _pair(pair[0], pair[1])
    question = f"{instruction}\n\n{given}" if given else instruction
    return _conversation(_system(row) + turns + _pair(question, output), row, rules)


def _prompt_row(row: dict[str, Any], rules: RowRules) -> Conversation:
    if rules.prompts and _has(row, "turns"):
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(t, str) for t in turns):
            raise Rejection("bad-content", "turns must be a list of texts")
        asked = [turn for text in turns for turn in _pair(text, "")][:-1]
        return _conversation(_system(row) + asked, row, rules)
    prompt, response = _first(row, *PROMPTS), _first(row, *RESPONSES)
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if response is None and rules.prompts:
        return _conversation(_system(row) + before, row, rules)
    after = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    if isinstance(prompt, list) and after[: len(prompt)] == prompt:
        before = []  # preference sets repeat the prompt in `chosen`
    return _conversation(_system(row) + before + after, row, rules)


def _text_row(row: dict[str, Any], rules: RowRules) -> PlainText:
    text = row.get("text")
    if not isinstance(text, str):
        raise Rejection("bad-content", f"text is {_kind(text)}")
    if not text.strip():
        raise Rejection("empty-text")
    return PlainText(text, rules.shape == "rendered")


def _tokens_row(row: dict[str, Any], rules: RowRules) -> TokenRow:
    tokens, mask = row.get("input_ids"), _first(row, "loss_mask", "assistant_masks")
    if mask is None and isinstance(row.get("labels"), list):
        mask = [int(label != -100) for label in row["labels"]]
    if mask is None:
        raise Rejection("bad-tokens", "input_ids without loss_mask or labels")
    for name, values in (("input_ids", tokens), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(isinstance(v, int) for v in values):
            raise Rejection("bad-tokens", f"{name} must be a list of whole numbers")
    if len(tokens) != len(mask) or not tokens:
        raise Rejection("bad-tokens", f"{len(tokens)} input_ids but {len(mask)} of loss_mask")
    if not set(mask) <= {0, 1}:
        raise Rejection("bad-tokens", "loss_mask must hold 0 and 1")
    return TokenRow(tokens, mask)


_PARSERS: dict[str, Callable[[dict[str, Any], RowRules], Conversation | PlainText | TokenRow]] = {
    "messages": _messages_row,
    "conversations": _messages_row,
    "prompt": _prompt_row,
    "alpaca": _alpaca_row,
    "text": _text_row,
    "rendered": _text_row,
    "tokens": _tokens_row,
}


def _conversation(turns: Any, row: dict[str, Any], rules: RowRules) -> Conversation:
    turns = unstring(turns, "bad-message")
    if not isinstance(turns, list):
        raise Rejection("bad-message", f"the turns are {_kind(turns)}")
    if len(turns) > MAX_MESSAGES:
        raise Rejection("too-many-turns", f"{len(turns)} turns, at most {MAX_MESSAGES}")
    messages, weights = [], []
    for number, turn in enumerate(turns):
        message, weight = _message(turn, number, rules)
        messages.append(message)
        weights.append(weight)
    if rules.skip_leading_assistant:
        keep = _without_leading_assistant(messages)
        messages, weights = [messages[i] for i in keep], [weights[i] for i in keep]
    end = len(messages)
    while end and messages[end - 1]["role"] != "assistant":
        end -= 1
    if not rules.prompts:
        if not end:
            raise Rejection("no-assistant", "no assistant turn" if messages else "no turns at all")
        messages = messages[:end]
    elif not any(m["role"] == "user" for m in messages):
        raise Rejection("no-user", "no user turn")
    first = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), len(messages))
    trained = [m["role"] == "assistant" and w and i > first for i, (m, w) in enumerate(zip(messages, weights))]  # noqa: B905
    if rules.last_turn_only:
        last = len(messages) - 1
        trained = [t and i == last for i, t in enumerate(trained)]
    if not rules.prompts and not any(trained):
        raise Rejection("no-assistant", "no assistant turn answers a user, or every one has weight 0")
    return Conversation(messages, parse_tools(row), trained, len(weights) - len(messages))


def _message(turn: Any, number: int, rules: RowRules) -> tuple[Message, bool]:
    """(message, whether it may be trained on)."""
    if not isinstance(turn, dict):
        raise Rejection("bad-message", f"turn {number} is {_kind(turn)}")
    spelt = _first(turn, "role", "from")
    role = ROLES.get(spelt.lower()) if isinstance(spelt, str) else None
    if role is None:
        raise Rejection("unknown-role" if spelt is not None else "no-role", f"turn {number}: {spelt!r}"[:120])
    weight = turn.get("weight") != 0 and turn.get("train") is not False
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": parse_call_message(turn, number)}, weight
    content, reasoning = _content(_first(turn, "content", "value"), role, number)
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        calls = parse_tool_calls(turn, number)
        reasoning = reasoning or _first(turn, *_REASONING)
        if reasoning is not None and not isinstance(reasoning, str):
            raise Rejection("bad-content", f"turn {number}: reasoning is {_kind(reasoning)}")
        if content is None and not calls and not reasoning and not rules.prompts:
            raise Rejection("null-content", f"turn {number}")
        message["content"] = content or ""
        if rules.drop_reasoning:
            message["content"], reasoning = message["content"].rpartition(_THINK_END)[2], None
        empty = not message["content"].strip() and not calls and not (reasoning or "").strip()
        if empty and not rules.prompts:
            raise Rejection("empty-assistant", f"turn {number}")
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"cut": True} if turn.get("finish_reason") == "length" else {}
    elif content is None:
        raise Rejection("null-content", f"turn {number}")
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    return message, weight


def _content(value: Any, role: str, number: int) -> tuple[str | None, str | None]:
    """(text, reasoning) of a turn's content: a text, a list of typed parts, or nothing."""
    if value is None or isinstance(value, str):
        return value, None
    if role == "tool" and (isinstance(value, dict) or (isinstance(value, list) and not _typed(value))):
        return json.dumps(value, ensure_ascii=False), None  # tools answer with data
    if not isinstance(value, list):
        raise Rejection("bad-content", f"turn {number}: content is {_kind(value)}")
    texts, thoughts = [], []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("thinking", "reasoning") and isinstance(_first(part, "thinking", "text"), str):
            thoughts.append(_first(part, "thinking", "text"))
        elif isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise Rejection("non-text-content", f"turn {number}: a part of type {kind!r}"[:120])
        else:
            raise Rejection("bad-content", f"turn {number}: a part is {_kind(part)}")
    return "".join(texts), "".join(thoughts) or None


def _typed(parts: list[Any]) -> bool:
    return bool(parts) and all(isinstance(part, dict) and "type" in part for part in parts)


def _without_leading_assistant(messages: list[Message]) -> list[int]:
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [i for i, m in enumerate(messages) if i >= first or m["role"] == "system"]


def _system(row: dict[str, Any]) -> list[Message]:
    text = _first(row, "system", "system_prompt")
    return [{"role": "system", "content": text}] if text else []


def _pair(question: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _has(row: dict[str, Any], *names: str) -> bool:
    return any(row.get(name) is not None for name in names)


def _first(row: dict[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
