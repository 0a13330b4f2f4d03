"""`prepare` from end to end: formats, row shapes, splits, weights, workers, interruption, export, fit with a target."""

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data_tools import chat, reasons, run, supervised, text_of, tokenizer_json, write_jsonl, write_target
from draftsmith.data import shards
from draftsmith.data.options import PrepareOptions
from draftsmith.data.prepare import main, prepare
from draftsmith.data.shards import Batch, Corpus, Manifest, ShardWriter
from draftsmith.data.show import show_documents
from draftsmith.data.template import check_matches, load_tokenizer
from draftsmith.errors import UserError
from draftsmith.unit import UnitSequence, UnitShape

WORDS = "the quick brown fox jumps over lazy dogs and says hello there friend it is sunny today in Paris".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def many(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct conversations of one to four turns."""
    rng = np.random.default_rng(seed)
    say = lambda: " ".join(rng.choice(WORDS, rng.integers(2, 12)))  # noqa: E731
    return [
        {"messages": [m for _ in range(rng.integers(1, 5)) for m in chat(f"{i} {say()}", say())["messages"]]}
        for i in range(count)
    ]


def documents(out: Path, split: str = "train") -> list[tuple[bytes, bytes]]:
    corpus = Corpus.open(out, split)
    return [tuple(part.tobytes() for part in corpus.document(i)) for i in range(len(corpus))]


# ---- formats ----------------------------------------------------------------------------------------------------


def as_csv(rows: list[dict[str, str]]) -> bytes:
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue()


def as_arrow(rows: list[dict[str, Any]], new: Any) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with new(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return sink.getvalue()


def as_jsonl(rows: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PAIRS = [{"prompt": f"Question {i}?", "response": f'Answer "{i}",\nof two lines.'} for i in range(7)]
FORMATS = {
    "a.jsonl": as_jsonl(PAIRS),
    "a.jsonl.gz": gzip.compress(as_jsonl(PAIRS)),
    "two members.jsonl.gz": gzip.compress(as_jsonl(PAIRS[:3]) + b"\n") + gzip.compress(as_jsonl(PAIRS[3:])),
    "a.jsonl.zst": zstd(as_jsonl(PAIRS)),
    "array.json": json.dumps(PAIRS).encode(),
    "pretty.json": json.dumps(PAIRS, indent=2).encode(),
    "array in a line file.jsonl": json.dumps(PAIRS, indent=1).encode(),
    "wrapped.json": json.dumps({"data": PAIRS}).encode(),
    "lines.json": as_jsonl(PAIRS),
    "pretty objects.json": b"\n".join(json.dumps(row, indent=2).encode() for row in PAIRS),
    "array.json.gz": gzip.compress(json.dumps(PAIRS).encode()),
    "a.csv": as_csv(PAIRS),
    "a.csv.gz": gzip.compress(as_csv(PAIRS)),
    "a.tsv": as_csv(PAIRS).replace(b"prompt,response", b"prompt\tresponse").replace(b"?,", b"?\t"),
    "a.parquet": as_parquet(PAIRS),
    "parquet by content": as_parquet(PAIRS),
    "stream.arrow": as_arrow(PAIRS, pa.ipc.new_stream),
    "file.arrow": as_arrow(PAIRS, pa.ipc.new_file),
}


@pytest.fixture(scope="module")
def expected(target, tmp_path_factory) -> list[tuple[bytes, bytes]]:
    folder = tmp_path_factory.mktemp("expected")
    run(target, folder / "out", write_jsonl(folder / "rows.jsonl", [chat(p["prompt"], p["response"]) for p in PAIRS]))
    return documents(folder / "out")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(name, target, expected, tmp_path):
    (tmp_path / name).write_bytes(FORMATS[name])
    report = run(target, tmp_path / "out", tmp_path / name)
    assert documents(tmp_path / "out") == expected
    assert report.rows_in == report.kept == 7


def test_saved_data_sets(target, expected, tmp_path):
    """What `datasets` saved: one split, and several, of which train is read."""
    datasets = pytest.importorskip("datasets", reason="the extra draftsmith[hub] is not installed")
    data = datasets.Dataset.from_list(PAIRS)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    run(target, tmp_path / "out1", tmp_path / "one")
    assert documents(tmp_path / "out1") == expected
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "two")
    run(target, tmp_path / "out2", tmp_path / "two")
    assert documents(tmp_path / "out2") == expected


def test_standard_input(target, expected, tmp_path):
    for name in ("array.json", "a.jsonl.gz"):
        out = tmp_path / name
        command = [
            sys.executable,
            "-m",
            "draftsmith",
            "prepare",
            "-",
            "--model",
            target,
            "--out",
            out,
            "--held-out",
            "0",
        ]
        subprocess.run([*map(str, command)], input=FORMATS[name], check=True, capture_output=True)
        assert documents(out) == expected


def test_folders_and_globs(target, expected, tmp_path):
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "1.jsonl").write_bytes(as_jsonl(PAIRS[:2]))
    (tmp_path / "data" / "2.parquet").write_bytes(as_parquet(PAIRS[2:5]))
    (tmp_path / "data" / "deep" / "3.json").write_bytes(json.dumps(PAIRS[5:]).encode())
    (tmp_path / "data" / "README.md").write_text("no data")
    (tmp_path / "data" / ".hidden.jsonl").write_bytes(as_jsonl(PAIRS))
    run(target, tmp_path / "folder", tmp_path / "data")
    run(target, tmp_path / "glob", f"{tmp_path}/data/?.*", f"{tmp_path}/data/deep")
    assert documents(tmp_path / "folder") == documents(tmp_path / "glob") == expected


def test_hub_ids_need_the_hub(target, tmp_path):
    with pytest.raises(UserError, match="someone/some-data@train: no such file, and as a hub data set"):
        run(target, tmp_path / "out", "someone/some-data@train")
    assert not (tmp_path / "out").exists()


# ---- shapes -----------------------------------------------------------------------------------------------------

U, A = "How are you?", "Fine, thank you."
SHAPES = [
    chat(U, A),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": U}]}, {"role": "assistant", "content": A}]},
    {"conversations": [{"from": "human", "value": U}, {"from": "gpt", "value": A}]},
    {"conversations": [{"role": "user", "content": U}, {"role": "assistant", "content": A}]},
    {"prompt": U, "completion": A},
    {"question": U, "answer": A},
    {"instruction": U, "response": A},
    {"problem": U, "solution": A},
    {"prompt": [{"role": "user", "content": U}], "completion": [{"role": "assistant", "content": A}]},
    {"prompt": U, "chosen": chat(U, A)["messages"][1:], "rejected": "no"},
    {"prompt": chat(U, A)["messages"][:1], "chosen": chat(U, A)["messages"], "rejected": []},
    {"instruction": U, "input": "", "output": A, "history": []},
]


def test_every_shape_of_a_conversation_gives_the_same_document(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", SHAPES))
    found = documents(tmp_path / "out")
    assert len(found) == len(SHAPES)
    assert len(set(found)) == 1
    assert supervised(Corpus.open(tmp_path / "out", "train"), 0) == [f"{A}<|im_end|>"]


def test_other_shapes(target, tmp_path):
    rows = [
        {"instruction": "Add.", "input": "2 and 2", "output": "It is four.", "system": "Be brief.",
         "history": [["Hi", "Hello you"]]},
        {"text": "Plain text, <|im_end|> included."},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]},
        {"tools": '[{"name": "f", "parameters": {}}]', "conversations": [
            {"from": "human", "value": "Call f"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "done"},
            {"from": "gpt", "value": "It is done."},
        ]},
    ]  # fmt: skip
    report = run(target, tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", rows))
    corpus = Corpus.open(tmp_path / "out", "train")
    assert supervised(corpus, 0) == ["Hello you<|im_end|>", "It is four.<|im_end|>"]
    assert "Be brief.<|im_end|>" in text_of(corpus, 0) and "Add.\n\n2 and 2<|im_end|>" in text_of(corpus, 0)
    assert supervised(corpus, 1) == [text_of(corpus, 1)] == ["Plain text, <|im_end|> included."]
    assert [part.tolist() for part in corpus.document(2)] == [[5, 6, 7, 8], [0, 1, 1, 1]]
    assert supervised(corpus, 3)[0] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert report.files[0]["shapes"] == {"alpaca": 1, "text": 1, "tokens": 1, "conversations": 1}


def test_rendered_text(target, tmp_path):
    """Rows that went through the template before: its tokens are tokens, its assistant turns are found."""
    run(target, tmp_path / "chat", write_jsonl(tmp_path / "chat.jsonl", many(20)))
    texts = [text_of(Corpus.open(tmp_path / "chat", "train"), i) for i in range(20)]
    rows = [{"text": text} for text in [*texts, "no turn at all"]]
    run(target, tmp_path / "out", write_jsonl(tmp_path / "text.jsonl", rows), shape="rendered")
    assert documents(tmp_path / "out") == documents(tmp_path / "chat")
    assert reasons(tmp_path / "out") == [(21, "no-assistant")]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma", "mistral", "phi", "deepseek_r1", "glm"])
def test_rendered_text_of_other_families(family, tmp_path):
    target = write_target(tmp_path / family, family)
    run(target, tmp_path / "chat", write_jsonl(tmp_path / "chat.jsonl", many(8)))
    texts = [{"text": text_of(Corpus.open(tmp_path / "chat", "train"), i)} for i in range(8)]
    run(target, tmp_path / "out", write_jsonl(tmp_path / "text.jsonl", texts), shape="rendered")
    assert documents(tmp_path / "out") == documents(tmp_path / "chat")


def test_nulls_that_columns_fill_in_are_left_out(target, tmp_path):
    """parquet gives every row the union of the rows' fields; the document is that of the row as it was."""
    rows = [
        {"messages": [{"role": "user", "content": "Call"}, {"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": "f", "arguments": arguments}}]}, {"role": "tool", "content": "x"},
            {"role": "assistant", "content": "It is done."}]}
        for arguments in ({"a": "1"}, {"b": 2})
    ]  # fmt: skip
    (tmp_path / "a.parquet").write_bytes(as_parquet(rows))
    run(target, tmp_path / "parquet", tmp_path / "a.parquet")
    run(target, tmp_path / "jsonl", write_jsonl(tmp_path / "a.jsonl", rows))
    assert documents(tmp_path / "parquet") == documents(tmp_path / "jsonl")


