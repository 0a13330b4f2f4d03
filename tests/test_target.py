"""Loading a target: only what is needed, clear refusals, multimodal towers, mask tokens, a drafter started from it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith import models
from draftsmith.data.shards import Corpus
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random, to_zlab
from draftsmith.drafters.init import init_from_target
from draftsmith.errors import UserError
from draftsmith.init import write_recipe
from draftsmith.mask_token import check_mask_token, find_mask_token, unused_rows
from draftsmith.options import InitOptions
from draftsmith.tables import load_tables
from draftsmith.target import RowPlan, Target
from draftsmith.target_attention import attach
from draftsmith.target_facts import describe
from draftsmith.target_load import load_whole
from draftsmith.target_proof import prove, survey
from target_families import COMMON, HIDDEN, LAYERS, VOCAB, save_family
from toy import toy_place, toy_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A small Llama in several shards; tests that damage it take a copy."""
    directory = tmp_path_factory.mktemp("sharded")
    save_family("llama", directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture
def copy(sharded, tmp_path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def load(directory: Path, taps: tuple[int, ...] = (1, 3)) -> Target:
    return Target.load(directory, taps, torch.float32, CPU)


def edit(path: Path, **changes) -> None:
    """Set fields of a JSON file; None takes one out."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def shard_with(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]


def states(target: Target) -> torch.Tensor:
    ids = torch.arange(3, 33)
    out = torch.empty(30, len(target.taps) * HIDDEN)
    target.prefill(ids, torch.arange(30), torch.zeros(30, dtype=torch.int64), out)
    return out


def test_layers_behind_the_last_tap_are_not_even_read(copy):
    whole = states(load(copy))
    last = shard_with(copy, "model.layers.5.mlp.down_proj.weight")
    data = load_file(last)
    save_file({n: torch.full_like(t, float("nan")) if ".5." in n else t for n, t in data.items()}, last)
    target = load(copy)
    assert torch.equal(states(target), whole)
    names = {n for n, _ in target.decoder.named_parameters()}
    assert any(".3." in n for n in names) and not any(".4." in n or "lm_head" in n for n in names)


def test_taps_may_repeat_and_come_in_any_order(sharded):
    one, two = states(load(sharded, (3, 1, 3))).chunk(3, -1)[:2]
    both = states(load(sharded, (1, 3)))
    assert torch.equal(torch.cat((two, one), -1), both)


def test_the_last_layer_is_tapped_before_the_final_norm(sharded):
    model = __import__("transformers").AutoModelForCausalLM.from_pretrained(sharded)
    with torch.no_grad():
        last = model(input_ids=torch.arange(3, 33)[None], output_hidden_states=True).hidden_states[-1][0]
        got = model.model.norm(states(load(sharded, (LAYERS - 1,))))
    torch.testing.assert_close(got, last, rtol=1e-5, atol=1e-5)


PEAK = """
import sys, torch
from pathlib import Path
from draftsmith.tables import load_tables
from draftsmith.target import Target
torch.set_num_threads(1)
small, big = Path(sys.argv[1]), Path(sys.argv[2])
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
def measure(call):
    open("/proc/self/clear_refs", "w").write("5")
    before, kept = peak(), call()
    return peak() - before, kept
Target.load(small, (1,), torch.float32, "cpu")
used, target = measure(lambda: Target.load(big, (0, 2), torch.float32, "cpu"))
print(used, sum(p.nbytes for p in target.decoder.parameters()))
used, tables = measure(lambda: load_tables(big, torch.float32, "cpu"))
print(used, tables.embedding.nbytes + tables.head.weight.nbytes)
"""


def test_loading_peaks_at_the_weights_needed_and_one_shard(sharded, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{**COMMON, "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64}
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path, max_shard_size="40MB")
    shard = max(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(sharded), str(tmp_path)],
        capture_output=True, text=True, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        used, needed = map(int, line.split())
        assert 0.8 * needed < used <= needed + shard


def test_a_truncated_shard_is_named(copy):
    path = shard_with(copy, "model.layers.2.mlp.up_proj.weight")
    path.write_bytes(path.read_bytes()[:-10])
    for call in (lambda: load(copy), lambda: load_tables(copy, torch.float32, CPU)):
        with pytest.raises(UserError, match=rf"{path.name}: cut short"):
            call()


def test_a_missing_shard_is_named(copy):
    path = shard_with(copy, "model.layers.2.mlp.up_proj.weight")
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name}: missing"):
        load(copy)


def test_a_missing_tensor_is_named(copy):
    path = shard_with(copy, "model.layers.2.mlp.up_proj.weight")
    data = load_file(path)
    del data["model.layers.2.mlp.up_proj.weight"]
    save_file(data, path)
    with pytest.raises(UserError, match=rf"{path.name}: no tensor model.layers.2.mlp.up_proj.weight"):
        load(copy)
    index = copy / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    del files["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(files))
    with pytest.raises(UserError, match=r"no tensor layers.2.mlp.up_proj.weight"):
        load(copy)
    with pytest.raises(UserError, match=r"no tensor model.layers.2.mlp.up_proj.weight"):
        load_whole(copy, torch.float32, CPU)


def test_a_tensor_of_a_wrong_shape_is_named(copy):
    path = shard_with(copy, "model.layers.2.mlp.up_proj.weight")
    data = load_file(path)
    data["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 31)
    save_file(data, path)
    with pytest.raises(UserError, match=rf"{path.name}: .*up_proj.weight is \[48, 31\], .*\[48, 32\]"):
        load(copy)


def test_a_table_of_a_wrong_shape_is_named(copy):
    edit(copy / "config.json", vocab_size=VOCAB + 8)
    with pytest.raises(UserError, match=r"embed_tokens.weight is \[96, 32\], config.json says \[104, 32\]"):
        load_tables(copy, torch.float32, CPU)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"]
)
def test_a_config_without_a_field_is_named(copy, field):
    edit(copy / "config.json", **{field: None})
    with pytest.raises(UserError, match=rf"config.json: no field {field}"):
        describe(copy)


def test_broken_files_are_named(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not JSON"):
        describe(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: missing"):
        describe(copy)


def test_code_of_a_model_is_not_run_unless_asked(copy):
    edit(copy / "config.json", model_type="mystery", auto_map={"AutoConfig": "configuration_mystery.Mystery"})
    with pytest.raises(UserError, match="trust_remote_code"):
        describe(copy)


def test_taps_must_be_layers(sharded):
    with pytest.raises(UserError, match=r"target.taps \[6\]: the target has layers 0..5"):
        load(sharded, (1, 6))


def test_a_family_whose_state_leaks_is_found_by_running_it(sharded):
    """Without the list of layer kinds: a decoder that mixes neighbours must be refused by the proof."""
    target = load(sharded)
    assert target.packed
    layer = target.decoder.layers[2]
    layer.register_forward_hook(
        lambda m, a, out: out + 0.5 * out.cumsum(1) / torch.arange(1, out.shape[1] + 1)[:, None]
    )
    found = survey(target.decoder, target.forward, 4)
    attach(target.decoder, target.kernel)
    refused = prove(target, found, None)
    assert "neighbours in the row change its taps" in refused.refusal


def test_a_hidden_window_is_not_trusted(copy):
    """A config that speaks of a window its attention calls do not pass on."""
    target = load(copy)
    target.decoder.config.sliding_window = 4
    assert "sliding window" in survey(target.decoder, target.forward, 4).refusal


def test_modes_that_need_a_gpu_say_so_on_a_cpu(sharded):
    target = Target.load(sharded, (1,), torch.float32, CPU, mode="graph", rows=RowPlan(64, 32))
    assert any("asks for a GPU" in line for line in target.report())
    auto = Target.load(sharded, (1,), torch.float32, CPU, mode="auto")
    assert "layers 0..1 of 6" in auto.report()[0] and "float32" in auto.report()[0]
    assert any("SDPA" in line and "proved" in line for line in auto.report())


def test_families_that_cannot_be_packed_say_why(tmp_path):
    save_family("qwen3_next", tmp_path)
    lines = load(tmp_path).report()
    assert any("one by one" in line and "linear_attention" in line for line in lines)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_text_towers_under_every_spelling(tmp_path, prefix):
    save_family("qwen2_5_vl", tmp_path)
    want = states(load(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = next(n for n in tensors if n.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    towers = {n.replace(old, prefix, 1) if n.startswith(old) else f"x{n}": t for n, t in tensors.items()}
    assert any(n.startswith("x") for n in towers)  # the vision tower is there, and in the way
    save_file({n.removeprefix("x"): t for n, t in towers.items()}, path)
    target = load(tmp_path)
    assert torch.equal(states(target), want)
    assert "text tower" in target.report()[0]
    assert load_tables(tmp_path, torch.float32, CPU).embedding.shape == (VOCAB, HIDDEN)


def test_mxfp4_experts_go_through_transformers_own_quantizer(tmp_path):
    """GPT-OSS as it is published: experts in 4-bit blocks with shared exponents."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    save_family("gpt_oss", tmp_path, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape  # [E, in, out]; blocks hold [E, out, in / 32, 16 bytes]
        groups = -(-rows // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, columns, groups, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.full((experts, columns, groups), 125, dtype=torch.uint8)
    save_file(tensors, path)
    edit(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    model = GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager", dtype=torch.float32
    ).float()  # transformers 5.17 leaves the experts in bfloat16, which holds what MXFP4 holds
    with torch.no_grad():
        hidden = model(input_ids=torch.arange(3, 33)[None], output_hidden_states=True).hidden_states
    target = load(tmp_path)
    assert {p.dtype for p in target.decoder.parameters()} == {torch.float32}
    got = states(target)
    assert float((got - torch.cat([hidden[2][0], hidden[4][0]], -1)).abs().max()) < 1e-4
    assert "float32, quantised by mxfp4" in target.report()[0]
    if not find_spec("accelerate"):
        assert "quantised by mxfp4, turned into it" in target.report()[0]


def test_a_broken_gguf_file_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="model.gguf: transformers cannot read"):
        load(tmp_path)
    (tmp_path / "two.gguf").touch()
    with pytest.raises(UserError, match="2 GGUF files"):
        describe(tmp_path)


def test_bfloat16_is_proved_with_its_own_tolerance(tmp_path):
    save_family("gpt_oss", tmp_path, torch.bfloat16)
    target = Target.load(tmp_path, (1, 3), torch.bfloat16, CPU)
    assert target.packed


def test_tied_tables_share_storage_and_may_lie_under_either_name(tmp_path):
    directory = toy_target(tmp_path / "tied", tied=True)
    tables = load_tables(directory, torch.float32, CPU)
    assert tables.head.weight is tables.embedding
    path = directory / "model.safetensors"
    tensors = load_file(path)
    table = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": table}, path)
    assert torch.equal(load_tables(directory, torch.float32, CPU).embedding, table)
    save_file({**tensors, "lm_head.weight": table + 1, "model.embed_tokens.weight": table}, path)
    tables = load_tables(directory, torch.float32, CPU)  # transformers does not tie two tables that differ
    assert torch.equal(tables.head.weight, table + 1) and torch.equal(tables.embedding, table)


def test_an_untied_head_that_is_missing_is_an_error(tmp_path):
    directory = toy_target(tmp_path / "untied", tied=False)
    assert not torch.equal(*(t := load_tables(directory, torch.float32, CPU)).head[:1], t.embedding)
    path = directory / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != "lm_head.weight"}, path)
    with pytest.raises(UserError, match="no tensor of the output head"):
        load_tables(directory, torch.float32, CPU)


