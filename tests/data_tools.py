"""Small targets for tests of data preparation: a byte-level BPE tokenizer with the special tokens of many model families,
and a model directory around it (no weights)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from draftsmith.data.options import PrepareOptions
from draftsmith.data.prepare import PrepareReport, prepare
from draftsmith.data.shards import Corpus

TEMPLATES = Path(__file__).parent / "data" / "templates"
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|system|>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|observation|>", "[gMASK]", "<sop>", "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
)  # fmt: skip
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Template -> (bos, eos, further tokens that its models stop on)
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "chatml": ("<|endoftext|>", "<|im_end|>", ()),
    "qwen3": ("<|endoftext|>", "<|im_end|>", ("<|endoftext|>",)),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ()),
    "gemma": ("<bos>", "<end_of_turn>", ()),
    "mistral": ("<s>", "</s>", ()),
    "phi": ("<s>", "<|endoftext|>", ("<|end|>", "<|assistant|>")),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ()),
    "harmony": ("<|endoftext|>", "<|return|>", ("<|call|>",)),
    "glm": ("<|endoftext|>", "<|endoftext|>", ("<|user|>", "<|observation|>")),
    "tagged": ("<|endoftext|>", "<|im_end|>", ()),
}
_SAMPLE = [
    "The quick brown fox jumps over the lazy dog and says hello there, how are you today?",
    "It is a sunny day in Paris.\n\nThe answer is four. The weather is fine, thank you very much.\n\n",
    'def add(a, b):\n    return a + b\n\n{"name": "weather", "arguments": {"city": "Paris"}}',
    "assistant\n\nuser\n\nsystem\n\nmodel\n\n",
]


@cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of about 700 tokens, trained in milliseconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(_SAMPLE * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    return tokenizer.to_str()


def write_target(directory: Path, family: str | None = "chatml", vocab_size: int | None = None) -> Path:
    """A model directory of a template family; None: without a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    bos, eos, stops = FAMILIES[family or "chatml"]
    tokenizer = Tokenizer.from_str(tokenizer_json())
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    size = vocab_size or tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    ids = [tokenizer.token_to_id(token) for token in (eos, *stops)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    if family:
        (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text("utf-8"), "utf-8")
    return directory


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(target: Path, out: Path, *sources: Path | str, **options: Any) -> PrepareReport:
    """prepare(...) with everything in the training split unless `held_out` says otherwise."""
    options = {"held_out": 0.0, **options}
    return prepare(PrepareOptions(tuple(map(str, sources)), str(target), out, **options))


def supervised(corpus: Corpus, index: int) -> list[str]:
    """The supervised runs of a document as text."""
    tokens, mask = corpus.document(index)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    runs: list[list[int]] = []
    for i in range(len(tokens)):
        if mask[i]:
            if not i or not mask[i - 1]:
                runs.append([])
            runs[-1].append(int(tokens[i]))
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def text_of(corpus: Corpus, index: int) -> str:
    """A whole document as text."""
    return Tokenizer.from_str(tokenizer_json()).decode(corpus.document(index)[0].tolist(), skip_special_tokens=False)


def reasons(out: Path) -> list[tuple[int, str]]:
    """(line, reason) of every rejected row."""
    lines = (out / "rejected.jsonl").read_text().splitlines()
    return [(record["line"], record["reason"]) for record in map(json.loads, lines)]


def chat(question: str = "How are you?", answer: str = "Fine, thank you.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
