"""`draftsmith regenerate`: assistant turns replaced by the target's own replies, each given after its own earlier ones.

    rows -> for each assistant turn in order: the conversation so far -> reply -> journal -> rows with the replies
Rows in = written + rejected or failed, checked. A call that was ended on the way goes on where it was: replies that the
journal holds are not asked for again. Turns with tool calls stay as they are, since their results belong to them.
"""

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.console import Console
from draftsmith.data import sources
from draftsmith.data.conversations import Conversation, RowRules, parse_row
from draftsmith.data.endpoint import Endpoint, RowFailed, Sampling
from draftsmith.data.journal import Journal
from draftsmith.data.options import RegenerateOptions
from draftsmith.data.process import decode_json
from draftsmith.data.tools import Rejection, without_nulls
from draftsmith.errors import UserError

Message = dict[str, Any]
# Options that change no reply.
_SAME_REPLIES = ("concurrency", "retries", "timeout", "overwrite", "api_key_file", "out")
_PACE_SECONDS = 30.0


@dataclass(frozen=True)
class RegenerateReport:
    """What `regenerate` did."""

    out: Path
    rows_in: int
    written: int
    rejected: int
    """Rows that are no conversation, and rows that the model could not reply to: OUT.rejected.jsonl."""
    replies: int
    kept_before: int
    """Replies that an interrupted run had got."""
    tokens: int
    cut: int
    """Replies that ended at --max-new-tokens."""
    seconds: float

    def summary(self) -> str:
        lines = [f"{self.rows_in:,} rows in = {self.written:,} written + {self.rejected:,} rejected"]
        if self.rejected:
            lines.append(f"  each with file, line and reason in {self.out}.rejected.jsonl")
        before = f" ({self.kept_before:,} of them from an interrupted run)" if self.kept_before else ""
        lines.append(f"{self.replies:,} replies{before}, {self.tokens:,} tokens, {self.seconds:.1f} seconds")
        if self.cut:
            lines.append(f"  note: {self.cut:,} replies were cut at --max-new-tokens; `prepare` trains on no end there")
        return "\n".join([*lines, f"conversations: {self.out}"])


@dataclass(frozen=True)
class Row:
    """One conversation of the sources. `number` counts all rows."""

    number: int
    file: str
    line: int
    parsed: Conversation | Rejection


class Dialogue:
    """A conversation on its way: the turns so far, and whether a reply to them is asked for."""

    def __init__(self, conversation: Conversation, replies: list[Message]):
        self.tools = conversation.tools
        self.messages: list[Message] = []
        self.waiting = False
        self._given = deque(conversation.messages)
        if conversation.messages[-1]["role"] != "assistant":
            self._given.append({"role": "assistant", "content": ""})  # a prompt without its reply
        self._advance()
        for reply in replies:
            self.add(reply)

    def add(self, reply: Message) -> None:
        """The reply that was asked for."""
        self.messages.append(reply)
        self._advance()

    def _advance(self) -> None:
        """Take over turns up to the next one that is asked for, whose given text is dropped."""
        while self._given:
            turn = self._given.popleft()
            answers = any(m["role"] in ("user", "tool") for m in self.messages)
            if turn["role"] == "assistant" and answers and not turn.get("tool_calls"):
                self.waiting = True
                return
            self.messages.append(turn)
        self.waiting = False


def main(options: RegenerateOptions) -> None:
    """`draftsmith regenerate`."""
    print(regenerate(options, Console()).summary())


def regenerate(options: RegenerateOptions, console: Console | None = None) -> RegenerateReport:
    """Write `options.out`. UserError where nothing could be written, or the server is gone: the journal stays, and the
    same call goes on there."""
    _check(options)
    files, remarks = sources.expand(options.sources, options.format)
    if any(file.path is None for file in files):
        raise UserError("regenerate reads its sources twice: give files, not standard input or a hub id")
    for out in (options.out, _beside(options.out, "rejected"), _beside(options.out, "journal")):
        sources.check_apart(out, files, (options.chat_template, options.api_key_file))
    if console:
        for remark in remarks:
            console.note(remark)
    journal = Journal(_beside(options.out, "journal"), _fingerprint(options, files))
    job = _Job(options, files, journal)
    try:
        job.collect(console or Console(_silent()))
        return job.write()
    except OSError as error:
        raise UserError(
            f"{options.out}: cannot be written: {error}; replies so far are in {job.journal.path}"
        ) from None
    finally:
        job.journal.close()