def test_facts_of_a_drafter_in_one_spelling(tmp_path):
    save_family("gemma3", tmp_path / "gemma3")
    save_family("glm4", tmp_path / "glm4")
    save_family("qwen2_5_vl", tmp_path / "vl")
    gemma, glm, vl = (describe(tmp_path / n) for n in ("gemma3", "glm4", "vl"))
    assert gemma.rope == {"rope_type": "default", "rope_theta": 1e6}  # of the full-attention layers
    assert "partial_rotary_factor" not in glm.rope
    assert vl.rope == {"rope_type": "default", "rope_theta": 1e4}
    assert (vl.hidden_size, vl.num_layers, vl.vocab_size, vl.head_dim) == (HIDDEN, LAYERS, VOCAB, 8)


def test_old_spelling_of_rope_is_read(copy):
    edit(copy / "config.json", rope_parameters=None, rope_theta=123456.0)
    assert describe(copy).rope["rope_theta"] == 123456.0


def test_tensors_of_unknown_dtypes_matter_only_where_they_are_read(tmp_path):
    """torch has no dtype for some of safetensors' (F4), which a head or a vision tower may be in."""
    save_family("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, whole = json.loads(content[8 : 8 + length]), content[8 + length :]
    for name, message in (
        ("lm_head.weight", None),
        ("model.layers.1.mlp.up_proj.weight", r"up_proj.weight is quantised \(F4\)"),
    ):
        header[name]["dtype"] = "F4"
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole)
        if message is None:
            assert load(tmp_path).taps == (1, 3)
        else:
            with pytest.raises(UserError, match=message):
                load(tmp_path)
    with pytest.raises(UserError, match=r"lm_head.weight is quantised \(F4\)"):
        load_tables(tmp_path, torch.float32, CPU)


