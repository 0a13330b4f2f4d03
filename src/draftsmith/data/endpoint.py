"""A chat-completions server (OpenAI's protocol): one request, repeated with growing waits while the failure may pass."""

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from draftsmith.errors import UserError

Message = dict[str, Any]
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two attempts
_WRONG_ADDRESS = {401: "the API key is missing or wrong", 403: "access is refused", 404: "no such address or model"}


class Answer(NamedTuple):
    """A reply as a message for `prepare`, and its length in tokens (0 where the server does not say)."""

    message: Message
    tokens: int


class RowFailed(Exception):
    """The server refuses this conversation, or fails on it again and again; other rows go on."""


@dataclass(frozen=True)
class Sampling:
    """What every request says beside the conversation."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    template_options: tuple[tuple[str, bool | int | str], ...] = ()


class Endpoint:
    """Use as an async context manager. `ask` may be called many times at once."""

    def __init__(
        self,
        url: str,
        model: str | None,
        key: str | None,
        sampling: Sampling,
        retries: int,
        timeout: float,
        connections: int,
    ):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url, self._model, self._sampling, self._retries = url.rstrip("/"), model, sampling, retries
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(timeout, connect=30.0), limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The model's name in requests: as given, else the first that the server lists."""
        if self._model is None:
            try:
                listed = await self._request("GET", "/models", None)
            except RowFailed as error:
                raise UserError(f"{self._url}/models: {error}; is this an OpenAI-compatible server?") from None
            entries = listed.get("data")
            names = [e.get("id") for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
            if not names or not isinstance(names[0], str):
                raise UserError(f"{self._url}/models: lists no model; name one with --model")
            self._model = names[0]
        return self._model

    async def ask(self, messages: list[Message], tools: list[Any] | None) -> Answer:
        """The model's reply to a conversation. RowFailed, or UserError where going on makes no sense."""
        s = self._sampling
        body: dict[str, Any] = {
            "model": await self.model(), "messages": [_wire(m) for m in messages], "max_tokens": s.max_tokens,
            "temperature": s.temperature, "top_p": s.top_p, "seed": s.seed,
        }  # fmt: skip
        if tools:
            body["tools"] = tools
        if s.template_options:
            body["chat_template_kwargs"] = dict(s.template_options)
        return _answer(await self._request("POST", "/chat/completions", body))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        wait, problem = _FIRST_WAIT, ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            try:
                response = await self._client.request(method, self._url + path, json=body)
            except httpx.InvalidURL as error:
                raise UserError(f"{self._url}: is no address: {error}") from None
            except httpx.RequestError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code in _WRONG_ADDRESS:
                raise UserError(f"{self._url}{path}: {_WRONG_ADDRESS[response.status_code]}: {_text(response)}")
            if response.status_code == 429 or response.status_code >= 500:
                problem = f"status {response.status_code}: {_text(response)}"
                wait = max(wait, _retry_after(response))
                continue
            if response.status_code >= 400:
                raise RowFailed(f"status {response.status_code}: {_text(response)}")
            try:
                value = response.json()
            except ValueError:
                problem = f"the answer is no JSON: {_text(response)}"
                continue
            if isinstance(value, dict):
                return value
            problem = "the answer is no object"
        if problem.startswith(("status", "the answer")):
            raise RowFailed(f"{self._retries + 1} attempts: {problem}")
        raise UserError(
            f"{self._url}: the server cannot be reached ({self._retries + 1} attempts: {problem}); replies so far are "
            "kept: the same command goes on there"
        )


def _wire(message: Message) -> Message:
    """A message as the protocol has it: arguments of calls as JSON text, none of our own fields."""
    out = {key: value for key, value in message.items() if key not in ("finish_reason", "cut")}
    if "tool_calls" in out:
        out["tool_calls"] = [_wire_call(number, call) for number, call in enumerate(out["tool_calls"])]
    return out


def _wire_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{number}", **call, "function": {**function, "arguments": text}}


def _answer(value: dict[str, Any]) -> Answer:
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    said = choice.get("message")
    if not isinstance(said, dict):
        raise RowFailed(f"the answer has no message: {json.dumps(value)[:200]}")
    content, calls = said.get("content"), said.get("tool_calls") or []
    if not isinstance(content, str | None):
        raise RowFailed(f"the reply's content is no text: {json.dumps(content)[:200]}")
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise RowFailed(f"the reply's tool_calls are none: {json.dumps(calls)[:200]}")
    message: Message = {"role": "assistant", "content": content or ""}
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    message |= {"reasoning_content": reasoning} if isinstance(reasoning, str) and reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    if any("\ud800" <= c <= "\udfff" for c in json.dumps(message, ensure_ascii=False)):
        raise RowFailed("the reply holds half of a UTF-16 pair, which is no character")
    if len(message) == 2 and not message["content"].strip():
        raise RowFailed("the reply is empty")
    message |= {"finish_reason": "length"} if choice.get("finish_reason") == "length" else {}
    usage = value.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    return Answer(message, tokens if isinstance(tokens, int) else 0)


def _is_call(call: Any) -> bool:
    """Whether a tool call names its function."""
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; it may also give a date, which is taken as no wish."""
    given = response.headers.get("retry-after", "")
    return min(float(given), _LONGEST_WAIT) if given.isdecimal() else 0.0


def _text(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200]
