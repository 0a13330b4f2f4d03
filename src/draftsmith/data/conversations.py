"""A row of any accepted shape -> one Conversation. A row that cannot be used raises Rejection with a reason.

Nothing is repaired by guessing: what is changed (role names, stringified JSON, typed text parts) follows docs/data.md.
"""

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip


class Rejection(Exception):
    """A row that is not kept: `reason` is one of the fixed words of docs/data.md, `detail` says more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them. `trained` says, message by message, whether an assistant turn is trained on."""

    messages: list[Message]
    tools: list[Any] | None
    trained: list[bool]


def parse_row(row: Any) -> Conversation:
    """A decoded row -> Conversation."""
    if not isinstance(row, dict):
        raise Rejection("not-an-object", f"the row is a {type(row).__name__}")
    if "messages" not in row:
        raise Rejection("unknown-shape", f"fields {sorted(row)[:8]}")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise Rejection("no-messages")
    out = [_message(m) for m in messages]
    while out and out[-1]["role"] != "assistant":
        out.pop()
    if not out:
        raise Rejection("no-assistant", "no assistant turn")
    return Conversation(out, None, [m["role"] == "assistant" for m in out])


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise Rejection("bad-message", f"a message is a {type(value).__name__}")
    role = ROLES.get(value.get("role")) if isinstance(value.get("role"), str) else None
    if role is None:
        raise Rejection("unknown-role", json.dumps(value.get("role"))[:80])
    content = value.get("content")
    if not isinstance(content, str):
        raise Rejection("bad-content", f"content is a {type(content).__name__}")
    if role == "assistant" and not content.strip():
        raise Rejection("empty-assistant")
    return {"role": role, "content": content}
