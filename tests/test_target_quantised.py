"""Quantised targets: the taps of the floats that the checkpoint stands for, or one line that says what is in the way.

Formats whose packages are not installed are refused; which packages each needs stands in quantised.py.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftsmith.drafters.dflash import DFlash, DFlashShape, to_zlab
from draftsmith.drafters.init import init_from_target
from draftsmith.errors import UserError
from draftsmith.evaluate import shared_tables
from draftsmith.tables import load_tables
from draftsmith.target import Target
from draftsmith.target_facts import describe
from draftsmith.target_load import load_whole
from draftsmith.target_scales import Scales
from quantised import (
    F8,
    FORMATS,
    FP8,
    HIDDEN,
    LAYERS,
    VOCAB,
    compressed,
    fp8_blocks,
    fp8_rows,
    gptq,
    int4_groups,
    quantise,
    save_plain,
)
from target_families import save_family

CPU = torch.device("cpu")
TAPS = (1, 3)
IDS = torch.arange(3, 43)


def taps_of(directory: Path, hidden: int = HIDDEN) -> tuple[torch.Tensor, Target]:
    target = Target.load(directory, TAPS, torch.float32, CPU)
    out = torch.empty(len(IDS), 2 * hidden)
    target.prefill(IDS, torch.arange(len(IDS)), torch.zeros(len(IDS), dtype=torch.int64), out)
    return out, target


def refusal(directory: Path, whole: bool = True) -> str:
    """The one line; `whole`: evaluations and replies, which load the whole model, refuse it, too."""
    with pytest.raises(UserError) as caught:
        Target.load(directory, TAPS, torch.float32, CPU)
    if whole:
        with pytest.raises(UserError, match=r"^.+$"):
            load_whole(directory, torch.float32, CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_taps_are_those_of_the_floats_it_stands_for_or_a_package_is_named(name, tmp_path):
    made = FORMATS[name]
    save_plain(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    plain = quantise(tmp_path, made.quantization, made.store)
    method = made.quantization["quant_method"]
    assert describe(tmp_path).hidden_size == HIDDEN
    assert load_tables(tmp_path, torch.float32, CPU).head.weight.shape == (VOCAB, HIDDEN)
    if not made.here:
        why = refusal(tmp_path)
        assert why.startswith(f"{tmp_path / 'config.json'}: quantization_config.quant_method is {method!r}, which")
        assert "; name the same" in why or "install what is missing, or name the same model in plain floats" in why
        return
    model.load_state_dict(plain, strict=False)
    answer = model(input_ids=IDS[None], output_hidden_states=True, use_cache=False)
    want = torch.cat([answer.hidden_states[t + 1][0] for t in TAPS], -1)
    got, target = taps_of(tmp_path)
    assert float((got - want).norm() / want.norm()) < made.tolerance
    assert f"float32, quantised by {method}" in target.report()[0]
    names = {n for n, _ in target.decoder.named_modules()}
    assert "layers.3" in names and "layers.4" not in names and not any("lm_head" in n for n in names)
    whole = load_whole(tmp_path, torch.float32, CPU)  # its own tables are the drafter's in evaluations
    assert whole.get_output_embeddings().weight.dtype == whole.get_input_embeddings().weight.dtype == torch.float32
    logits = whole(input_ids=IDS[None], use_cache=False).logits
    assert float((logits - answer.logits).norm() / answer.logits.norm()) < 2 * made.tolerance


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        (None, r"model.safetensors: model.layers.0.*_proj.weight is quantised \(F8_E4M3\), but config.json has no"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            r"config.json: .*quant_method is 'modelopt', which this version",
        ),
        ("fp8", r"config.json: transformers cannot read it: 'str' object"),
        ({"quant_method": ["fp8"]}, r"config.json: quantization_config.quant_method is \['fp8'\], which this version"),
        (
            {"quant_method": "compressed-tensors", "config_groups": ["Linear"]},
            r"config.json: .*config_groups is no table",
        ),
        ({"quant_algo": "FP8"}, r"config.json: quantization_config.quant_method is None, which this version"),
        (
            {"quant_method": "nvfp4"},
            r"config.json: .*quant_method is 'nvfp4', which .* cannot load here: .*; (name|install)",
        ),
        (
            {"quant_method": "spqr"},
            r"config.json: .*quant_method is 'spqr', which .* cannot load here: .*; (name|install)",
        ),
    ],
)
def test_what_transformers_would_read_wrongly_or_not_at_all_is_refused(quantization, why, tmp_path):
    """FP8 weights without their scales are off by a factor of thousands, and transformers only warns."""
    save_plain(tmp_path)
    quantise(tmp_path, quantization, fp8_rows)
    with pytest.raises(UserError, match=why):
        Target.load(tmp_path, TAPS, torch.float32, CPU)


SCALELESS = ["fp8", "compressed-tensors, fp8", "compressed-tensors, int8", "bitsandbytes, int8", "bitsandbytes, nf4"]


@pytest.mark.parametrize("name", SCALELESS)
def test_a_weight_without_its_scale_is_refused(name, tmp_path):
    """transformers takes the weight for a plain one, also where the activations have a scale."""
    save_plain(tmp_path)
    quantise(tmp_path, FORMATS[name].quantization, FORMATS[name].store)
    module = "model.layers.2.mlp.down_proj"
    stored = [n.removeprefix(f"{module}.") for n in load_file(tmp_path / "model.safetensors") if n.startswith(module)]
    scale = next(n for n in stored if n in ("weight_scale_inv", "weight_scale", "SCB", "weight.absmax"))
    change(tmp_path, f"{module}.{scale}", input_scale=torch.ones(1))
    assert f"{module}.weight is quantised" in refusal(tmp_path) and "no scale lies beside it" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([64, 64], "blocks are [64, 64] by quantization_config.weight_block_size: they ask for [1, 2]"),
        (128, "weight_block_size is 128, not two numbers"),
        ([0, 32], "weight_block_size is [0, 32], not two numbers"),
    ],
)
def test_scales_and_block_size_that_contradict_each_other_are_refused(blocks, why, tmp_path):
    save_plain(tmp_path)
    quantise(tmp_path, FP8 | {"weight_block_size": blocks}, fp8_blocks)
    assert why in refusal(tmp_path)


def test_blocks_that_do_not_fill_a_weight_are_refused(tmp_path):
    """transformers divides 64 rows by 2 scales, so that the second begins at row 32 instead of 48."""
    save_plain(tmp_path)
    quantise(
        tmp_path,
        FP8 | {"weight_block_size": [48, 128]},
        lambda w: (
            {"weight": w.to(F8), "weight_scale_inv": torch.ones(-(-w.shape[0] // 48), -(-w.shape[1] // 128))},
            w,
        ),
    )
    assert "transformers needs whole blocks" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_taps_that_are_not_finite_are_refused(family, tmp_path):
    """Packed and one by one; what a damaged scale makes of a weight is no different."""
    save_family(family, tmp_path)
    name = "model.layers.1.post_attention_layernorm.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    change(tmp_path, name, weight=torch.where(torch.arange(len(weight)) == 3, torch.inf, weight))
    assert "target.model: the output of layer 1 is not finite in float32" in refusal(tmp_path, whole=False)


def test_several_schemes_in_one_checkpoint_are_refused(tmp_path):
    save_plain(tmp_path)
    mixed = compressed("pack-quantized", 4, "int", "group")
    mixed["config_groups"]["group_1"] = compressed("float-quantized", 8, "float", "channel")["config_groups"]["group_0"]
    quantise(tmp_path, mixed, int4_groups)
    assert "config.json: quantization_config.config_groups has several schemes" in refusal(tmp_path)


@pytest.fixture
def mxfp4(tmp_path) -> Path:
    """GPT-OSS, which transformers reads without any other package."""
    save_family("gpt_oss", tmp_path, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, columns, -(-rows // 32), 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, columns, -(-rows // 32)), 125, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    return tmp_path


def change(directory: Path, name: str, **stored: torch.Tensor) -> None:
    """Put other tensors in the place of one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    module = name.rpartition(".")[0]
    del tensors[name]
    save_file(tensors | {f"{module}.{n}": t for n, t in stored.items()}, path, metadata={"format": "pt"})