# ---- splits, weights, order --------------------------------------------------------------------------------------


def test_held_out_split_follows_the_prompt(target, tmp_path):
    """Neither other rows, their order nor other replies move a prompt to the other side."""
    rows = many(400)
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    run(target, tmp_path / "a", source, held_out=0.25)
    held = Corpus.open(tmp_path / "a", "held_out")
    assert 60 <= len(held) <= 140
    other = [
        {"messages": [m if m["role"] == "user" else {**m, "content": "Another reply."} for m in row["messages"]]}
        for row in rows
    ]
    run(target, tmp_path / "b", write_jsonl(tmp_path / "b.jsonl", [*many(50, seed=1), *reversed(other)]), held_out=0.25)
    ask = lambda corpus: {text_of(corpus, i).split("user\n")[1].split("<")[0] for i in range(len(corpus))}  # noqa: E731
    assert ask(held) <= ask(Corpus.open(tmp_path / "b", "held_out"))
    assert not ask(held) & ask(Corpus.open(tmp_path / "b", "train"))


def test_weights(target, tmp_path):
    a, b = write_jsonl(tmp_path / "a.jsonl", many(200)), write_jsonl(tmp_path / "b.jsonl", many(200, seed=1))
    report = run(target, tmp_path / "out", f"{a}::2.5", f"{b}::0.25", held_out=0.1)
    first, second = report.files
    assert first["kept"] == 200 and 30 <= second["kept"] <= 75
    assert report.rejected == {"not-drawn": 200 - second["kept"]}
    train = report.splits["train"]["documents"]
    assert report.notes["copies"] == train + report.splits["held_out"]["documents"] - report.kept
    assert 2.3 * 180 < train < 2.7 * 200 + 75
    held = documents(tmp_path / "out", "held_out")
    assert len(held) == len(set(held))  # never twice
    run(target, tmp_path / "again", f"{a}::2.5", f"{b}::0.25", held_out=0.1)
    assert documents(tmp_path / "again") == documents(tmp_path / "out")


