"""prepare against the raw fast tokenizer on the same rendered text, one core, same process (records/data_speed.md).

    taskset -c 0 python records/data_speed.py [MODEL_DIRECTORY]
Raw: tokenizers' encode_batch_fast (no offsets) over the rendered conversations, in batches of about 1 MB as prepare has
them (all at once it is slower: memory). Prepare: bytes of JSONL -> rows ->
rendered text -> mask -> tokens (RowProcessor), and the whole command with its files. CPU seconds of the process, the best
of three rounds, the two measured in turn.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer

from draftsmith.data import sources
from draftsmith.data.options import PrepareOptions
from draftsmith.data.prepare import prepare, process_rules
from draftsmith.data.process import RowProcessor
from draftsmith.data.template import ChatTemplate, load_text_side
from draftsmith.smollm import smollm_directory

TURNS, ROUNDS, TOKENS = (1, 4, 16, 40), 3, 1_500_000
WORDS = Path(__file__).parent.parent.joinpath("docs", "design.md").read_text(encoding="utf-8").split()


def conversations(path: Path, turns: int, words: int) -> int:
    """Rows of `turns` questions of words/2 and answers of `words` words, about TOKENS tokens in all."""
    rng = random.Random(turns)
    count = max(8, TOKENS // (turns * words * 3))
    say: Callable[[int], str] = lambda n: " ".join(rng.choices(WORDS, k=n))  # noqa: E731
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            pairs = [(("user", words // 2), ("assistant", words)) for _ in range(turns)]
            messages = [{"role": role, "content": say(n)} for pair in pairs for role, n in pair]
            file.write(json.dumps({"messages": messages}) + "\n")
    return count


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def batches(texts: list[str]) -> list[list[str]]:
    out: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if len(out[-1]) >= 256 or size > 1 << 20:
            out.append([])
            size = 0
        out[-1].append(text)
        size += len(text)
    return out


def encode(raw: Tokenizer, parts: list[list[str]]) -> int:
    return sum(len(e) for part in parts for e in raw.encode_batch_fast(part, add_special_tokens=False))


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else smollm_directory()
    side = load_text_side(target, now="2026-01-01T00:00:00")
    raw, template = Tokenizer.from_str(side.tokenizer_json), ChatTemplate(side)
    print("words turns   rows   tokens | raw tok/s | rows->tokens tok/s  of raw | whole command tok/s  of raw")
    for words in (90, 30):
        for turns in TURNS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.jsonl"
                count = conversations(path, turns, words)
                texts = [template.render(json.loads(line)["messages"], None) for line in path.open(encoding="utf-8")]
                parts = batches(texts)
                options = PrepareOptions(
                    (str(path),), str(target), Path(folder) / "out", max_tokens=1 << 20, overwrite=True
                )
                processor, files = RowProcessor(side, process_rules(options)), sources.expand((str(path),), "auto")[0]

                def process(files=files, processor=processor) -> None:
                    for chunk in sources.read_chunks(files, 256, 1 << 20):
                        processor(chunk)

                best = [float("inf")] * 3
                for _ in range(ROUNDS):
                    jobs = (lambda parts=parts: encode(raw, parts), process,
                            lambda o=options: prepare(o))  # fmt: skip
                    best = [min(old, seconds(job)) for old, job in zip(best, jobs, strict=True)]
                tokens = encode(raw, parts)
            a, b, c = (tokens / s for s in best)
            print(
                f"{words:5} {turns:5} {count:6} {tokens:8} | {a:9,.0f} | {b:18,.0f} {b / a:7.0%} | {c:19,.0f} {c / a:7.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