def test_mask_tokens(tmp_path):
    directory = toy_target(tmp_path / "toy")
    token, reason = find_mask_token(directory)
    assert token == 260 and "4 embedding rows" in reason
    from draftsmith.data.template import load_tokenizer

    assert unused_rows(264, load_tokenizer(directory)) == range(260, 264)
    assert "does not use" in check_mask_token(directory, 263)
    assert "<empty_output>" in check_mask_token(directory, 259)
    for bad, why in ((258, "eos"), (256, "pad"), (257, "template"), (65, "ordinary text"), (264, "rows 0..263")):
        with pytest.raises(UserError, match=why):
            check_mask_token(directory, bad)


def test_a_mask_token_of_ordinary_text_is_not_proposed(tmp_path):
    """Some tokenizers know "<mask>" as a word: a text that holds it would hold the mask token."""
    from transformers import AddedToken, AutoTokenizer

    directory = toy_target(tmp_path / "toy")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken("<mask>", special=False)])
    tokenizer.save_pretrained(directory)
    token, _ = find_mask_token(directory)
    assert token == 261 and "does not use" in check_mask_token(directory, token)
    tokenizer.add_special_tokens({"mask_token": AddedToken("[MASK]", special=True)})
    tokenizer.save_pretrained(directory)
    token, reason = find_mask_token(directory)
    assert "own [MASK]" in reason and "special token" in check_mask_token(directory, token)


