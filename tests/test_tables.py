"""Frozen tables with their measured scales: equal to what the family's own model does, or refused."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.tables import load_tables
from draftsmith.target_facts import read_config
from draftsmith.target_scales import Scales, measure_scales
from target_families import COMMON, HIDDEN, MAMBA, VOCAB

CPU = torch.device("cpu")
GPT2 = dict(n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
MLA = dict(
    head_dim=None, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
    v_head_dim=6, scale_emb=7.0, dim_model_base=8,
)  # fmt: skip
H1 = dict(**MAMBA, embedding_multiplier=2.5, lm_head_multiplier=0.3)
# name -> (config class, what differs from COMMON with two layers; None takes a field out, expected scales)
TABLES = {
    "llama, tied": ("LlamaConfig", dict(tie_word_embeddings=True), Scales(1.0, 1.0, 0.0)),
    "gemma": ("GemmaConfig", {}, Scales(HIDDEN**0.5, 1.0, 0.0)),
    "gemma2": ("Gemma2Config", dict(final_logit_softcapping=5.0), Scales(HIDDEN**0.5, 1.0, 5.0)),
    "vaultgemma": ("VaultGemmaConfig", dict(final_logit_softcapping=5.0), Scales(HIDDEN**0.5, 1.0, 5.0)),
    "cohere": ("CohereConfig", dict(logit_scale=0.3), Scales(1.0, 0.3, 0.0)),
    "granite": ("GraniteConfig", dict(embedding_multiplier=3.0, logits_scaling=4.0), Scales(3.0, 0.25, 0.0)),
    "hyperclovax": ("HyperCLOVAXConfig", dict(embedding_multiplier=3.0, logits_scaling=4.0), Scales(3.0, 4.0, 0.0)),
    "minicpm3": ("MiniCPM3Config", MLA, Scales(7.0, 0.25, 0.0)),
    "falcon_h1": ("FalconH1Config", H1, Scales(2.5, 0.3, 0.0)),
    "gpt2": ("GPT2Config", GPT2, Scales(1.0, 1.0, 0.0)),
    "gpt_neox": ("GPTNeoXConfig", {}, Scales(1.0, 1.0, 0.0)),
}  # fmt: skip
REFUSED = {
    "phi": ("PhiConfig", {}, "its logits are its head's plus a bias"),
    "bloom": ("BloomConfig", dict(n_layer=2, n_head=4), "its first layer gets more than embedding"),
}


def config_of(name: str, changes: dict) -> transformers.PreTrainedConfig:
    common = {} if name == "GPT2Config" else {**COMMON, "num_hidden_layers": 2}
    return getattr(transformers, name)(**{k: v for k, v in {**common, **changes}.items() if v is not None})


def save(name: str, changes: dict, directory: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, changes), attn_implementation="eager").eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", TABLES)
@torch.no_grad()
def test_tables_equal_the_models_own_embeddings_and_logits(family, tmp_path):
    name, changes, expected = TABLES[family]
    model = save(name, changes, tmp_path)
    tables = load_tables(tmp_path, torch.float32, CPU)
    head = tables.head
    assert (tables.embed_scale, head.scale, head.softcap) == pytest.approx(
        (expected.embedding, expected.logit, expected.softcap), rel=1e-6
    )
    ids = torch.arange(3, 40)
    answer = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    embedded = torch.nn.functional.embedding(ids, tables.embedding) * tables.embed_scale
    if family == "gpt2":  # learned positions are the target's affair: the drafter has its own
        embedded += model.transformer.wpe.weight[: len(ids)]
    torch.testing.assert_close(embedded, answer.hidden_states[0][0], rtol=1e-5, atol=1e-5)
    logits = answer.hidden_states[-1][0] @ head.weight.T * head.scale
    logits = torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits
    torch.testing.assert_close(logits, answer.logits[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_something_else_is_refused(family, tmp_path):
    name, changes, why = REFUSED[family]
    save(name, changes, tmp_path)
    with pytest.raises(UserError, match=why):
        load_tables(tmp_path, torch.float32, CPU)


def test_a_class_that_does_not_run_hollow_is_named(monkeypatch, tmp_path):
    save("LlamaConfig", {}, tmp_path)

    def forward(self, **kwargs):
        return self.layers[7](kwargs["input_ids"])

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    with pytest.raises(UserError, match=r"cannot be measured, LlamaConfig does not run without its layers: index 7"):
        load_tables(tmp_path, torch.float32, CPU)


def test_a_quantised_table_is_refused(tmp_path):
    """Its values mean nothing without the scales beside them."""
    save("LlamaConfig", {}, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(UserError, match=r"model.safetensors: lm_head.weight is quantised \(F8_E4M3\)"):
        load_tables(tmp_path, torch.float32, CPU)


def test_measuring_leaves_config_and_random_numbers_alone(tmp_path):
    save("GraniteConfig", {}, tmp_path)
    config = read_config(tmp_path)
    before, state = config.to_dict(), torch.get_rng_state()
    measure_scales(tmp_path, config)
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


def test_measuring_a_large_model_takes_no_memory(tmp_path):
    """70 B parameters, of which not even one layer or table is made."""
    import resource

    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, vocab_size=128256
    )
    measure_scales(tmp_path, transformers.LlamaConfig(**COMMON))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert measure_scales(tmp_path, config) == Scales(1.0, 1.0, 0.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB; a layer has 1.7 GB in bfloat16
