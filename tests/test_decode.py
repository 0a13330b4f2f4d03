"""Decoding is lossless: greedy text is the target's own, samples follow its distribution; and the walk agrees with it."""

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.decode import GREEDY, Decoder, Sampling, _prefill_groups
from draftsmith.errors import UserError
from draftsmith.loss import Head
from draftsmith.walk import Walk, spans, walk, walk_row
from tiny_models import Trained, own_greedy, random_drafter, random_prompts, shape_for, tables_of, tiny_target

NEW = 24


@pytest.fixture(scope="module")
def half_trained():
    """A target, 24 prompts with its own answers, and a drafter that is right sometimes."""
    torch.set_num_threads(1)
    model = tiny_target()
    pairs = [(p, own_greedy(model, p, NEW)) for p in random_prompts(24)]
    drafter = random_drafter(shape_for(model, 2, 8, (1, 3)), std=0.05)
    return model, Trained(model, drafter, pairs).train(25), pairs


def test_greedy_equals_the_targets_own_on_24_prompts(half_trained):
    model, trained, pairs = half_trained
    prompts, answers = [p for p, _ in pairs], [a for _, a in pairs]
    plain = Decoder(model).generate(prompts, NEW)
    drafted = Decoder(model, trained.drafter, tables_of(model)).generate(prompts, NEW)
    assert [list(g.tokens) for g in plain] == answers
    assert [list(g.tokens) for g in drafted] == answers
    assert all(c == (0, 0, 1) for g in plain for c in g.cycles) and all(len(g.cycles) == NEW - 1 for g in plain)
    committed = [c.committed for g in drafted for c in g.cycles]
    assert {1, 2, 3} <= set(committed) and sum(committed) == 24 * (NEW - 1)
    assert all(c.committed <= c.accepted + 1 <= c.drafted + 1 for g in drafted for c in g.cycles)


@pytest.mark.parametrize(
    ("family", "tied", "layers", "block", "taps", "windows"),
    [
        ("llama", True, 1, 4, (2,), (None,)),
        ("qwen3", True, 2, 16, (0, 1, 2, 3, 4, 5), (None, None)),
        ("llama", False, 5, 8, (3, 1, 0, 4), (4, None, 2, None, 3)),
    ],
)
def test_shapes(family, tied, layers, block, taps, windows):
    model = tiny_target(family, tied=tied, seed=block)
    drafter = random_drafter(shape_for(model, layers, block, taps, windows=windows))
    prompts = random_prompts(5, seed=block)
    drafted = Decoder(model, drafter, tables_of(model)).generate(prompts, 12)
    assert [list(g.tokens) for g in drafted] == [own_greedy(model, p, 12) for p in prompts]


def test_rows_do_not_depend_on_each_other(half_trained):
    """Alone or in a batch, among rows that leave early: same tokens, cycles and, with a seed, same samples."""
    model, trained, pairs = half_trained
    decoder = Decoder(model, trained.drafter, tables_of(model))
    prompts = [p for p, _ in pairs[:8]]
    stops = [9, 21, 46]
    for sampling in (Sampling(), Sampling(0.8, seed=5)):
        together = decoder.generate(prompts, NEW, stops, sampling)
        assert len({len(g.tokens) for g in together}) > 2
        for number, prompt in enumerate(prompts):
            assert decoder.generate([prompt], NEW, stops, sampling, [number]) == [together[number]]
    again = decoder.generate(prompts, NEW, stops, Sampling(0.8, seed=6))
    assert [g.tokens for g in again] != [g.tokens for g in together]


def test_stop_tokens_and_limits(half_trained):
    model, trained, pairs = half_trained
    decoder = Decoder(model, trained.drafter, tables_of(model))
    prompt, answer = pairs[0]
    for new in (1, 2, 3, 9):
        (cut,) = decoder.generate([prompt], new)
        assert list(cut.tokens) == answer[:new] and sum(c.committed for c in cut.cycles) == new - 1
    for stop in set(answer):
        (cut,) = decoder.generate([prompt], NEW, [stop])
        assert list(cut.tokens) == answer[: answer.index(stop) + 1]
    (first,) = decoder.generate([prompt], NEW, [answer[0]])
    assert first.cycles == ()  # the prefill's token is no cycle's work


def test_smaller_blocks_and_wrong_ones(half_trained):
    model, trained, pairs = half_trained
    tables = tables_of(model)
    (small,) = Decoder(model, trained.drafter, tables, 3).generate([pairs[0][0]], NEW)
    assert list(small.tokens) == pairs[0][1] and max(c.drafted for c in small.cycles) == 2
    for block in (1, 9):
        with pytest.raises(ValueError, match="block size"):
            Decoder(model, trained.drafter, tables, block)