def test_a_scale_that_is_not_read_is_named(mxfp4):
    name = "model.layers.2.self_attn.q_proj.weight"
    weight = load_file(mxfp4 / "model.safetensors")[name]
    change(mxfp4, name, **fp8_rows(weight.float())[0])
    assert f"mxfp4 reads {name} (F8_E4M3) but not weight_scale beside it" in refusal(mxfp4)


def test_scales_of_layers_that_are_not_loaded_do_not_matter(mxfp4):
    name = "model.layers.4.self_attn.q_proj.weight"
    weight = load_file(mxfp4 / "model.safetensors")[name]
    change(mxfp4, name, **fp8_rows(weight.float())[0])
    assert "quantised by mxfp4" in Target.load(mxfp4, TAPS, torch.float32, CPU).report()[0]


def test_a_conversion_that_fails_says_why(mxfp4):
    """transformers raises only that the reason was logged."""
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(mxfp4 / "model.safetensors")[name]
    change(mxfp4, name, down_proj_scales=scales[:, :, :1].contiguous())
    why = refusal(mxfp4)
    assert "quant_method is 'mxfp4'" in why and "fails on" in why and "experts.down_proj" in why


def test_a_missing_tensor_is_the_quantizers_business(mxfp4):
    change(mxfp4, "model.layers.1.self_attn.k_proj.weight")
    assert "quantizer for mxfp4 finds no tensor model.layers.1.self_attn.k_proj.weight in its files" in refusal(mxfp4)


