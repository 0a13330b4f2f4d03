"""Targets that need something special: experts, learned positions, attention that cannot be switched."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from draftsmith.errors import UserError
from draftsmith.target import RowPlan, Target
from draftsmith.target_experts import OWN, Experts, experts_of
from target_families import COMMON, HIDDEN, VOCAB, save_family

CPU = torch.device("cpu")
TAPS = (0, 2)


def save(config, directory) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def prefilled(target: Target, ids: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Taps of each document of a row."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    out = torch.empty(len(ids), len(target.taps) * HIDDEN)
    target.prefill(ids, positions, documents, out)
    return list(out.split(lengths))


@torch.no_grad()
def own(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in TAPS], -1)


@pytest.mark.parametrize(
    ("family", "dtype", "way", "mode"),
    [
        ("qwen3_moe", torch.bfloat16, "grouped_mm", "graph"),
        ("gpt_oss", torch.bfloat16, "grouped_mm", "graph"),
        ("deepseek_v3", torch.bfloat16, "grouped_mm", "graph"),
        ("qwen3_moe", torch.float32, "grouped_mm", "compile"),
        ("qwen3_moe", torch.bfloat16, "eager", "compile"),
        ("qwen3_moe", torch.float32, "batched_mm", "graph"),
    ],
)
def test_a_mixture_of_experts_says_whether_a_graph_can_hold_it(family, dtype, way, mode, tmp_path):
    save_family(family, tmp_path)
    target = Target.load(tmp_path, TAPS, dtype, CPU)
    assert any("mixture of" in line and "grouped_mm" in line for line in target.report())
    target.decoder.set_experts_implementation(way)
    experts = experts_of(target.decoder)
    assert experts == Experts(4 if family == "gpt_oss" else 8, way, dtype)
    chosen, why = experts.describe("graph")
    assert chosen == mode
    assert ("runs in mode compile" in why) == (mode == "compile")
    assert experts.describe("eager")[0] == "eager"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_what_the_sentence_says_of_a_loop_is_what_the_compiler_finds(tmp_path):
    """One graph without a break for the ways that a CUDA graph can hold; a loop breaks it."""
    save_family("qwen3_moe", tmp_path)
    target = Target.load(tmp_path, TAPS, torch.bfloat16, CPU)
    ids = torch.arange(3, 19)[None]
    target.kernel.load(torch.zeros(16, dtype=torch.int64))
    for way in ("grouped_mm", "eager"):
        target.decoder.set_experts_implementation(way)
        traced = torch.compile(target.forward, backend="eager", fullgraph=True, dynamic=False)
        with torch.no_grad():
            if way == "eager":
                with pytest.raises(RuntimeError):
                    traced(ids, torch.arange(16)[None])
            else:
                traced(ids, torch.arange(16)[None])
        torch._dynamo.reset()


def test_experts_in_code_of_their_own_are_not_captured():
    module = torch.nn.Module()
    module.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    assert experts_of(module) == Experts(3, OWN, torch.float32)
    assert experts_of(module).describe("reduce-overhead")[0] == "compile"
    assert experts_of(torch.nn.Linear(4, 4)) is None


def test_learned_positions_are_the_targets_affair(tmp_path):
    """Documents keep to the table; the unused rest of a row may be longer than it."""
    model = save(GPT2Config(**{**COMMON, "max_position_embeddings": 48}), tmp_path)
    target = Target.load(tmp_path, TAPS, torch.float32, CPU, rows=RowPlan(200, 48))
    assert target.packed
    lengths = [48, 20, 132]
    ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(0))
    got = prefilled(target, ids, lengths)
    for taps, part in zip(got[:2], ids.split(lengths)[:2], strict=True):
        torch.testing.assert_close(taps, own(model, part), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"learned positions for 48 tokens.* of 49: prepare it with --max-tokens 48"):
        Target.load(tmp_path, TAPS, torch.float32, CPU, rows=RowPlan(200, 49))


def test_an_attention_that_cannot_be_switched_runs_alone_with_its_own_masks(tmp_path):
    model = save(BloomConfig(**COMMON), tmp_path)
    target = Target.load(tmp_path, TAPS, torch.float32, CPU)
    assert not target.packed and "own for this family" in target.report()[-1]
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    for taps, part in zip(prefilled(target, ids, [25, 15]), ids.split([25, 15]), strict=True):
        torch.testing.assert_close(taps, own(model, part), rtol=1e-4, atol=1e-4)