def test_deduplication(target, tmp_path):
    rows = many(30)
    report = run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [*rows, *rows[:10]]), deduplicate=True)
    assert report.kept == 30
    assert reasons(tmp_path / "out") == [(line, "duplicate") for line in range(31, 41)]
    assert run(target, tmp_path / "all", tmp_path / "a.jsonl").kept == 40


def test_shuffle(target, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", many(50))
    run(target, tmp_path / "plain", source)
    for name, seed in (("one", 1), ("same", 1), ("two", 2)):
        run(target, tmp_path / name, source, shuffle=True, seed=seed)
    plain, one, same, two = (documents(tmp_path / name) for name in ("plain", "one", "same", "two"))
    assert one == same != two
    assert sorted(one) == sorted(two) == sorted(plain)
    assert one != plain
    for name in ("plain", "one"):
        corpus = Corpus.open(tmp_path / name, "train")
        assert [shards.count_anchors(corpus.document(i)[1]) for i in range(50)] == corpus.anchor_counts.tolist()


# ---- workers, interruption ---------------------------------------------------------------------------------------


def test_eight_workers_keep_the_order(target, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.data.prepare.ROWS", 16)
    rows: list[Any] = many(600)
    rows[100], rows[333] = {"oops": 1}, {"messages": 3}
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    run(target, tmp_path / "one", source, held_out=0.1, deduplicate=True)
    run(target, tmp_path / "eight", source, held_out=0.1, deduplicate=True, workers=8, deadline=120)
    for split in ("train", "held_out"):
        assert documents(tmp_path / "eight", split) == documents(tmp_path / "one", split)
    assert reasons(tmp_path / "eight") == reasons(tmp_path / "one") == [(101, "unknown-shape"), (334, "bad-message")]


SLOW = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


def test_deadline_names_the_rows(target, tmp_path):
    """A template without end: the run ends, says where, and leaves no process."""
    (tmp_path / "slow.jinja").write_text(
        "{% if messages[0].content == 'stop' %}" + SLOW + "{% endif %}" + (target / "chat_template.jinja").read_text()
    )  # noqa: E501
    rows = [*many(3), chat("stop", "not at all"), *many(3)]
    with pytest.raises(UserError, match=r"rows 1 to 7 of .*a.jsonl took more than 3 seconds.*--deadline"):
        run(
            target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", rows), workers=2, deadline=3.0,
            chat_template=tmp_path / "slow.jinja",
        )  # fmt: skip
    import multiprocessing

    assert not multiprocessing.active_children()
    assert not (tmp_path / "out").exists()


def test_worker_that_dies_is_named(target, tmp_path, monkeypatch):
    """As when the kernel kills it for memory."""
    import multiprocessing
    import threading

    (tmp_path / "slow.jinja").write_text(SLOW)
    source = write_jsonl(tmp_path / "a.jsonl", many(3))

    def kill() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not multiprocessing.active_children():
            time.sleep(0.05)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(UserError, match="rows 1 to 3 of .*a.jsonl: the worker process ended by signal SIGKILL"):
        run(target, tmp_path / "out", source, workers=1, chat_template=tmp_path / "slow.jinja")
    thread.join()


KILLED = """
import sys
from pathlib import Path
from draftsmith.data import prepare as module
from draftsmith.data.options import PrepareOptions
module.ROWS, module.SAVE_EVERY = 16, 0.0
count = 0
def stop(self, result, take=module._Work._take):
    global count
    count += 1
    if count == {after}:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, result)
module._Work._take = stop
module.prepare(PrepareOptions(({source!r},), {target!r}, Path({out!r}), held_out=0.1, deduplicate=True))
"""


def test_killed_preparation_goes_on(target, tmp_path, monkeypatch):
    """SIGKILL twice on the way: the third call writes what an uncut one writes, and reads no row twice."""
    rows: list[Any] = many(300)
    rows[250] = rows[3]
    rows[60] = {"oops": 1}
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr("draftsmith.data.prepare.ROWS", 16)
    whole = run(target, tmp_path / "whole", source, held_out=0.1, deduplicate=True)
    for _ in range(2):
        code = KILLED.format(after=8, source=str(source), target=str(target), out=str(tmp_path / "out"))
        died = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="unfinished preparation with other options"):
        run(target, tmp_path / "out", source, held_out=0.2, deduplicate=True)
    taken: list[int] = []
    from draftsmith.data.prepare import _Work

    take = _Work._take
    monkeypatch.setattr(_Work, "_take", lambda self, result: (taken.append(result.rows), take(self, result)))
    report = run(target, tmp_path / "out", source, held_out=0.1, deduplicate=True)
    assert sum(taken) == 300 - 14 * 16
    for split in ("train", "held_out"):
        assert documents(tmp_path / "out", split) == documents(tmp_path / "whole", split)
    assert (tmp_path / "out" / "rejected.jsonl").read_bytes() == (tmp_path / "whole" / "rejected.jsonl").read_bytes()
    assert (report.rows_in, report.kept, report.rejected, report.splits) == (
        whole.rows_in, whole.kept, whole.rejected, whole.splits)  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "whole"]


