"""Tiny random targets, a tokenizer with a chat template, and drafters overfitted on a target's own text."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from draftsmith import checkpoint
from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random, to_zlab
from draftsmith.loss import Head
from draftsmith.step import Tables, TrainStep
from draftsmith.unit import UnitShape, evaluation_chunks, lay_out, with_anchors
from toy import MemoryCorpus

VOCAB = 64
MASK = VOCAB - 1


def tiny_target(
    family: str = "qwen3", layers: int = 6, tied: bool = False, vocab: int = VOCAB, seed: int = 0, hidden_size: int = 64,
    head_dim: int = 16, **extra,
):  # fmt: skip
    """Random float32 model; weights are large enough for text that does not repeat one token."""
    torch.manual_seed(seed)
    config_type, model_type = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        family
    ]
    config = config_type(
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
        **extra,
    )
    return model_type(config).float().eval()


def tables_of(model: PreTrainedModel) -> Tables:
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return Tables(embedding, 1.0, Head(head))


def shape_for(model: PreTrainedModel, layers: int = 2, block: int = 4, taps: tuple[int, ...] = (1, 3), **changes):
    c = model.config
    values = dict(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        num_layers=layers,
        vocab_size=c.vocab_size,
        block_size=block,
        mask_token=c.vocab_size - 1,
        taps=taps,
        num_target_layers=c.num_hidden_layers,
        rms_norm_eps=c.rms_norm_eps,
        rope=dict(c.rope_parameters),
        max_positions=c.max_position_embeddings,
        windows=(None,) * layers,
    )
    return DFlashShape(**{**values, **changes})


def random_drafter(shape: DFlashShape, seed: int = 0, std: float = 0.1) -> DFlash:
    drafter = DFlash(shape).eval()
    init_random(drafter, seed, std)
    return drafter


def random_prompts(
    count: int, vocab: int = VOCAB, seed: int = 0, shortest: int = 3, longest: int = 17
) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab - 1, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


@torch.inference_mode()
def own_greedy(model: PreTrainedModel, prompt: list[int], new: int, stops: tuple[int, ...] = ()) -> list[int]:
    """The target's plain greedy answer by whole forward passes without any cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


class Trained:
    """A drafter trained on (prompt, answer) pairs through the real training step."""

    def __init__(self, model: PreTrainedModel, drafter: DFlash, pairs: list[tuple[list[int], list[int]]]):
        documents = [(np.array(p + a, np.int32), np.array([0] * len(p) + [1] * len(a), np.uint8)) for p, a in pairs]
        self.model, self.drafter, self.corpus = model, drafter, MemoryCorpus(documents)
        self.members = range(len(documents))
        tokens, anchors = int(self.corpus.lengths.sum()), int(self.corpus.anchor_counts.sum())
        self.shape = UnitShape(tokens, anchors, drafter.shape.block_size, 1.0)
        self.step = TrainStep(
            drafter, tables_of(model), self.shape, LossConfig(gamma=0.0), OptimConfig(clip=1.0), torch.float32,
            torch.device("cpu"),
        )  # fmt: skip

    def load(self, unit) -> None:
        """Taps of each document alone, by transformers' hidden_states[L + 1]."""
        self.step.static.load(unit)
        at = 0
        for tokens, _ in self.corpus.documents:
            with torch.no_grad():
                states = self.model(input_ids=torch.tensor(tokens[None]), output_hidden_states=True).hidden_states
            taps = torch.cat([states[i + 1][0] for i in self.drafter.shape.taps], -1)
            self.step.static.taps[at : at + len(tokens)] = taps
            at += len(tokens)

    def train(self, steps: int, lr: float = 3e-3) -> "Trained":
        row = lay_out(self.corpus, self.members, self.shape)
        self.load(with_anchors(row, row.valid, self.shape, 0))
        for _ in range(steps):
            self.step.accumulate()
            self.step.update(lr)
            self.step.clear()
        return self

    def accepted(self) -> dict[int, int]:
        """Row position of every valid anchor -> right drafts there."""
        (unit,) = evaluation_chunks(self.corpus, self.members, self.shape, 0)
        self.load(unit)
        return dict(zip(unit.anchors.tolist(), self.step.evaluate()[0].tolist(), strict=True))


CHAT_TEMPLATE = (
    "{% if style is defined %}[{{ style }}]{% endif %}"
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def save_target(model: PreTrainedModel, directory: Path) -> Path:
    """Hugging Face directory with a character tokenizer of the model's vocabulary (ids 0..3 are <u>, </s>, <a>, <unk>)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<u>", "</s>", "<a>", "<unk>"]
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:!?[]-+*/'\"#%&()=@$"
    words = (specials + list(letters))[: model.config.vocab_size - 1]
    words += ["<mask>"] if len(words) == model.config.vocab_size - 1 else []
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in specials])
    model.generation_config.eos_token_id = 1
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    settings["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_checkpoint(run: Path, drafter: DFlash, target: Path, step: int = 3, **state):
    """As training writes it, without an optimizer."""
    recipe = {
        "target": {"model": str(target), "revision": None, "template_options": {"style": "x"}, "chat_template": None}
    }
    tensors = {k: v.detach().contiguous() for k, v in to_zlab(drafter.state_dict(), drafter.shape).items()}
    state = {
        "format": 1, "step": step, "optimizer_step": float(step), "drafter": drafter.shape.to_dict(), "recipe": recipe,
        "provenance": {"argv": ["train"]}, **state,
    }  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    return checkpoint.write(run, step, {"model.safetensors": tensors}, json.loads(json.dumps(state)))
