"""Many rows: every one is accounted for, in order, in bounded memory, in preparation and in the training loader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import reasons, run, write_target
from draftsmith.data.shards import Corpus

LIMIT = 2 << 30  # bytes, all processes of a preparation together

WRITE = """
import sys
words = "the quick brown fox jumps over lazy dogs and says hello there friend it is sunny".split()
with open(sys.argv[1], "w") as file:
    for i in range(int(sys.argv[2])):
        if i % 1000 == 7:
            file.write('{"messages": [{"role": "user", "content": "%d"}]}\\n' % i)
            continue
        question, answer = (" ".join(words[(i * k + j * j) % 16] for j in range(6 + i % 7)) for k in (3, 5))
        file.write('{"messages": [{"role": "user", "content": "%d %s"}, {"role": "assistant", "content": "%s"}]}\\n'
                   % (i, question, answer))
"""
PREPARE = """
import resource, sys
from pathlib import Path
from draftsmith.data.options import PrepareOptions
from draftsmith.data.prepare import prepare

if __name__ == "__main__":
    source, target, out, workers = sys.argv[1:]
    report = prepare(PrepareOptions((source,), target, Path(out), workers=int(workers), deduplicate=True))
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(report.rows_in, report.kept, (own + int(workers) * child) * 1024, report.seconds)
"""
TRAIN = """
import resource, sys
from pathlib import Path
import numpy as np
from draftsmith.data.shards import Corpus
from draftsmith.unit import UnitSequence, UnitShape

corpus = Corpus.open(Path(sys.argv[1]), "train")
units = UnitSequence(corpus, UnitShape(4096, 512, 8, 0.5), seed=0)
rows = units.rows_in_epoch(0)
used = sum(units.unit(int(u)).tokens_used for u in np.linspace(0, rows - 1, 2000))
print(len(corpus), rows, used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def call(code: str, folder: Path, *arguments: object) -> list[str]:
    script = folder / "script.py"  # a file, since worker processes import the main module
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_twenty_thousand_rows(tmp_path):
    target, source, count = write_target(tmp_path / "target"), tmp_path / "rows.jsonl", 20_000
    call(WRITE, tmp_path, source, count)
    report = run(target, tmp_path / "out", source, held_out=0.02)
    assert (report.rows_in, report.kept, report.rejected) == (count, count - 20, {"no-assistant": 20})
    assert reasons(tmp_path / "out") == [(i + 1, "no-assistant") for i in range(7, count, 1000)]
    assert sum(counts["documents"] for counts in report.splits.values()) == report.kept
    assert 300 <= len(Corpus.open(tmp_path / "out", "held_out")) <= 500


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_million_rows_within_two_gibibytes(tmp_path):
    target, source, count = write_target(tmp_path / "target"), tmp_path / "rows.jsonl", 1_000_000
    call(WRITE, tmp_path, source, count)
    rows_in, kept, memory, seconds = call(PREPARE, tmp_path, source, target, tmp_path / "out", 2)
    print(f"prepare: {float(seconds):.0f} s, {int(memory) / 2**20:.0f} MiB of all processes")
    assert (int(rows_in), int(kept)) == (count, count - 1000)
    assert int(memory) < LIMIT
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"] == {"no-assistant": 1000}
    documents, rows, used, memory = map(int, call(TRAIN, tmp_path, tmp_path / "out"))
    print(f"loader: {documents} documents, {rows} rows an epoch, {memory / 2**20:.0f} MiB")
    assert documents == report["splits"]["train"]["documents"]
    assert used > 0.9 * 2000 * 4096
    assert memory < LIMIT
