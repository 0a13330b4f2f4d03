"""Hostile inputs, one table: what each does to a preparation. A bad row never ends a run; it is counted with its reason."""

import base64
import gzip
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools import chat, reasons, run, supervised, text_of, write_target
from draftsmith.data.shards import Corpus
from draftsmith.errors import UserError

GOOD = json.dumps(chat())
A = {"role": "assistant", "content": "Fine, thank you."}
U = {"role": "user", "content": "How are you?"}


def lines(*rows: Any) -> bytes:
    """JSONL of rows (objects, or raw text), with a good row at the end."""
    parts = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    return b"\n".join([*parts, GOOD.encode(), b""])


def turns(*messages: Any, **more: Any) -> bytes:
    return lines({"messages": list(messages), **more})


def assistant(**fields: Any) -> bytes:
    """A conversation whose one assistant turn has these fields."""
    return turns(U, {"role": "assistant", **fields})


def call(arguments: Any = None, **fields: Any) -> bytes:
    return turns(U, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments, **fields}}]}, {"role": "tool", "content": "1"}, A)  # fmt: skip  # noqa: E501


def parquet(table: dict[str, list[Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    return sink.getvalue()


def arrow_stream(table: dict[str, list[Any]]) -> bytes:
    sink = io.BytesIO()
    data = pa.table(table)
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_table(data)
    return sink.getvalue()


TWO = {"messages": [chat()["messages"], chat("Who?", "Me, of course.")["messages"]]}
RANDOM = [{"text": base64.b64encode(os.urandom(600)).decode()} for _ in range(50)]
DEEP = "[" * 100_000 + "]" * 100_000
NESTED: Any = "end"
for _ in range(200):
    NESTED = [NESTED]
STRINGS = {"tools": json.dumps([{"name": "f", "parameters": {}}])}

# name -> (file name, content, rows kept, {line: reason})
ROWS: dict[str, tuple[str, bytes, int, dict[int, str]]] = {
    # the file as bytes
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(chat()), 2, {}),
    "carriage returns": ("a.jsonl", lines(chat(), chat()).replace(b"\n", b"\r\n"), 3, {}),
    "blank lines": ("a.jsonl", b"\n\n  \n" + lines(chat()) + b"\n\n", 2, {}),
    "no line break at the end": ("a.jsonl", lines(chat()).rstrip(), 2, {}),
    "invalid UTF-8": ("a.jsonl", lines(b'{"text": "caf\xe9"}'), 1, {1: "invalid-utf8"}),
    "UTF-8 cut in a character": ("a.jsonl", lines('{"text": "é'.encode()[:-1]), 1, {1: "invalid-utf8"}),
    "binary rubbish": ("a.jsonl", lines(bytes(range(14, 256))), 1, {1: "invalid-utf8"}),
    "NUL bytes between rows": ("a.jsonl", lines(b"\0\0\0\0"), 1, {1: "invalid-json"}),
    "two objects on a line": ("a.jsonl", lines(GOOD + GOOD), 1, {1: "invalid-json"}),
    "row cut in the middle": ("a.jsonl", lines(GOOD[:40]), 1, {1: "invalid-json"}),
    "row cut after a comma": ("a.jsonl", lines('{"messages": [{"role": "user",'), 1, {1: "invalid-json"}),
    "single quotes": ("a.jsonl", lines(GOOD.replace('"', "'")), 1, {1: "invalid-json"}),
    "brackets 100,000 deep": ("a.jsonl", lines(DEEP), 1, {1: "invalid-json"}),
    "a number of 5,000 digits": ("a.jsonl", lines('{"text": ' + "9" * 5000 + "}"), 1, {1: "invalid-json"}),
    "duplicate keys": ("a.jsonl", lines('{"text": "hello there", "text": "other"}'), 1, {1: "duplicate-key"}),
    "duplicate keys in a turn": (
        "a.jsonl", lines(GOOD.replace('"role": "user"', '"role": "user", "role": "assistant"')), 1, {1: "duplicate-key"}),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(lines(*RANDOM))[:-400], 49, {50: "unreadable-file"}),
    "gzip by name only": ("a.jsonl.gz", lines(chat()), 2, {}),
    "gzip without its name": ("a.jsonl", gzip.compress(lines(chat())), 2, {}),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), 0, {1: "unreadable-file"}),
    "JSON list cut off": ("a.json", b"[" + GOOD.encode() + b",\n" + GOOD.encode() + b",\n", 2, {3: "unreadable-file"}),
    "JSON list cut in a row": ("a.json", b"[" + GOOD.encode() + b",\n" + GOOD.encode()[:50], 1, {2: "unreadable-file"}),
    "JSON list with a broken row": (
        "a.json", b"[" + GOOD.encode() + b", {oops}, " + GOOD.encode() + b"]", 1, {2: "unreadable-file"}),
    "JSON list with odd members": (
        "a.json", b"[" + GOOD.encode() + b', 3, "x", null, []]', 1, {n: "not-an-object" for n in (2, 3, 4, 5)}),
    "JSON list with bad UTF-8": ("a.json", b'[{"text": "caf\xe9 au lait"}, ' + GOOD.encode() + b"]", 1, {1: "invalid-utf8"}),
    "JSON list with a key twice": (
        "a.json", b'[{"text": "hello you", "text": ""}, ' + GOOD.encode() + b"]", 1, {1: "duplicate-key"}),
    "truncated parquet": ("a.parquet", parquet(TWO)[:-30], 0, {1: "unreadable-file"}),
    "parquet that is text": ("a.parquet", lines(chat()), 0, {1: "unreadable-file"}),
    "truncated arrow": ("a.arrow", arrow_stream(TWO)[:-200], 0, {1: "unreadable-file"}),
    "CSV with too many fields": ("a.csv", b"prompt,response\nhello,one two three\na,b,c\n", 1, {3: "bad-csv-row"}),
    "CSV with too few fields": ("a.csv", b"prompt,response\nhello,one two three\na\n", 1, {3: "bad-csv-row"}),
    "CSV with an open quote": ("a.csv", b'prompt,response\nhello,one two three\n"a,b\n', 1, {3: "unreadable-file"}),
    "CSV with bad UTF-8": ("a.csv", b"prompt,response\nhello,one two three\nb\xe9,fine thanks\n", 1, {3: "invalid-utf8"}),
    # shapes of rows
    "not an object": ("a.jsonl", lines([1, 2], "3", '"text"', "null"), 1, {n: "not-an-object" for n in (1, 2, 3, 4)}),
    "unknown fields": ("a.jsonl", lines({"foo": 1}, {}), 1, {1: "unknown-shape", 2: "unknown-shape"}),
    "null messages": ("a.jsonl", lines({"messages": None}), 1, {1: "unknown-shape"}),
    "messages as a number": ("a.jsonl", lines({"messages": 7}), 1, {1: "bad-message"}),
    "messages as an object": ("a.jsonl", lines({"messages": {"role": "user"}}), 1, {1: "bad-message"}),
    "messages as JSON text": ("a.jsonl", lines({"messages": json.dumps([U, A])}), 2, {}),
    "messages as other text": ("a.jsonl", lines({"messages": "hello"}), 1, {1: "bad-message"}),
    "no turns": ("a.jsonl", lines({"messages": []}), 1, {1: "no-assistant"}),
    "turns of other types": ("a.jsonl", turns(U, "hello", A), 1, {1: "bad-message"}),
    "null turn": ("a.jsonl", turns(U, None, A), 1, {1: "bad-message"}),
    "missing role": ("a.jsonl", turns({"content": "x"}, A), 1, {1: "no-role"}),
    "unknown role": ("a.jsonl", turns({"role": "narrator", "content": "x"}, A), 1, {1: "unknown-role"}),
    "role as a number": ("a.jsonl", turns({"role": 1, "content": "x"}, A), 1, {1: "unknown-role"}),
    "roles in capitals": ("a.jsonl", turns({**U, "role": "User"}, {**A, "role": "ASSISTANT"}), 2, {}),
    "null content": ("a.jsonl", turns({"role": "user", "content": None}, A), 1, {1: "null-content"}),
    "null reply": ("a.jsonl", assistant(content=None), 1, {1: "null-content"}),
    "missing content": ("a.jsonl", turns({"role": "user"}, A), 1, {1: "null-content"}),
    "number as content": ("a.jsonl", turns({"role": "user", "content": 5}, A), 1, {1: "bad-content"}),
    "boolean as content": ("a.jsonl", turns({"role": "user", "content": True}, A), 1, {1: "bad-content"}),
    "object as content": ("a.jsonl", turns({"role": "user", "content": {"a": 1}}, A), 1, {1: "bad-content"}),
    "nested lists as content": ("a.jsonl", turns({"role": "user", "content": NESTED}, A), 1, {1: "bad-content"}),
    "typed parts": ("a.jsonl", turns({"role": "user", "content": [{"type": "text", "text": "Hi"}, "!"]}, A), 2, {}),
    "an image": ("a.jsonl", turns({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A), 1, {1: "non-text-content"}),  # noqa: E501
    "a part without text": ("a.jsonl", turns({"role": "user", "content": [{"type": "text"}]}, A), 1, {1: "bad-content"}),
    "only a system turn": ("a.jsonl", turns({"role": "system", "content": "Be kind."}), 1, {1: "no-assistant"}),
    "only a user turn": ("a.jsonl", turns(U), 1, {1: "no-assistant"}),
    "only an assistant turn": ("a.jsonl", turns(A), 1, {1: "no-assistant"}),
    "leading assistant": ("a.jsonl", turns(A, U, A), 2, {}),
    "two assistants in a row": ("a.jsonl", turns(U, A, A), 2, {}),
    "two users in a row": ("a.jsonl", turns(U, U, A), 2, {}),
    "user turn at the end": ("a.jsonl", turns(U, A, U), 2, {}),
    "empty assistant": ("a.jsonl", assistant(content=""), 1, {1: "empty-assistant"}),
    "assistant of spaces": ("a.jsonl", assistant(content=" \n\t "), 1, {1: "empty-assistant"}),
    "empty user": ("a.jsonl", turns({"role": "user", "content": ""}, A), 2, {}),
    "every weight 0": ("a.jsonl", turns(U, {**A, "weight": 0}), 1, {1: "no-assistant"}),
    "mixed schemas": (
        "a.jsonl", lines(chat(), {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}]}, {"prompt": "a", "completion": "one two"}, {"text": "plain text here"}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}), 6, {}),  # noqa: E501
    # tools
    "tool arguments as text": ("a.jsonl", call('{"a": 1}'), 2, {}),
    "tool arguments as an object": ("a.jsonl", call({"a": {"b": [1, None]}}), 2, {}),
    "both tool encodings in a row": ("a.jsonl", turns(U, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "g", "arguments": {}}}]}, **STRINGS), 2, {}),  # noqa: E501
    "tool arguments no JSON": ("a.jsonl", call("{oops"), 1, {1: "bad-tool-call"}),
    "tool arguments a list": ("a.jsonl", call([1]), 1, {1: "bad-tool-call"}),
    "tool call without a name": ("a.jsonl", call({}, name=None), 1, {1: "bad-tool-call"}),
    "tool calls no JSON": ("a.jsonl", assistant(content="x y", tool_calls="oops"), 1, {1: "bad-tool-call"}),
    "tools no JSON": ("a.jsonl", turns(U, A, tools="oops"), 1, {1: "bad-tools"}),
    "tools of other types": ("a.jsonl", turns(U, A, tools=[1]), 1, {1: "bad-tools"}),
    "tool answer as an object": ("a.jsonl", turns(U, A, {"role": "tool", "content": {"a": 1}}, A), 2, {}),
    # texts
    "lone surrogate": ("a.jsonl", lines('{"text": "ab\\ud800cd"}', GOOD.replace("How", "\\udfff")), 1, {1: "lone-surrogate", 2: "lone-surrogate"}),  # noqa: E501
    "lone surrogate in tools": ("a.jsonl", turns(U, A, tools=[{"name": "\ud800"}]), 1, {1: "lone-surrogate"}),
    "NUL in a text": ("a.jsonl", lines(chat("a\0b", "c\0d e")), 2, {}),
    "right to left and emoji": ("a.jsonl", lines(chat("مرحبا שלום \u202eabc", "👩‍👩‍👧 🙂 नमस्ते ﷽ Z̷͕͠")), 2, {}),
    "private-use characters": ("a.jsonl", lines(chat("\ue000 \U000f0001", "icons \U000f0002\U0010fffd")), 2, {}),
    "special tokens in texts": ("a.jsonl", lines(chat("<|im_end|>\n<|im_start|>system", "a <|im_end|> b")), 2, {}),
    "path in names": ("../a.jsonl", turns(U, A, id="../../etc/passwd", source="/etc/shadow"), 2, {}),
    "blank text": ("a.jsonl", lines({"text": "  \n"}), 1, {1: "empty-text"}),
    "text as a list": ("a.jsonl", lines({"text": ["a"]}), 1, {1: "bad-content"}),
    "text of one token": ("a.jsonl", lines({"text": "a"}), 1, {1: "no-anchor"}),
    # tokens
    "token masks of other length": ("a.jsonl", lines({"input_ids": [1, 2], "loss_mask": [1]}), 1, {1: "bad-tokens"}),
    "tokens without mask": ("a.jsonl", lines({"input_ids": [1, 2]}), 1, {1: "bad-tokens"}),
    "tokens as text": ("a.jsonl", lines({"input_ids": ["1"], "loss_mask": [1]}), 1, {1: "bad-tokens"}),
    "mask of other numbers": ("a.jsonl", lines({"input_ids": [1, 2], "loss_mask": [0, 2]}), 1, {1: "bad-tokens"}),
    "token ids out of range": (
        "a.jsonl", lines({"input_ids": [1, 99999], "loss_mask": [1, 1]}, {"input_ids": [-1, 2], "loss_mask": [1, 1]}), 1,
        {1: "token-out-of-range", 2: "token-out-of-range"}),
    "nothing supervised": ("a.jsonl", lines({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}), 1, {1: "no-anchor"}),
    # sizes
    "over-long row": ("a.jsonl", lines(chat("hello " * 3000)), 1, {1: "over-long"}),
    "a row of 10 MB": ("a.jsonl", lines(chat("hello there " * 850_000)), 1, {1: "over-long"}),
    "1,000 turns": ("a.jsonl", turns(*[U, A] * 500), 1, {1: "over-long"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_table_is_long_enough():
    assert len(ROWS) >= 60


@pytest.mark.parametrize("name", ROWS)
def test_hostile_input(name, target, tmp_path):
    file, content, kept, rejected = ROWS[name]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / file).write_bytes(content)
    sources = [folder / file]
    if not kept:  # a good file beside it: one broken file does not end a run
        (folder / "good.jsonl").write_text(GOOD)
        sources.append(folder / "good.jsonl")
    report = run(target, tmp_path / "out", *sources, max_tokens=2048)
    assert reasons(tmp_path / "out") == sorted(rejected.items())
    assert report.kept == max(kept, 1)
    assert report.rows_in == report.kept + len(rejected) == report.kept + sum(report.rejected.values())
    assert sum(counts["documents"] for counts in report.splits.values()) == report.kept
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        {"data", "out", *([Path(file).name] if ".." in file else [])}
    )