class _Job:
    """One call between its journal's opening and the file that it writes."""

    def __init__(self, options: RegenerateOptions, files: list[sources.InputFile], journal: Journal):
        self.options, self.files, self.journal = options, files, journal
        self.kept_before, self.began = journal.replies, time.monotonic()

    def rows(self) -> Iterator[Row]:
        """All rows in order; may be called again."""
        rules = RowRules(self.options.shape, prompts=True)
        number = 0
        for chunk in sources.read_chunks(self.files, 64, 1 << 20):
            for line, row in zip(chunk.lines, chunk.decoded(), strict=True):
                yield Row(number, self.files[chunk.file].name, line, _parse(row, rules, chunk.columnar))
                number += 1

    def collect(self, console: Console) -> None:
        """Every reply that the journal lacks."""
        total = sum(len(chunk.lines) for chunk in sources.read_chunks(self.files, 64, 1 << 20))
        if self.kept_before:
            console.note(f"going on: {self.kept_before:,} replies are there")
        with console.progress("regenerate", total, "rows") as bar:
            pace = _Pace(console, self.journal)

            def done() -> None:
                bar.advance()
                pace.say()

            if self.options.endpoint:
                asyncio.run(self._by_endpoint(self.options.endpoint, done))
            else:
                from draftsmith.data.in_process import reply_in_process

                reply_in_process(self.options, self.rows(), self.journal, done)

    async def _by_endpoint(self, url: str, done: Any) -> None:
        o = self.options
        sampling = Sampling(o.max_new_tokens, o.temperature, o.top_p, o.seed, tuple(o.template_options.items()))
        rows = self.rows()
        async with Endpoint(
            url, o.model, _key(o.api_key_file), sampling, o.retries, o.timeout, o.concurrency
        ) as endpoint:
            await endpoint.model()

            async def work() -> None:
                for row in rows:  # shared: each row goes to the first worker that is free
                    await self._converse(row, endpoint)
                    done()

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(o.concurrency):
                        group.create_task(work())
            except ExceptionGroup as group:
                mistakes = group.subgroup((UserError, OSError))
                if mistakes is None:
                    raise
                raise mistakes.exceptions[0] from None

    async def _converse(self, row: Row, endpoint: Endpoint) -> None:
        if isinstance(row.parsed, Rejection):
            return
        dialogue = Dialogue(row.parsed, self.journal.read(row.number))
        while dialogue.waiting:
            try:
                answer = await endpoint.ask(dialogue.messages, dialogue.tools)
            except RowFailed as error:
                self.journal.fail(row.number, str(error))
                return
            self.journal.add(row.number, answer.message, answer.tokens)
            dialogue.add(answer.message)

    def write(self) -> RegenerateReport:
        """OUT and OUT.rejected.jsonl, complete or absent; the journal goes unless rows failed, which may be tried again."""
        out = self.options.out
        refused = _beside(out, "rejected")
        rows_in = written = 0
        parts = [path.with_name(f".{path.name}.tmp") for path in (out, refused)]
        with open(parts[0], "w", encoding="utf-8") as good, open(parts[1], "w", encoding="utf-8") as bad:
            for row in self.rows():
                rows_in += 1
                reason, detail = self._problem(row)
                if reason:
                    bad.write(
                        json.dumps({"file": row.file, "line": row.line, "reason": reason, "detail": detail}) + "\n"
                    )
                    continue
                assert isinstance(row.parsed, Conversation)
                dialogue = Dialogue(row.parsed, self.journal.read(row.number))
                if dialogue.waiting:
                    raise RuntimeError(f"{row.file}:{row.line}: a reply is missing")
                record: dict[str, Any] = {"messages": dialogue.messages, "source": f"{row.file}:{row.line}"}
                good.write(json.dumps(record | ({"tools": dialogue.tools} if dialogue.tools else {})) + "\n")
                written += 1
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
        if not written:
            first = parts[1].read_text().partition("\n")[0] or "there were no rows"
            for part in parts:
                part.unlink()
            raise UserError(
                f"{self.options.sources[0]}: no row got its replies (first: {first}); {out} was not written"
            )
        os.replace(parts[1], refused) if written < rows_in else parts[1].unlink()
        os.replace(parts[0], out)
        self.journal.close() if self.journal.failed else self.journal.remove()
        return RegenerateReport(
            out, rows_in, written, rows_in - written, self.journal.replies, self.kept_before, self.journal.tokens,
            self.journal.cut, time.monotonic() - self.began,
        )  # fmt: skip

    def _problem(self, row: Row) -> tuple[str, str]:
        if isinstance(row.parsed, Rejection):
            return row.parsed.reason, row.parsed.detail
        failed = self.journal.failed.get(row.number)
        return ("no-reply", failed) if failed is not None else ("", "")