@pytest.mark.parametrize("error", [AssertionError(), AttributeError("'Parameter' object has no attribute 'CB'")])
def test_layers_that_do_not_run_are_told_in_one_line(mxfp4, monkeypatch, error):
    """Kernels that need a GPU or a package fail when they first run, with any kind of error."""

    def forward(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP.forward", forward)
    why = refusal(mxfp4, whole=False)
    assert f"whose layers do not run on cpu in float32: {str(error) or 'AssertionError'};" in why
    assert "set the dtype to bfloat16" in why


def test_a_text_tower_knows_the_quantisation_of_the_whole(tmp_path):
    """In multimodal models only the outer config tells of it."""
    save_family("qwen2_5_vl", tmp_path)
    want = taps_of(tmp_path, 32)[0]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("o_proj.weight") and "visual" not in n]:
        stored, tensors[name] = fp8_blocks(tensors[name])
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in stored.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    edit(tmp_path, quantization_config=FP8)
    if not FORMATS["fp8"].here:
        assert "quant_method is 'fp8', which transformers cannot load here" in refusal(tmp_path)
        return
    got = taps_of(tmp_path, 32)[0]
    assert 1e-4 < float((got - want).norm() / want.norm()) < 0.2


@pytest.mark.parametrize(
    ("module", "store", "name"),
    [
        ("lm_head", gptq, "lm_head.qweight is quantised (I32)"),
        ("lm_head", int4_groups, "lm_head.weight_packed is quantised (I32)"),
        ("lm_head", fp8_blocks, "lm_head.weight is quantised (F8_E4M3)"),
        (
            "model.embed_tokens",
            lambda w: ({"weight._data": w.to(torch.int8)}, w),
            "embed_tokens.weight._data is quantised",
        ),
    ],
)
def test_quantised_tables_are_named(module, store, name, tmp_path):
    save_plain(tmp_path)
    quantise(tmp_path, FP8, store, module)
    with pytest.raises(UserError) as caught:
        load_tables(tmp_path, torch.float32, CPU)
    assert name in str(caught.value) and "quantise the model without them" in str(caught.value)


def test_an_evaluation_names_a_head_that_stays_packed(tmp_path):
    model = save_plain(tmp_path)
    assert shared_tables(model, Scales(1.0, 1.0, 0.0)).head.weight is model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(
        torch.zeros(VOCAB * HIDDEN // 2, 1, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(UserError, match="its embedding or head is quantised"):
        shared_tables(model, Scales(1.0, 1.0, 0.0))


def test_a_drafter_starts_as_the_last_layers_of_a_quantised_target(tmp_path):
    f = save_plain(tmp_path).config
    plain = quantise(tmp_path, FORMATS["fp8"].quantization, fp8_blocks)
    drafter = DFlash(DFlashShape(
        hidden_size=HIDDEN, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2, vocab_size=VOCAB,
        block_size=4, mask_token=1, taps=TAPS, num_target_layers=LAYERS, rms_norm_eps=f.rms_norm_eps,
        rope=describe(tmp_path).rope, max_positions=256, windows=(None, None),
    ))  # fmt: skip
    if not FORMATS["fp8"].here:
        with pytest.raises(UserError, match=r"quant_method is 'fp8', which transformers cannot load here"):
            init_from_target(drafter, tmp_path)
        return
    init_from_target(drafter, tmp_path)
    got = to_zlab(dict(drafter.named_parameters()), drafter.shape)
    for draft, layer in ((0, LAYERS - 2), (1, LAYERS - 1)):
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            want = plain[f"model.layers.{layer}.{leaf}.weight"]
            torch.testing.assert_close(got[f"layers.{draft}.{leaf}.weight"], want)
    assert torch.equal(got["norm.weight"], load_file(tmp_path / "model.safetensors")["model.norm.weight"].float())


def test_layers_that_stay_quantised_start_no_drafter(tmp_path):
    save_plain(tmp_path)
    quantise(tmp_path, FORMATS["gptq"].quantization, gptq)
    with pytest.raises(UserError, match=r'stay quantised cannot start a draft layer; set drafter.init = "random"'):
        init_from_target(DFlash(DFlashShape(
            hidden_size=HIDDEN, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2,
            vocab_size=VOCAB, block_size=4, mask_token=1, taps=TAPS, num_target_layers=LAYERS, rms_norm_eps=1e-6,
            rope=describe(tmp_path).rope, max_positions=256, windows=(None, None),
        )), tmp_path)  # fmt: skip