def test_a_corpus_inside_a_source_folder_is_no_source(target, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", many(6))
    assert run(target, folder / "corpus", folder, parquet=True).rows_in == 6
    again = run(target, folder / "corpus", folder, parquet=True, overwrite=True)
    assert (again.rows_in, again.kept) == (6, 6)
    with pytest.raises(UserError, match="no data files"):
        run(target, tmp_path / "other", folder / "corpus")


def test_two_commands_cannot_prepare_one_corpus(target, tmp_path):
    holder = (
        "import sys; from pathlib import Path; from draftsmith.data.shards import ShardWriter\n"
        "writer = ShardWriter(Path(sys.argv[1]), 'x'); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="another process is writing"):
            ShardWriter(tmp_path / "out", "y", overwrite=True)
        other.stdin.close()
        other.wait()
    ShardWriter(tmp_path / "out", "y").discard()


@pytest.mark.parametrize("key", ["tokenizer_hash", "vocab_size", "template_options", "template_hash"])
def test_a_manifest_that_lost_a_key_is_named(target, tmp_path, key):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(3)))
    path = tmp_path / "out" / "manifest.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"manifest.json: {key} is missing; prepare the corpus again"):
        Corpus.open(tmp_path / "out", "train")


def test_a_manifest_whose_template_is_no_file_name_is_named(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(3)))
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": 3}))
    with pytest.raises(UserError, match="manifest.json: chat_template is no string; prepare the corpus again"):
        Corpus.open(tmp_path / "out", "train")