class _Pace:
    """A line on the rate every half minute."""

    def __init__(self, console: Console, journal: Journal):
        self._console, self._journal = console, journal
        self._said, self._replies, self._tokens = time.monotonic(), journal.replies, journal.tokens

    def say(self) -> None:
        now = time.monotonic()
        if now - self._said < _PACE_SECONDS:
            return
        replies, tokens = self._journal.replies, self._journal.tokens
        rate = (replies - self._replies) / (now - self._said), (tokens - self._tokens) / (now - self._said)
        self._console.note(f"{replies:,} replies, {rate[0]:.1f} replies/s, {rate[1]:,.0f} tokens/s")
        self._said, self._replies, self._tokens = now, replies, tokens


def _parse(row: Any, rules: RowRules, columnar: bool) -> Conversation | Rejection:
    try:
        if isinstance(row, bytes):
            row = decode_json(row)
        if isinstance(row, Rejection):
            return row
        parsed = parse_row(without_nulls(row) if columnar else row, rules)
        json.dumps(
            [parsed.messages, parsed.tools] if isinstance(parsed, Conversation) else 0, ensure_ascii=False
        ).encode()
    except Rejection as no:
        return no
    except UnicodeEncodeError:
        return Rejection("lone-surrogate", "half of a UTF-16 pair, which is no character")
    return (
        parsed if isinstance(parsed, Conversation) else Rejection("not-a-conversation", "text or tokens have no turns")
    )


def _beside(out: Path, what: str) -> Path:
    return out.with_name(f"{out.name}.{what}.jsonl")


def _check(options: RegenerateOptions) -> None:
    if options.endpoint is None and options.model is None:
        raise UserError(
            "name a server with --endpoint URL, or a target with --model DIRECTORY to reply in this process"
        )
    if options.endpoint is not None and not options.endpoint.startswith(("http://", "https://")):
        raise UserError(f"--endpoint {options.endpoint}: must begin with http:// or https://")
    if options.out.exists() and not options.out.is_file():
        raise UserError(f"{options.out}: is no file; name the file to write")
    if options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out}: exists already; name another file, or add --overwrite")
    if not options.out.absolute().parent.is_dir():
        raise UserError(f"{options.out}: its folder does not exist")
    folders = (*options.sources, *((options.model,) if options.model and not options.endpoint else ()))
    inside = [f for f in folders if Path(f).is_dir() and Path(f).resolve() in options.out.resolve().parents]
    if inside:
        raise UserError(f"{options.out}: lies in {inside[0]}, which this command reads; write it elsewhere")
    rules = [
        (options.concurrency >= 1, "--concurrency", "must be at least 1"),
        (options.retries >= 0, "--retries", "must not be negative"),
        (0 < options.timeout < math.inf, "--timeout", "must be a positive number"),
        (options.max_new_tokens >= 1, "--max-new-tokens", "must be at least 1"),
        (0 <= options.temperature < math.inf, "--temperature", "must be a finite number, 0 or more"),
        (0 < options.top_p <= 1, "--top-p", "must be in (0, 1]"),
    ]
    for good, flag, message in rules:
        if not good:
            raise UserError(f"{flag} {message}")


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip().splitlines()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise UserError(f"{path}: no API key can be read: {error}") from None


def _fingerprint(options: RegenerateOptions, files: list[sources.InputFile]) -> str:
    settings = {k: str(v) for k, v in dataclasses.asdict(options).items() if k not in _SAME_REPLIES}
    parts = json.dumps([settings, sources.fingerprint(files)], sort_keys=True)
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _silent() -> Any:
    import io

    import rich.console

    return rich.console.Console(file=io.StringIO())
