"""The chunked loss over a frozen head against autograd on the plain formula, in float64."""

import pytest
import torch

from draftsmith import loss as loss_module
from draftsmith.loss import Head, block_cross_entropy, decay_weights, dpace_weights

A, S, H, V = 9, 3, 16, 31


def case():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(A, S, H, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, H, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, (A, S), generator=generator)
    scored = torch.rand(A, S, generator=generator) < 0.7
    return states, weight, labels, scored


@pytest.mark.parametrize("rows", [3, 7, 2048])
@pytest.mark.parametrize("head", [(1.0, 0.0), (0.25, 5.0)])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_sums_and_gradient_equal_autograd_on_the_plain_formula(monkeypatch, rows, head, alpha):
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", rows)
    states, weight, labels, scored = case()
    scale, cap = head
    logits = states @ weight.T * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(A, S)
    slots = decay_weights(S + 1, 4.0)
    if alpha is None:
        weights, denominator = slots * scored, (slots * scored).sum()
    else:
        weights, denominator = dpace_weights(torch.exp(-plain.detach()), scored, alpha), scored.sum()
    expected = (weights * plain).sum()
    expected.backward()
    got = block_cross_entropy(states.detach(), Head(weight, scale, cap), labels, scored, slots, alpha)
    assert float(got.loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(got.denominator) == pytest.approx(float(denominator), rel=1e-6)
    torch.testing.assert_close(got.gradient, states.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.correct, (logits.argmax(-1) == labels) & scored)


def test_without_a_gradient_the_sums_are_the_same():
    states, weight, labels, scored = case()
    args = (states.detach(), Head(weight), labels, scored, decay_weights(S + 1, 4.0), None)
    a, b = block_cross_entropy(*args), block_cross_entropy(*args, gradient=False)
    assert b.gradient is None and torch.equal(a.loss, b.loss) and torch.equal(a.correct, b.correct)


def test_dpace_weights_by_hand():
    confidence, scored = torch.tensor([[0.5, 0.8, 0.1]]), torch.tensor([[True, False, True]])
    first, last = 0.75, 0.75 * 0.55  # running products of 0.5 q + 0.5 over scored slots
    expected = torch.tensor([[first + last, 0.0, last]])
    torch.testing.assert_close(dpace_weights(confidence, scored, 0.5), expected)


def test_decay_weights_are_the_papers():
    torch.testing.assert_close(decay_weights(16, 7.0)[:3], torch.tensor([1.0, 0.8669, 0.7515]), rtol=1e-4, atol=1e-4)
    assert decay_weights(4, 0.0).tolist() == [1, 1, 1]
