"""The step by the sum law, its optimizer against torch's, and the static buffers."""

import pytest
import torch

from draftsmith.unit import UnitSequence
from test_threads import UNIT, losses, make_step
from toy import block_states, random_corpus


def loaded(step, number: int):
    units = UnitSequence(random_corpus([30, 50, 20, 40, 44, 61], vocab=49), UNIT, seed=3)
    step.static.load(units.unit(number))
    step.static.taps.normal_(generator=torch.Generator().manual_seed(number))
    return units.unit(number)


def test_static_buffers_hold_the_unit_and_never_move():
    step = make_step("eager")
    names = ("ids", "positions", "documents", "anchors", "starts", "labels", "scored")
    places = [getattr(step.static, n).data_ptr() for n in names]
    for number in (0, 1):
        unit = loaded(step, number)
        for name in names:
            assert torch.equal(getattr(step.static, name), torch.from_numpy(getattr(unit, name)))
        assert int(step.static.number) == number
    assert places == [getattr(step.static, n).data_ptr() for n in names]


def test_drafted_slots_equal_the_whole_blocks_forward_and_its_gradients():
    step = make_step("eager")
    loaded(step, 0)
    from draftsmith.step import draft_states

    got = draft_states(step.drafter, step.static, step.tables, step.attention, False)
    whole = block_states(step)[:, 1:]
    torch.testing.assert_close(got, whole)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for states in (got, whole):
        step.flat.reduced.zero_()
        states.backward(grad)
        step.flat.collect()
        results.append(step.flat.gradient.clone())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_casting_a_drafter_leaves_its_rotary_frequencies_alone():
    """In bfloat16 they would turn position 30,000 by other angles altogether."""
    drafter = make_step("eager").drafter
    rope, positions = drafter.rope, torch.tensor([3, 30_000])
    exact, place = rope(positions, torch.float32), rope.inverse_frequencies.data_ptr()
    drafter.to(torch.bfloat16)
    assert drafter.norm.weight.dtype == torch.bfloat16 and rope.inverse_frequencies.data_ptr() == place
    assert all(torch.equal(a, b) for a, b in zip(exact, rope(positions, torch.float32), strict=True))
    drafter.float().to("meta", torch.float16)
    assert rope.inverse_frequencies.dtype == torch.float32 and rope.inverse_frequencies.device.type == "meta"


def test_gradients_add_up_over_units_and_update_leaves_nothing():
    step, parts = make_step("eager"), []
    for number in (0, 1):
        loaded(step, number)
        step.accumulate()
        parts.append(step.flat.reduced.clone())
        step.clear()
        assert not step.flat.reduced.any()
    for number in (0, 1):
        loaded(step, number)
        step.accumulate()
    torch.testing.assert_close(step.flat.reduced, parts[0] + parts[1], rtol=1e-5, atol=1e-6)
    step.update(1e-3)
    assert not step.flat.reduced.any()
    assert float(step.stats[0]) == pytest.approx(float(parts[0][step.flat.total] + parts[1][step.flat.total]))


def test_evaluating_gives_the_loss_that_training_gives_and_leaves_no_trace():
    step = make_step("eager")
    loaded(step, 0)
    lengths, sums = step.evaluate()
    assert not step.flat.reduced.any() and step.replays() is None
    step.accumulate()
    torch.testing.assert_close(sums, step.flat.sums[:2].flip(0))
    assert int(lengths.sum()) == int(step.flat.sums[4])


def test_update_is_torchs_adamw_on_the_mean_gradient_clipped():
    step = make_step("eager")
    loaded(step, 0)
    step.accumulate()
    n, sums = step.flat.matrices, step.flat.sums.clone()
    gradient = step.flat.gradient / (sums[0] * step.constant)
    params = [torch.nn.Parameter(step.flat.masters[at].clone()) for at in (slice(0, n), slice(n, None))]
    for p, g in zip(params, (gradient[:n], gradient[n:]), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, step.optim.clip)
    groups = [{"params": [params[0]], "weight_decay": 0.1}, {"params": [params[1]], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=step.optim.betas, eps=step.optim.eps).step()
    step.update(1e-2)
    torch.testing.assert_close(step.flat.masters, torch.cat([p.detach() for p in params]), rtol=1e-5, atol=1e-6)
    assert step.read().gradient_norm == pytest.approx(float(norm), rel=1e-5)


def test_an_empty_step_and_a_bad_unit_are_skipped_and_counted():
    step = make_step("eager")
    before = step.flat.masters.clone()
    step.update(1e-2)
    loaded(step, 1)
    step.static.taps.fill_(float("nan"))
    step.accumulate()
    step.update(1e-2)
    stats = step.read()
    assert torch.equal(step.flat.masters, before)
    assert (stats.skipped_total, stats.skipped_in_row, stats.bad_unit) == (2, 2, 1)
    assert float(step.adamw.count) == 0


def test_recomputing_layers_changes_nothing():
    plain, again = make_step("eager"), make_step("eager")
    again.checkpoint_activations = True
    assert losses(again, 2) == losses(plain, 2)
