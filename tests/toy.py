"""A corpus in memory for tests of the unit law and of everything built on it."""

from pathlib import Path

import numpy as np

from draftsmith.unit import valid_anchors


class MemoryCorpus:
    """unit.Documents over lists of (tokens, loss mask)."""

    def __init__(self, documents: list[tuple[np.ndarray, np.ndarray]]):
        self.documents = documents
        self.lengths = np.array([len(t) for t, _ in documents], np.int64)
        self.anchor_counts = np.array([len(valid_anchors(m)) for _, m in documents], np.int64)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.documents[index]


def random_corpus(lengths, vocab: int = 50, seed: int = 0) -> MemoryCorpus:
    """Documents with a prompt, a supervised answer and, in every third, a second turn."""
    rng = np.random.default_rng(seed)
    documents = []
    for i, n in enumerate(lengths):
        tokens = rng.integers(0, vocab, n).astype(np.int32)
        mask = np.zeros(n, np.uint8)
        prompt = int(n * rng.uniform(0.1, 0.6))
        mask[prompt:] = 1
        if i % 3 == 0 and n > 12:
            gap = prompt + (n - prompt) // 2
            mask[gap : gap + 3] = 0
        documents.append((tokens, mask))
    return MemoryCorpus(documents)


def write_corpus(directory: Path, split: str, corpus: MemoryCorpus) -> None:
    """The files of one prepared split (layout: data/shards.py)."""
    out = directory / split
    out.mkdir(parents=True)
    tokens = np.concatenate([t for t, _ in corpus.documents]).astype("<i4")
    mask = np.concatenate([m for _, m in corpus.documents]).astype(np.uint8)
    tokens.tofile(out / "tokens.bin")
    mask.tofile(out / "mask.bin")
    np.concatenate(([0], np.cumsum(corpus.lengths))).astype("<i8").tofile(out / "offsets.bin")
    corpus.anchor_counts.astype("<i4").tofile(out / "anchors.bin")


def block_states(step):
    """A TrainStep's loaded unit forward as whole blocks: normed states of every slot [A, B, H], slot 0 included."""
    import torch

    s, B = step.static, step.shape.block_size
    slot = torch.arange(B, device=step.device)
    ids = torch.where(slot == 0, s.ids[s.anchors][:, None], step.drafter.shape.mask_token)  # [A, B]
    positions = s.positions[s.anchors][:, None] + slot
    x = torch.nn.functional.embedding(ids.flatten(), step.tables.embedding) * step.tables.embed_scale
    attend = step.attention.over(s.anchors, s.starts, step.shape.tokens)
    states = step.drafter(x, step.drafter.fuse(s.taps), positions.flatten(), s.positions, attend)
    return states.view(-1, B, states.shape[-1])


def moments(step) -> list:
    """Copies of a TrainStep's (exp_avg, exp_avg_sq), flat [P], and its step count."""
    return [x.clone() for x in (step.adamw.exp_avg, step.adamw.exp_avg_sq, step.adamw.count)]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of 256 bytes and four special tokens with a ChatML template, saved where a target lies."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    fast.save_pretrained(directory)


def toy_target(directory: Path, tied: bool = True, layers: int = 6, hidden: int = 64, seed: int = 0) -> Path:
    """A tiny random Qwen3 in Hugging Face layout; row 260 and up of its embedding are unused (mask token 260)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=264, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, eos_token_id=258,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    toy_tokenizer(directory)
    return directory


def toy_conversations(path: Path, count: int = 120, seed: int = 0) -> Path:
    """Chat rows in JSONL with short, repetitive answers."""
    import json

    rng = np.random.default_rng(seed)
    words = "red green blue small large old new warm cold quick".split()
    with path.open("w") as out:
        for i in range(count):
            pick = rng.choice(words, 6)
            messages = [
                {"role": "user", "content": f"Say {pick[0]} {pick[1]} number {i}."},
                {"role": "assistant", "content": " ".join(pick) + " and that is all."},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return path


def toy_place(place: Path, hidden: int = 64) -> Path:
    """What a run starts from, made by the real commands: target/, corpus/ and recipe.toml in `place`."""
    from draftsmith.data.options import PrepareOptions
    from draftsmith.data.prepare import prepare
    from draftsmith.init import write_recipe
    from draftsmith.options import InitOptions

    target, corpus = toy_target(place / "target", hidden=hidden), place / "corpus"
    chat = toy_conversations(place / "chat.jsonl")
    prepare(PrepareOptions(sources=(str(chat),), model=str(target), out=corpus, held_out=0.1))
    write_recipe(InitOptions(target=str(target), corpus=corpus, out=place / "recipe.toml"))
    return place