def test_without_free_rows_a_reserved_special_token_is_taken(tmp_path):
    directory = toy_target(tmp_path / "toy")
    edit(directory / "config.json", vocab_size=260)
    assert find_mask_token(directory)[0] == 259
    edit(directory / "generation_config.json", eos_token_id=[258, 259])
    with pytest.raises(UserError, match="every vocabulary row is in use"):
        find_mask_token(directory)
    assert "ordinary text, since the vocabulary has no free row" in check_mask_token(directory, 65), "a way on"
    with pytest.raises(UserError, match="258 is .*eos.*; take a token that your texts never hold"):
        check_mask_token(directory, 258)
    edit(directory / "generation_config.json", eos_token_id={"a": 1})
    with pytest.raises(UserError, match="eos_token_id is .*, not a token id"):
        find_mask_token(directory)


def test_a_row_in_a_gap_of_the_tokenizers_ids_is_free(tmp_path):
    directory = toy_target(tmp_path / "toy")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    moved = tokenizer["model"]["vocab"]
    moved[max(moved, key=moved.get)] = 400  # behind the last row: 264 to 399 are no rows, its own place is free
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    token, reason = find_mask_token(directory)
    assert "does not use" in reason and "does not use" in check_mask_token(directory, token)
    assert token < 264 and token not in moved.values()