def test_a_manifest_without_the_hash_of_its_template_is_refused(target, tmp_path):
    """It would fit any target's template."""
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(3)))
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"template_hash": None}))
    with pytest.raises(UserError, match="manifest.json: template_hash is no string; prepare the corpus again"):
        Corpus.open(tmp_path / "out", "train")


ANCHORS = {
    "negative": lambda anchors, mask: (anchors - 1000, mask),
    "more than tokens": lambda anchors, mask: (anchors + 100_000, mask),
    "others": lambda anchors, mask: (anchors - 1, mask),
    "none": lambda anchors, mask: (anchors * 0, mask),
    "none in the mask": lambda anchors, mask: (anchors, mask * 0),
    "none in both": lambda anchors, mask: (anchors * 0, mask * 0),
}


@pytest.mark.parametrize("damage", ANCHORS)
def test_anchors_that_the_mask_does_not_give_are_refused(target, tmp_path, damage):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(100)))
    paths = [tmp_path / "out" / "train" / name for name in ("anchors.bin", "mask.bin")]
    parts = [np.fromfile(path, dtype) for path, dtype in zip(paths, ("<i4", "u1"), strict=True)]
    for path, part, before in zip(paths, ANCHORS[damage](*parts), parts, strict=True):
        part.astype(before.dtype).tofile(path)
    with pytest.raises(UserError, match=r"train: (anchors.bin has|no document has anything).*prepare the corpus again"):
        Corpus.open(tmp_path / "out", "train")