def test_sliding_targets():
    """Targets whose layers are all sliding, or mixed and with a soft-cap, keep their windows in blocks of many rows."""
    small = dict(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, sliding_window=6, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    mistral = MistralForCausalLM(MistralConfig(**small)).eval()
    gemma = Gemma2ForCausalLM(Gemma2Config(**small, query_pre_attn_scalar=16)).eval()
    assert len(set(gemma.config.layer_types)) == 2
    for model, scale, softcap in ((mistral, 1.0, 0.0), (gemma, 8.0, gemma.config.final_logit_softcapping)):
        tables = tables_of(model)
        tables = replace(tables, embed_scale=scale, head=Head(tables.head.weight, 1.0, softcap))
        shape = shape_for(model, 2, 4, (1, 2), rope={"rope_type": "default", "rope_theta": 10000.0})
        prompts = random_prompts(4, longest=20)
        drafted = Decoder(model, random_drafter(shape), tables).generate(prompts, 16)
        assert [list(g.tokens) for g in drafted] == [own_greedy(model, p, 16) for p in prompts]


def test_bfloat16_runs(half_trained):
    model, trained, pairs = half_trained
    half = tiny_target().bfloat16()
    drafter = random_drafter(trained.drafter.shape)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16()
    (drafted,) = Decoder(half, drafter, tables_of(half)).generate([pairs[0][0]], 9)
    assert len(drafted.tokens) == 9


@pytest.mark.gpu
def test_cuda_writes_what_the_cpu_writes(half_trained):
    """float32, greedy and sampled; bfloat16 runs."""
    model, trained, pairs = half_trained
    prompts, tables = [p for p, _ in pairs], tables_of(model)
    expected = [Decoder(model, trained.drafter, tables).generate(prompts, NEW, [9], s) for s in (GREEDY, Sampling(0.8))]
    there = copy.deepcopy(model).cuda()
    drafter = copy.deepcopy(trained.drafter).cuda()
    decoder = Decoder(there, drafter, tables_of(there))
    for sampling, answers in zip((GREEDY, Sampling(0.8)), expected, strict=True):
        assert decoder.generate(prompts, NEW, [9], sampling) == answers
    half = Decoder(there.bfloat16(), drafter.bfloat16(), tables_of(there))
    assert all(len(g.tokens) == NEW for g in half.generate(prompts, NEW))


def test_targets_that_cannot_forget_are_refused():
    hybrid = tiny_target()
    hybrid.config.layer_types = ["linear_attention", "full_attention"] * 3
    with pytest.raises(UserError, match="linear_attention"):
        Decoder(hybrid)


def test_prefill_groups():
    assert list(_prefill_groups([10, 20, 5])) == [(0, 3)]
    assert list(_prefill_groups([9000, 10, 20])) == [(0, 1), (1, 3)]
    assert list(_prefill_groups([10, 4000, 4000, 4000])) == [(0, 2), (2, 4)]


def sequence_distribution(model, prompt, length, temperature):
    """Exact probabilities of all answers of `length` tokens, [V] * length."""
    vocab = model.config.vocab_size
    total = np.ones([1] * length)
    for depth in range(length):
        heads = list(product(range(vocab), repeat=depth))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *h] for h in heads])).logits[:, -1]
        p = torch.softmax(logits.double() / temperature, -1).numpy()
        total = total * p.reshape([vocab] * (depth + 1) + [1] * (length - depth - 1))
    return total


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_samples_follow_the_targets_distribution(temperature):
    """Chi-square over all answers of 4 tokens of 5, 6,000 draws, for plain decoding and with a drafter that often misses."""
    model = tiny_target(vocab=5, layers=4, seed=3)
    model.lm_head.weight.data *= 0.25  # a distribution that is neither flat nor certain
    drafter = random_drafter(shape_for(model, 1, 4, (1,), mask_token=4), seed=1, std=0.4)
    prompt, draws, length = [0, 3, 1], 6000, 4
    expected = sequence_distribution(model, prompt, length, temperature).flatten() * draws
    for decoder in (Decoder(model), Decoder(model, drafter, tables_of(model))):
        generations = decoder.generate([prompt] * draws, length, (), Sampling(temperature, seed=11))
        tokens = np.array([g.tokens for g in generations])
        counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), [5] * length), minlength=5**length)
        large = expected >= 5  # rare answers share one cell, as the test's approximation needs
        observed = np.append(counts[large], counts[~large].sum())
        wanted = np.append(expected[large], expected[~large].sum())
        chi, free = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
        # Wilson-Hilferty: the cube root of chi/free is nearly normal; 4 deviations are 3e-5.
        deviations = ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5
        assert free > 30 and abs(deviations) < 4, (chi, free)
        accepted = [c.accepted for g in generations for c in g.cycles]
        if decoder.drafter:
            assert 0.1 < np.mean(np.array(accepted) > 0) < 0.9  # both branches of the rejection rule are taken