def test_without_any_spare_row_a_token_is_taken_that_the_corpus_never_holds(tmp_path):
    """Llama 2 and Mistral 7B have 32,000 rows, all in use: `init` and `train` must go on with one of them."""
    place = toy_place(tmp_path)
    edit(place / "target" / "config.json", vocab_size=260)
    edit(place / "corpus" / "manifest.json", vocab_size=260)
    edit(place / "target" / "generation_config.json", eos_token_id=[258, 259])
    corpora = [Corpus.open(place / "corpus", split) for split in ("train", "held_out")]
    held = {int(i) for corpus in corpora for ids in corpus.pieces() for i in ids}
    write_recipe(InitOptions(str(place / "target"), place / "corpus", out=place / "full.toml"))
    token = tomllib.loads((place / "full.toml").read_text())["target"]["mask_token"]
    assert token not in held and all(i in held or i > 255 for i in range(token + 1, 260))
    assert "ordinary text" in check_mask_token(place / "target", token)


def drafter_for(directory: Path, **changes) -> DFlash:
    f = describe(directory)
    values = dict(
        hidden_size=f.hidden_size, intermediate_size=f.intermediate_size, num_heads=f.num_heads,
        num_kv_heads=f.num_kv_heads, head_dim=f.head_dim, num_layers=2, vocab_size=f.vocab_size, block_size=4,
        mask_token=1, taps=(1, 3), num_target_layers=f.num_layers, rms_norm_eps=f.rms_norm_eps, rope=f.rope,
        max_positions=f.max_positions, windows=(None, None),
    )  # fmt: skip
    drafter = DFlash(DFlashShape(**{**values, **changes}))
    init_random(drafter, 0)
    return drafter


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_drafter_starts_as_the_targets_last_layers(tmp_path, family):
    model = save_family(family, tmp_path)
    drafter = drafter_for(tmp_path)
    init_from_target(drafter, tmp_path)
    got = to_zlab(dict(drafter.named_parameters()), drafter.shape)
    theirs = dict(model.named_parameters())
    for draft, layer in ((0, LAYERS - 2), (1, LAYERS - 1)):
        for leaf in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            assert torch.equal(got[f"layers.{draft}.{leaf}.weight"], theirs[f"model.layers.{layer}.{leaf}.weight"])
        joined = torch.cat([got[f"layers.{draft}.self_attn.{x}_proj.weight"] for x in "qkv"])
        names = ["qkv_proj"] if family == "phi3" else ["q_proj", "k_proj", "v_proj"]
        assert torch.equal(joined, torch.cat([theirs[f"model.layers.{layer}.self_attn.{n}.weight"] for n in names]))
    assert torch.equal(got["norm.weight"], theirs["model.norm.weight"])
    taps = torch.randn(7, 2 * HIDDEN)
    assert torch.equal(drafter.fc(taps), taps[:, HIDDEN:])
    if family == "llama":
        assert torch.equal(drafter.layers[0].q_norm.weight, torch.ones(8))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen2", "biases"),
        ("qwen3_moe", "mlp"),
        ("glm4", "rotates only 0.5"),
        ("gemma2", "gelu"),
        ("olmo2", "post_feedforward_layernorm|q_norm"),
        ("deepseek_v3", "experts"),
    ],
)
def test_targets_whose_layers_do_not_fit_say_what(tmp_path, family, why):
    save_family(family, tmp_path)
    with pytest.raises(UserError, match=rf'({why}).*init = "random"'):
        init_from_target(drafter_for(tmp_path), tmp_path)


def test_other_widths_do_not_fit(tmp_path):
    save_family("llama", tmp_path)
    with pytest.raises(UserError, match=r"self_attn.q_proj.weight is \[32, 32\], a draft layer\'s \[16, 32\]"):
        init_from_target(drafter_for(tmp_path, num_heads=2), tmp_path)


def test_resolve_takes_directories_and_refuses_the_rest(tmp_path):
    assert models.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="no such directory"):
        models.resolve("./nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        models.resolve(str(tmp_path / "file"))
    with pytest.raises(UserError, match="neither a directory nor a hub id"):
        models.resolve("not a hub id!")
    with pytest.raises(UserError, match="not in the local Hugging Face cache"):  # the tests are offline
        models.resolve("draftsmith-tests/no-such-model")