def test_changed_input_is_not_continued(target, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", many(10))
    writer = ShardWriter(tmp_path / "out", "other")
    writer.save_progress({})
    writer.close()
    (writer.staging / "documents.parquet").write_text("of the other options")
    with pytest.raises(UserError, match="unfinished preparation"):
        run(target, tmp_path / "out", source)
    assert run(target, tmp_path / "out", source, overwrite=True).kept == 10
    assert not (tmp_path / "out" / "documents.parquet").exists() and not writer.staging.exists()


# ---- the corpus on disk ------------------------------------------------------------------------------------------


def test_overwrite_replaces_when_the_new_one_is_complete(target, tmp_path):
    a, b = write_jsonl(tmp_path / "a.jsonl", many(5)), write_jsonl(tmp_path / "b.jsonl", [{"oops": 1}])
    run(target, tmp_path / "out", a)
    before = documents(tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        run(target, tmp_path / "out", a)
    with pytest.raises(UserError, match="none of 1 rows"):
        run(target, tmp_path / "out", b, overwrite=True)
    assert documents(tmp_path / "out") == before
    run(target, tmp_path / "out", write_jsonl(tmp_path / "c.jsonl", many(3, seed=5)), overwrite=True)
    assert len(documents(tmp_path / "out")) == 3


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def overwritten(place: Path, target: Path) -> dict[str, tuple[Path, Path, Path, str]]:
    """Preparations that would replace what is no corpus: (target, source, out, refusal) of each."""
    source, folder, model = write_jsonl(place / "s.jsonl", many(3)), place / "folder", place / "model"
    shutil.copytree(target, model)
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", many(3))
    (place / "other").mkdir()
    (place / "other" / "thesis.txt").write_text("years of work")
    run(target, place / "corpus", source, parquet=True)
    (place / "link").symlink_to(place / "corpus")
    run(target, place / "mine", source)
    (place / "mine" / "train" / "recipe.toml").write_text("written by hand")
    return {
        "the source folder": (target, folder, folder, "holds .*a.jsonl, which this command reads"),
        "a folder of the source": (target, folder / "a.jsonl", folder, "holds .*a.jsonl, which this command reads"),
        "the source file": (target, source, source, "is read by this command and would be replaced"),
        "the model": (model, source, model, "is read by this command and would be replaced"),
        "a part of the corpus": (target, place / "corpus" / "train.parquet", place / "corpus", "holds .*train.parquet"),
        "another folder": (target, source, place / "other", "no prepared corpus; name another --out"),
        "another file": (target, source, place / "other" / "thesis.txt", "no prepared corpus; name another --out"),
        "a link": (target, source, place / "link", "is a link"),
        "a corpus with more in it": (target, source, place / "mine", "recipe.toml: is no part of the corpus"),
    }


@pytest.mark.parametrize("overwrite", [True, False])
def test_overwrite_replaces_a_corpus_and_nothing_else(target, tmp_path, overwrite):
    cases = overwritten(tmp_path, target)
    before = tree(tmp_path)
    for name, (model, source, out, refusal) in cases.items():
        with pytest.raises(UserError, match=refusal):
            run(model, out, source, overwrite=overwrite)
        assert tree(tmp_path) == before, name


def test_what_appears_in_the_corpus_meanwhile_is_not_lost(target, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", many(3))
    run(target, tmp_path / "out", source)
    note, commit = tmp_path / "out" / "note.txt", ShardWriter.commit
    monkeypatch.setattr(ShardWriter, "commit", lambda *a: (note.write_text("by hand"), commit(*a)))
    with pytest.raises(UserError, match="note.txt: is no part of the corpus"):
        run(target, tmp_path / "out", source, overwrite=True)
    assert note.read_text() == "by hand"


def test_writer_and_corpus_agree(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, 40)
    parts = [(rng.integers(0, 99, n).astype(np.int32), rng.integers(0, 2, n).astype(np.uint8)) for n in lengths]
    writer = ShardWriter(tmp_path / "out", "x")
    for start in range(0, 40, 7):
        some = parts[start : start + 7]
        anchors = np.array([shards.count_anchors(mask) for _, mask in some])
        tokens, masks = (np.concatenate(column) for column in zip(*some, strict=True))
        writer.append("train", Batch(tokens, masks, np.array([len(t) for t, _ in some]), anchors))
    writer.commit(Manifest(shards.FORMAT, "m", "t", 99, None), {}, {})
    corpus = Corpus.open(tmp_path / "out", "train")
    assert corpus.lengths.tolist() == lengths.tolist()
    for i, (tokens, mask) in enumerate(parts):
        got = corpus.document(i)
        assert got[0].tolist() == tokens.tolist() and got[1].tolist() == mask.tolist()
        assert corpus.anchor_counts[i] == shards.count_anchors(mask)
    assert len(Corpus.open(tmp_path / "out", "held_out")) == 0


def test_damaged_corpora_are_refused(target, tmp_path):
    with pytest.raises(UserError, match="not a prepared corpus"):
        Corpus.open(tmp_path, "train")
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(5)))
    mask = tmp_path / "out" / "train" / "mask.bin"
    content = mask.read_bytes()
    mask.write_bytes(content[:-1])
    with pytest.raises(UserError, match="do not fit together"):
        Corpus.open(tmp_path / "out", "train")
    mask.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        Corpus.open(tmp_path / "out", "train")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="corpus format 99"):
        Corpus.open(tmp_path / "out", "train")


