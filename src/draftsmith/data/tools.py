"""Tool definitions and tool calls of a row in the one form that chat templates take, native or stringified JSON alike."""

import json
from typing import Any

_NESTED = 16  # levels of stringified JSON inside JSON that are opened; data that needs more is broken


class Rejection(Exception):
    """A row that is not kept: `reason` is one of the fixed words of docs/data.md, `detail` says more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def unstring(value: Any, reason: str) -> Any:
    """A JSON text -> its value; anything else as it is. Rejection(reason) for a text that is not JSON."""
    for _ in range(_NESTED):
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Rejection(reason, f"a text that is not JSON: {error}"[:160]) from None
    raise Rejection(reason, "JSON in JSON in JSON")


def parse_tools(row: dict[str, Any]) -> list[Any] | None:
    """The row's tool definitions: `tools` or `functions`, a list or a JSON text, its items objects or JSON texts."""
    value = row.get("tools") if row.get("tools") is not None else row.get("functions")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    value = unstring(value, "bad-tools")
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise Rejection("bad-tools", "tools must be a list")
    tools = [unstring(item, "bad-tools") for item in value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Rejection("bad-tools", "a tool must be an object")
    wrapped = [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]
    return wrapped or None


def parse_tool_calls(turn: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """tool_calls (or the older function_call) of an assistant turn; arguments always as an object."""
    value = turn.get("tool_calls")
    if value is None and turn.get("function_call") is not None:
        value = [turn["function_call"]]
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    value = unstring(value, "bad-tool-call")
    return [_call(item, number) for item in (value if isinstance(value, list) else [value])]


def parse_call_message(turn: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The calls of a turn whose role is function_call and whose value is the call itself."""
    value = turn.get("value") if turn.get("value") is not None else turn.get("content")
    value = unstring(value, "bad-tool-call")
    calls = [_call(item, number) for item in (value if isinstance(value, list) else [value])]
    if not calls:
        raise Rejection("bad-tool-call", f"turn {number}: no call")
    return calls


def _call(item: Any, number: int) -> dict[str, Any]:
    item = unstring(item, "bad-tool-call")
    function = unstring(item.get("function", item), "bad-tool-call") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Rejection("bad-tool-call", f"turn {number}: a call without a name")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = unstring(arguments, "bad-tool-call")
    if not isinstance(arguments, dict):
        raise Rejection("bad-tool-call", f"turn {number}: the arguments of {function['name']} are no object"[:160])
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": item["id"], **call} if isinstance(item.get("id"), str) else call


def without_nulls(value: Any) -> Any:
    """Columnar files fill fields that a row lacks with nulls, in nested objects too: they are left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
