"""In-process replies: greedy equals the model's own, sampled ones depend on seed and prompt alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from draftsmith.generate import Generator, Reply, Sampler
from draftsmith.smollm import smollm_directory
from tiny_models import own_greedy, random_prompts, save_target, tiny_target


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama")


def own_reply(model, prompt: list[int], new: int, stops: tuple[int, ...] = (1,)) -> Reply:
    tokens = own_greedy(model, prompt, new, stops)
    return Reply(tokens[:-1], "stop") if tokens[-1] in stops else Reply(tokens, "length")


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_greedy_equals_the_models_own(model, batch):
    prompts = random_prompts(24)
    stops = frozenset(own_greedy(model, prompts[3], 9)[-1:] + own_greedy(model, prompts[7], 3)[-1:])
    replies = Generator(model, stops).generate(prompts, 20, batch=batch)
    assert replies == [own_reply(model, p, 20, tuple(stops)) for p in prompts]
    assert {r.finish for r in replies} == {"stop", "length"}  # rows left early and late


def test_finished_rows_make_room_for_the_next_prompts(model, monkeypatch):
    prompts, calls = random_prompts(24), []
    stops = frozenset(own_greedy(model, prompts[3], 9)[-1:] + own_greedy(model, prompts[7], 3)[-1:])
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: calls.append(inputs["input_ids"].shape) or forward(**inputs))
    replies = Generator(model, stops).generate(prompts, 20, batch=4)
    monkeypatch.undo()
    assert replies == [own_reply(model, p, 20, tuple(stops)) for p in prompts]
    assert max(rows for rows, _ in calls) == 4
    lengths = [len(replies[i].tokens) for i in sorted(range(24), key=lambda i: -len(prompts[i]))]
    one_after_the_other = sum(max(lengths[i : i + 4]) for i in range(0, 24, 4))
    assert sum(tokens == 1 for _, tokens in calls) < 0.8 * one_after_the_other


def test_hybrid_and_sliding_targets():
    """Kinds of layers whose caches have no common layout."""
    shared = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.2, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    linear = Qwen3NextConfig(
        **shared, layer_types=["linear_attention", "full_attention"] * 2, num_experts=0, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, decoder_sparse_step=9,
    )  # fmt: skip
    sliding = Gemma2Config(**shared, sliding_window=6, query_pre_attn_scalar=16)
    prompts = random_prompts(6)
    for model in (Qwen3NextForCausalLM(linear), Gemma2ForCausalLM(sliding)):
        model = model.float().eval()
        stops = tuple(own_greedy(model, prompts[0], 4)[-1:])
        for batch in (3, 64):
            replies = Generator(model, frozenset(stops)).generate(prompts, 12, batch=batch)
            assert replies == [own_reply(model, p, 12, stops) for p in prompts], type(model).__name__


def test_sampled_reply_depends_on_seed_and_prompt_alone(model):
    prompts = random_prompts(12)
    generator, sampler = Generator(model, frozenset({1})), Sampler(temperature=1.0, seed=3)
    whole = generator.generate(prompts, 16, sampler)
    assert generator.generate(prompts, 16, sampler) == whole
    assert generator.generate(prompts[::-1], 16, sampler, batch=5) == whole[::-1]
    assert generator.generate(prompts[4:5], 16, sampler) == whole[4:5]
    other = generator.generate(prompts, 16, Sampler(temperature=1.0, seed=4))
    assert sum(a == b for a, b in zip(whole, other, strict=True)) < 6


def test_samples_follow_the_distribution():
    """20,000 draws over 8 tokens, total variation below 0.02 (about 0.008 is expected)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 0.3, -9.0])
    keys = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sampler = Sampler(temperature=0.7, seed=1)
    tokens = sampler.pick(logits.expand(len(keys), -1), keys, [2] * len(keys))
    share = torch.bincount(tokens, minlength=8) / len(keys)
    assert (share - (logits / 0.7).softmax(-1)).abs().sum() / 2 < 0.02
    again = sampler.pick(logits.expand(len(keys), -1), keys, [3] * len(keys))
    agree = float((tokens == again).float().mean())
    assert agree == pytest.approx(float((logits / 0.7).softmax(-1).square().sum()), abs=0.02)  # places are independent


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    keys = np.arange(4_000, dtype=np.uint64)
    many, places = logits.expand(len(keys), -1), [0] * len(keys)
    assert set(Sampler(1.0, top_k=2).pick(many, keys, places).tolist()) == {0, 1}
    assert set(Sampler(1.0, top_p=0.9).pick(many, keys, places).tolist()) == {0, 1, 2}
    assert set(Sampler(1.0, top_p=0.5, top_k=3).pick(many, keys, places).tolist()) == {0}
    assert set(Sampler(1.0).pick(many, keys, places).tolist()) == {0, 1, 2, 3}


def test_a_bad_sampler_is_refused():
    for wrong in (dict(temperature=-0.1), dict(top_p=0.0), dict(top_p=1.1), dict(top_k=-1)):
        with pytest.raises(ValueError, match="temperature and top_k must not be negative"):
            Sampler(**wrong)


def test_progress_once_a_prompt_and_context_limits(model):
    prompts = [*random_prompts(5), [5] * 506]  # the model's context is 512
    seen: dict[int, Reply] = {}
    replies = Generator(model, frozenset()).generate(
        prompts, 10, progress=lambda i, reply: seen.update({i: reply}) if i not in seen else pytest.fail("twice")
    )
    assert [seen[i] for i in range(6)] == replies
    assert [len(r.tokens) for r in replies] == [10] * 5 + [6] and replies[-1].finish == "length"
    for bad in ([5] * 512, []):
        with pytest.raises(ValueError, match=f"prompt 1 has {len(bad)} tokens"):
            Generator(model, frozenset()).generate([[4, 5], bad], 10)
    assert Generator(model, frozenset()).generate([], 10) == []


def test_from_a_directory(model, tmp_path):
    """`Generator.load` takes the directory, its stop token and the dtype asked for."""
    save_target(model, tmp_path)
    prompts = random_prompts(4)
    assert Generator.load(tmp_path, "float32").generate(prompts, 12) == [own_reply(model, p, 12) for p in prompts]
    half = Generator.load(tmp_path, "bfloat16")
    assert half.model.dtype == torch.bfloat16 and half.stop_tokens == {1}
    assert [len(r.tokens) <= 12 for r in half.generate(prompts, 12)] == [True] * 4
    capabilities = torch.cpu.get_capabilities()
    native = torch.cuda.is_available() or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    assert Generator.load(tmp_path).model.dtype == (torch.bfloat16 if native else torch.float32)


def test_the_real_model_stops():
    directory = smollm_directory()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = ["What is the capital of France?", "Say hello."]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True)["input_ids"]
        for c in chats
    ]
    replies = Generator.load(directory, "float32").generate(prompts, 16)
    assert tokenizer.decode(replies[0].tokens) == "The capital of France is Paris." and replies[0].finish == "stop"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert replies[1] == own_reply(model, prompts[1], 16, (2,))