def test_units_come_from_a_prepared_corpus(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(100)))
    corpus = Corpus.open(tmp_path / "out", "train")
    unit = UnitSequence(corpus, UnitShape(512, 256, 8, 0.5), seed=0).unit(0)
    assert unit.tokens_used > 480 and unit.anchors_used > 32


def test_parquet_export_reads_back(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(60)), held_out=0.2, parquet=True)
    for split in ("train", "held_out"):
        again = tmp_path / f"again_{split}"
        run(target, again, tmp_path / "out" / f"{split}.parquet")
        assert documents(again) == documents(tmp_path / "out", split)


def test_report_and_manifest(target, tmp_path):
    source = write_jsonl(
        tmp_path / "a.jsonl", [*many(30), {"oops": 1}, {"messages": [{"role": "user", "content": "x"}]}]
    )
    report = run(target, tmp_path / "out", source, held_out=0.2)
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["rows_in"] == 32 == written["kept"] + sum(written["rejected"].values())
    assert written["rejected"] == {"unknown-shape": 1, "no-assistant": 1}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    corpora = {split: Corpus.open(tmp_path / "out", split) for split in ("train", "held_out")}
    for split, corpus in corpora.items():
        counts = manifest["counts"]["splits"][split]
        assert counts["documents"] == len(corpus)
        assert counts["tokens"] == corpus.lengths.sum()
        assert counts["anchors"] == corpus.anchor_counts.sum()
        assert counts["supervised"] == sum(int(corpus.document(i)[1].sum()) for i in range(len(corpus)))
    lengths = np.concatenate([corpus.lengths for corpus in corpora.values()])
    assert sum(manifest["histogram"].values()) == 30
    for bound, count in manifest["histogram"].items():
        assert count == ((lengths <= int(bound)) & (lengths > int(bound) // 2)).sum()
    summary = report.summary()
    assert "32 rows in = 30 kept + 2 rejected" in summary and "rejected.jsonl" in summary


def test_command_line(target, tmp_path, capsys):
    """`prepare --show`: the report in words and documents with what is trained on underlined."""
    source = write_jsonl(tmp_path / "a.jsonl", [chat("How are [you]?", "Fine [thanks].")])
    main(PrepareOptions((str(source),), str(target), tmp_path / "out", held_out=0.0, show=3))
    printed = capsys.readouterr()
    assert "1 rows in = 1 kept + 0 rejected" in printed.out
    assert "How are [you]?" in printed.out and "Fine [thanks]." in printed.out
    assert f"{source}: jsonl, messages" in printed.err
    console = Console(force_terminal=True, color_system="standard", width=100, file=io.StringIO())
    show_documents(tmp_path / "out", load_tokenizer(target), 1, console)
    shown = console.file.getvalue()
    assert "\x1b[4;32mFine [thanks].<|im_end|>\x1b[0m" in shown


# ---- corpus and target must fit -----------------------------------------------------------------------------------


def test_corpus_is_checked_against_the_target(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", many(3)), template_options={"a": True})
    manifest = Corpus.open(tmp_path / "out", "train").manifest
    check_matches(manifest, target, None, {"a": True})
    other = write_target(tmp_path / "other")
    check_matches(manifest, other, None, {"a": True})  # the same files elsewhere
    with pytest.raises(UserError, match=r"options \{'a': True\} .* options \{\}") as caught:
        check_matches(manifest, target, None, {})
    assert str(target) in str(caught.value) and manifest.template_hash in str(caught.value)
    with pytest.raises(UserError, match="chat template"):
        check_matches(manifest, write_target(tmp_path / "qwen3", "qwen3"), None, {"a": True})
    check_matches(manifest, tmp_path / "qwen3", str(target / "chat_template.jinja"), {"a": True})
    with pytest.raises(UserError, match="vocabulary of") as caught:
        check_matches(manifest, write_target(tmp_path / "padded", vocab_size=4096), None, {"a": True})
    assert "4096" in str(caught.value)
    tokenizer = json.loads(tokenizer_json())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another one") as caught:
        check_matches(manifest, other, None, {"a": True})
    assert str(target) in str(caught.value) and str(other) in str(caught.value)


def test_plain_text_fits_any_template(target, tmp_path):
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [{"text": "the quick brown fox"}]))
    manifest = Corpus.open(tmp_path / "out", "train").manifest
    assert manifest.template_hash is None
    check_matches(manifest, write_target(tmp_path / "qwen3", "qwen3"), None, {})


def test_the_real_small_model(tmp_path):
    """SmolLM2's own tokenizer and template: the mask on a hand-written conversation."""
    from draftsmith.smollm import smollm_directory

    target = smollm_directory()
    row = {
        "messages": [
            *chat("Hi <|im_end|> there", "Hello! It is 2024.")["messages"],
            *chat("And?", "Bye 👋")["messages"],
        ]
    }
    run(target, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [row]))
    tokens, mask = Corpus.open(tmp_path / "out", "train").document(0)
    tokenizer = load_tokenizer(target)
    runs = np.split(np.flatnonzero(mask), np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1)
    assert [tokenizer.decode(tokens[r]) for r in runs] == ["Hello! It is 2024.<|im_end|>", "Bye 👋<|im_end|>"]
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert (tokens == tokenizer.eos_token_id).sum() == 5  # system, two users, two assistants
    assert prepare(PrepareOptions((str(tmp_path / "a.jsonl"),), str(target), tmp_path / "b")).kept == 1