def test_texts_come_back_whole(target, tmp_path):
    """Odd characters are neither dropped nor changed."""
    for i, name in enumerate(
        ("NUL in a text", "right to left and emoji", "private-use characters", "special tokens in texts")
    ):
        content = ROWS[name][1]
        (tmp_path / f"{i}.jsonl").write_bytes(content)
        run(target, tmp_path / f"out{i}", tmp_path / f"{i}.jsonl")
        question, answer = (m["content"] for m in json.loads(content.splitlines()[0])["messages"])
        corpus = Corpus.open(tmp_path / f"out{i}", "train")
        assert question in text_of(corpus, 0)
        assert supervised(corpus, 0) == [f"{answer}<|im_end|>"]


def test_over_long_rows_may_be_truncated(target, tmp_path):
    """Cut where asked; a row whose supervised part lies past the limit is rejected with that reason."""
    rows = [
        chat("hello", "there " * 500),
        chat("hello " * 500, "there you are"),
        chat("hello " * 50_000, "there you are"),
    ]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    report = run(target, tmp_path / "out", tmp_path / "a.jsonl", max_tokens=100, over_long="truncate")
    assert Corpus.open(tmp_path / "out", "train").lengths.max() == 100
    assert reasons(tmp_path / "out") == [(2, "supervised-past-limit"), (3, "supervised-past-limit")]
    assert report.notes["truncated"] == 1


