"""Every form of a drafter is written complete, loads back equal, and says clearly when something does not fit."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.export import export, load_drafter, main, probe_logits, serve_commands
from draftsmith.layouts import shape_from_zlab
from draftsmith.options import ExportOptions
from draftsmith.tables import load_tables
from tiny_models import random_drafter, save_target, shape_for, tiny_target, write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tiny_target(tied=True), tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def drafter(target):
    return random_drafter(shape_for(tiny_target(), windows=(None, 8)))


def same(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_run_checkpoint_and_exports_load_to_the_same_drafter(tmp_path, target, drafter):
    write_checkpoint(tmp_path / "run", random_drafter(drafter.shape, seed=9), target, step=1, acceptance_length=1.5)
    write_checkpoint(tmp_path / "run", drafter, target, step=2, acceptance_length=2.5)
    write_checkpoint(tmp_path / "run", random_drafter(drafter.shape, seed=8), target, step=3, acceptance_length=2.0)
    run, info = load_drafter(tmp_path / "run")  # the best one
    assert same(run, drafter) and run.shape == drafter.shape and (info.step, info.acceptance_length) == (2, 2.5)
    assert info.template_options == {"style": "x"} and info.target == str(target)
    for layout in ("zlab", "speculators"):
        out = tmp_path / layout
        written = export(tmp_path / "run", out, layout, "float32")
        loaded, read = load_drafter(out)
        assert same(loaded, drafter) and loaded.shape == drafter.shape
        assert read == replace(written, source=str(out)) and read.template_options == {"style": "x"}
        assert read.provenance == {"argv": ["train"]} and read.recipe["target"]["model"] == str(target)
        again = export(out, tmp_path / f"{layout}-again", "zlab", "float32")  # an export is a source, too
        assert again.step == 2 and same(load_drafter(tmp_path / f"{layout}-again")[0], drafter)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "run",
        "speculators",
        "speculators-again",
        "zlab",
        "zlab-again",
    ]


def test_bfloat16_is_the_rounded_drafter(tmp_path, target, drafter):
    found = write_checkpoint(tmp_path / "run", drafter, target)
    export(found.path, tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    rounded = drafter.bfloat16().float()
    loaded, _ = load_drafter(tmp_path / "out")
    assert same(loaded, rounded)
    tables = load_tables(target, torch.float32, torch.device("cpu"))
    assert torch.equal(probe_logits(loaded, tables), probe_logits(rounded, tables))


def test_zlab_config_has_every_key_and_both_spellings(tmp_path, target, drafter):
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "out", "zlab", "float32")
    config, s = json.loads((tmp_path / "out" / "config.json").read_text()), drafter.shape
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": s.block_size,
        "dflash_config": {
            "block_size": s.block_size, "mask_token_id": s.mask_token, "target_layer_ids": list(s.taps),
        },
        "num_target_layers": 6, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True,
        "max_window_layers": 2, "rope_theta": 5000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "vocab_size": 64, "bos_token_id": None, "eos_token_id": 1, "dtype": "float32",
        "torch_dtype": "float32", "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip
    assert config == expected
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1  # as the umask says, weights too
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert len(names) == 11 * 2 + 3 and "layers.1.self_attn.k_norm.weight" in names


def foreign(config, **changes):
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def test_reads_foreign_spellings(tmp_path, target, drafter):
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "out", "zlab", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    special = config["dflash_config"]
    read = lambda **changes: shape_from_zlab(foreign(config, **changes), "config.json")  # noqa: E731
    assert read(rope_parameters=...) == drafter.shape  # before transformers 5
    assert read(rope_theta=..., rope_scaling=...) == drafter.shape  # since transformers 5
    assert read(block_size=...) == drafter.shape
    assert read(dflash_config=foreign(special, block_size=...)) == drafter.shape
    assert read(dflash_config=foreign(special, target_layer_ids=...)).taps == (1, 3)  # the rule for 6 layers, 2 taps
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_parameters=..., rope_scaling=old).rope == rope
    assert read(rope_parameters=rope, rope_theta=..., rope_scaling=...).rope == rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"num_target_layers": ...}, "num_target_layers is missing"),
        ({"block_size": ..., "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]}}, "block_size is missing"),
        ({"dflash_config": {"block_size": 4, "target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta is missing"),
        ({"is_causal": False}, "causal = False"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"dflash_config": {"block_size": 4, "mask_token_id": 64, "target_layer_ids": [1]}}, "outside the vocabulary"),
        ({"dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [6]}}, "taps"),
        ({"hidden_size": 32}, "do not fit"),
    ],
)
def test_unusable_config_is_one_clear_error(tmp_path, target, drafter, changes, words):
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "out", "zlab", "float32")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(foreign(json.loads(file.read_text()), **changes)))
    with pytest.raises(UserError, match=words) as error:
        load_drafter(tmp_path / "out")
    assert str(tmp_path / "out") in str(error.value) and "\n" not in str(error.value)


def test_wrong_weights_are_named(tmp_path, target, drafter):
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "out", "zlab", "float32")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, file)
    with pytest.raises(UserError, match="fc.weight: missing"):
        load_drafter(tmp_path / "out")
    save_file({**tensors, "mask_hidden": torch.zeros(3)}, file)
    with pytest.raises(UserError, match="mask_hidden: not a DFlash tensor"):
        load_drafter(tmp_path / "out")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="model.safetensors"):
        load_drafter(tmp_path / "out")


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, target, drafter, monkeypatch):
    write_checkpoint(tmp_path / "run", drafter, target)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="could not be written"):
        export(tmp_path / "run", tmp_path / "file" / "out")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="are free"):
        export(tmp_path / "run", tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out", "run"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_right_to_write_is_one_line(tmp_path, target, drafter):
    write_checkpoint(tmp_path / "run", drafter, target)
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UserError, match="could not be written"):
        export(tmp_path / "run", tmp_path / "closed" / "out")


def test_user_errors_of_sources_and_targets(tmp_path, target, drafter):
    with pytest.raises(UserError, match="no such directory"):
        load_drafter(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither state.json, checkpoints/ nor config.json"):
        load_drafter(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        load_drafter(tmp_path / "run")
    other = save_target(tiny_target(layers=5, vocab=70), tmp_path / "other")
    write_checkpoint(tmp_path / "run", drafter, target)
    with pytest.raises(UserError, match="vocabulary 64 instead of 70, layers of the target 6 instead of 5"):
        export(tmp_path / "run", tmp_path / "out", target=str(other))
    with pytest.raises(UserError, match="nowhere"):
        export(tmp_path / "run", tmp_path / "out", target=str(tmp_path / "nowhere"))
    two = random_drafter(shape_for(tiny_target(), windows=(4, 8)))
    write_checkpoint(tmp_path / "two", two, target)
    with pytest.raises(UserError, match="one window"):
        export(tmp_path / "two", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_target_is_not_taken_at_the_revision_of_the_recipes(tmp_path, target, drafter):
    run = tmp_path / "run"
    write_checkpoint(run, drafter, target, recipe={"target": {"model": str(target), "revision": "v1"}})
    other = str(save_target(tiny_target(), tmp_path / "other"))
    assert export(run, tmp_path / "same").revision == "v1"
    assert export(run, tmp_path / "a", target=other).revision is None
    assert export(run, tmp_path / "b", target=other, revision="v2").revision == "v2"


def test_serve_commands_count_drafts_as_each_engine_does(tmp_path):
    vllm, sglang = serve_commands("models/my target", tmp_path, "zlab", 8)
    assert '"num_speculative_tokens": 7' in vllm and "'models/my target'" in vllm
    assert sglang.endswith("--speculative-num-draft-tokens 8")
    assert len(serve_commands("m", tmp_path, "speculators", 8)) == 1


def test_command_prints_how_to_serve(tmp_path, target, drafter, capsys):
    write_checkpoint(tmp_path / "run", drafter, target)
    for layout, words in (("zlab", "sglang.launch_server"), ("speculators", "note: vLLM makes full layers causal")):
        main(ExportOptions(tmp_path / "run", layout))
        said = capsys.readouterr().out
        assert words in said and "same logits" in said and f"vllm serve {target}" in said
        assert (tmp_path / "run" / "export" / layout / "model.safetensors").is_file()


@pytest.mark.parametrize(("windows", "non_causal"), [((None, None), True), ((8, 8), False), ((None, 8), False)])
def test_speculators_causality(tmp_path, target, windows, non_causal):
    """vLLM reads this flag for all layers: full ones must come out bidirectional, sliding ones causal."""
    write_checkpoint(tmp_path / "run", random_drafter(shape_for(tiny_target(), windows=windows)), target)
    export(tmp_path / "run", tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sliding_window_non_causal"] is non_causal
    assert load_drafter(tmp_path / "out")[0].shape.windows == windows