def test_a_drafter_equal_to_the_target_is_never_rejected():
    """p = q: every draft passes, whatever the draws."""
    from draftsmith.decode import _judge_sampled

    p = torch.softmax(torch.randn(64, 4, 9, generator=torch.Generator().manual_seed(0)), -1)
    block = torch.randint(0, 9, (64, 4), generator=torch.Generator().manual_seed(1))
    draws = torch.rand(64, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    verify = torch.full((64,), 4)
    verify[:10] = 2  # near the limit only the first draft counts
    accepted, bonus = _judge_sampled(block, p, p[:, :-1], verify, draws)
    assert accepted.tolist() == [1] * 10 + [3] * 54 and int(bonus.max()) < 9


def test_walk_equals_decoding_cycle_by_cycle(half_trained):
    """Accepted lengths at all anchors by the training step, walked = the real loop. The loop may write B tokens more than
    the text has, so that it drafts whole blocks to the text's end."""
    model, trained, pairs = half_trained
    walks = walk_row(trained.accepted())
    decoder = Decoder(model, trained.drafter, tables_of(model))
    block = trained.drafter.shape.block_size
    generations = decoder.generate([p for p, _ in pairs], NEW + block)
    assert len(walks) == len(pairs)
    for walked, generation in zip(walks, generations, strict=True):
        lengths, left = [], NEW - 1
        for cycle in generation.cycles:
            lengths.append(min(cycle.committed, left))
            left -= lengths[-1]
            if not left:
                break
        assert list(walked.lengths) == lengths
    summary = Walk.summary(walks, block)
    assert summary["acceptance_length"] == pytest.approx(np.mean([np.mean(w.lengths) for w in walks]))
    assert 1.2 < summary["acceptance_length"] < block and summary["responses"] == 24
    assert summary["cycles"] == sum(len(w.lengths) for w in walks)


def test_walk_equals_decoding_at_stop_tokens(half_trained):
    """Answers that end by a stop token: equal with no condition on the limit, which is far away."""
    model, trained, pairs = half_trained
    stops, block = (9, 21, 46), trained.drafter.shape.block_size
    answers = [own_greedy(model, p, NEW, stops) for p, _ in pairs]
    stopped = [(p, a) for (p, _), a in zip(pairs, answers, strict=True) if a[-1] in stops and len(a) > 1]
    assert len(stopped) >= 8
    retraced = Trained(model, random_drafter(trained.drafter.shape), stopped)
    retraced.drafter.load_state_dict(trained.drafter.state_dict())
    walks = walk_row(retraced.accepted())
    generations = Decoder(model, trained.drafter, tables_of(model)).generate(
        [p for p, _ in stopped], NEW + block, stops
    )
    assert [list(w.lengths) for w in walks] == [[c.committed for c in g.cycles] for g in generations]


def test_walk_by_hand():
    accepted = np.array([0, 2, 9, 0, 1, 9, 9])
    assert walk(accepted, 1, 7) == Walk((2, 1), (3, 2))  # 1 -> 4 -> 6: the end
    assert walk(accepted, 2, 6) == Walk((3,), (3,))  # right past the end: cut, no bonus
    assert walk(accepted, 6, 7) == Walk((), ())  # one token: the prefill's
    assert spans(np.array([0, 1, 1, 0, 0, 1])) == [(1, 3), (5, 6)]
    assert spans(np.zeros(4)) == [] and spans(np.ones(3)) == [(0, 3)]
    rows = walk_row({4: 1, 1: 2, 2: 9, 3: 0, 5: 9, 8: 0})
    assert rows == [walk(accepted, 1, 7), Walk((0,), (1,))]
    assert walk_row({}) == []
    summary = Walk.summary([Walk((2, 1), (3, 2)), Walk((0,), (1,)), Walk((), ())], 4)
    assert summary["acceptance_length"] == (2.5 + 1) / 2 and summary["acceptance_length_micro"] == 2.0
    assert summary["acceptance_per_position"] == [2 / 3, 1 / 3, 0.0] and summary["responses"] == 2
    assert Walk.summary([], 4)["acceptance_length"] == 1.0