def test_row_beyond_the_size_limit(target, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.data.readers.MAX_ROW", 1000)
    (tmp_path / "a.jsonl").write_bytes(lines(chat("hello " * 1000), chat()))
    run(target, tmp_path / "out", tmp_path / "a.jsonl")
    assert reasons(tmp_path / "out") == [(1, "row-too-big")]


# what the user named or where it should go: one clear line, nothing written
def loop(folder: Path) -> Path:
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    return folder / "loop.jsonl"


def dangling(folder: Path) -> Path:
    (folder / "gone.jsonl").symlink_to(folder / "nowhere.jsonl")
    return folder / "gone.jsonl"


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


MISTAKES: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "missing file": (lambda folder: folder / "none.jsonl", "no such file"),
    "glob without match": (lambda folder: f"{folder}/*.jsonl", "matches no file"),
    "empty folder": (empty_folder, "no data files"),
    "link in a circle": (loop, "loop.jsonl"),
    "link to nowhere": (dangling, "link that leads nowhere"),
    "empty file": (written("a.jsonl", b""), "there are no rows"),
    "only blank lines": (written("a.jsonl", b"\n\n"), "there are no rows"),
    "empty list": (written("a.json", b"[]"), "there are no rows"),
    "no good row": (written("a.jsonl", b"{}\n3\n"), "none of 2 rows could be kept .*a.jsonl:1: unknown-shape"),
    "weight no number": (lambda folder: f"{folder}/a.jsonl::x", "is no number"),
    "weight 0": (lambda folder: f"{folder}/a.jsonl::0", "above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_users_mistake(name, target, tmp_path):
    make, message = MISTAKES[name]
    (tmp_path / "data").mkdir()
    source = make(tmp_path / "data")
    with pytest.raises(UserError, match=message) as caught:
        run(target, tmp_path / "out", source)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(target, tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        run(target, tmp_path / "out", tmp_path / "a.jsonl")


def test_full_disk(target, tmp_path):
    """Writing fails half-way: one line, nothing left behind, an old corpus stays as it was."""
    small, big = tmp_path / "small.jsonl", tmp_path / "big.jsonl"
    small.write_text(GOOD)
    big.write_text("\n".join(json.dumps(chat(f"{i}", "hello there " * 300)) for i in range(400)))
    run(target, tmp_path / "out", small)
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # as a full disk: the write fails with OSError
    try:
        with pytest.raises(UserError, match="cannot be written"):
            run(target, tmp_path / "out", big, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.jsonl", "out", "small.jsonl"]


def test_destination_that_cannot_be_made(target, tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run(target, tmp_path / "file" / "out", tmp_path / "a.jsonl")


def test_destination_that_exists(target, tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        run(target, tmp_path / "out", tmp_path / "a.jsonl")
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_target_without_template(target, tmp_path):
    """The error names the flag that gives one; rows that need none are kept."""
    base = write_target(tmp_path / "base", None)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match="--chat-template"):
        run(base, tmp_path / "out", tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "hello there, how are you?"}')
    run(base, tmp_path / "out", tmp_path / "b.jsonl")
    run(base, tmp_path / "chat", tmp_path / "a.jsonl", chat_template=target / "chat_template.jinja")


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ 1 / 0 }}", "{{ messages[0].content.x.y }}", "{{ ''.__class__.mro() }}"]
)
def test_broken_templates(template, target, tmp_path):
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match="template"):
        run(target, tmp_path / "out", tmp_path / "a.jsonl", chat_template=tmp_path / "t.jinja")
    assert not (tmp_path / "out").exists()
