"""The step's CUDA kernels and graphs against plain arithmetic. Needs a GPU: `pytest -m gpu tests/test_step_gpu.py`."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith import checkpoint
from draftsmith.attention import BlockAttention, reference_attention
from draftsmith.bench import BenchStepOptions, drafter_shape, make_step, make_units
from draftsmith.loss import Head, block_cross_entropy, decay_weights
from draftsmith.step import TrainStep
from toy import moments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = BenchStepOptions(shape="qwen3-0.6b", tokens=512, doc=128, anchors=32, block=16)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


@pytest.mark.parametrize("kind", ["op", "flex"])
@pytest.mark.parametrize(
    ("tokens", "doc", "anchors", "used", "block", "heads", "kv_heads", "head_dim", "window"),
    [
        (1024, 256, 64, 60, 16, 32, 8, 128, None),
        (1000, 250, 48, 48, 16, 8, 8, 64, None),
        (768, 768, 50, 40, 8, 16, 2, 128, 100),
    ],
)
def test_attention_and_its_gradients(kind, tokens, doc, anchors, used, block, heads, kv_heads, head_dim, window):
    rng = np.random.default_rng(0)
    at = np.full(anchors, tokens - 1)
    at[:used] = np.sort(rng.choice(tokens - 1, used, replace=False))
    at = torch.tensor(at, device="cuda")
    starts = torch.where(torch.arange(anchors, device="cuda") < used, at // doc * doc, at)
    sizes = [(anchors * block, heads)] + [(anchors * block, kv_heads)] * 2 + [(tokens, kv_heads)] * 2
    inputs = [torch.randn(n, h, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for n, h in sizes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(anchors * block, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    shape = replace(
        drafter_shape(BenchStepOptions(block=block)),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, windows=(window,) * 5,
    )  # fmt: skip
    attention = BlockAttention.choose(shape, at.device, torch.bfloat16, True, kind)
    out = attention.over(at, starts, tokens)(0, *inputs)
    out.backward(grad)
    expected = reference_attention(*exact, at, starts, block, window)
    expected.backward(grad.double())
    assert relative(out, expected) < 5e-3
    for x, y in zip(inputs, exact, strict=True):
        assert relative(x.grad, y.grad) < 1e-2


@pytest.mark.parametrize("head", [(1.0, 0.0), (0.5, 20.0)])
def test_loss_kernel(head):
    states = torch.randn(20, 7, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5003, 256, device="cuda", dtype=torch.bfloat16)
    labels, scored = torch.randint(0, 5003, (20, 7), device="cuda"), torch.rand(20, 7, device="cuda") < 0.8
    labels[3] = (states[3] @ weight.T).argmax(-1)
    args = (labels, scored, decay_weights(8, 4.0, "cuda"))
    got = block_cross_entropy(states, Head(weight, *head), *args, None)
    plain = block_cross_entropy(states.cpu().float(), Head(weight.cpu().float(), *head), *(x.cpu() for x in args), None)
    assert float(got.loss) == pytest.approx(float(plain.loss), rel=1e-3)
    assert relative(got.gradient, plain.gradient) < 3e-2  # the logits are rounded to bf16
    assert torch.equal(got.correct[3], scored[3])


def first_gradients(step: TrainStep, unit, taps: torch.Tensor) -> tuple[float, torch.Tensor]:
    step.static.load(unit)
    step.static.taps.copy_(taps)
    step.accumulate()
    sums = step.flat.sums.tolist()
    return sums[1] / sums[0], step.flat.gradient.clone()


@pytest.mark.parametrize("weighting", ["decay"])
def test_graph_in_bf16_is_close_to_the_cpu_in_float32(weighting):
    shape, units = make_units(SMALL, 1)
    graph = make_step(replace(SMALL, mode="graph"), shape, torch.device("cuda"))
    plain = make_step(replace(SMALL, mode="eager"), shape, torch.device("cpu"))
    plain.flat.masters.copy_(graph.flat.masters)
    plain.tables.embedding.copy_(graph.tables.embedding)
    plain.tables.head.weight.copy_(graph.tables.head.weight)
    taps = graph.static.taps.clone()
    loss, gradient = first_gradients(graph, units[0], taps)
    expected_loss, expected = first_gradients(plain, units[0], taps)
    assert loss == pytest.approx(expected_loss, rel=5e-3)
    names = graph.flat.named(gradient)
    for name, value in plain.flat.named(expected).items():
        assert relative(names[name], value) < 5e-2, name


def losses(step: TrainStep, units, steps: int = 6) -> list[float]:
    """Of `steps` optimizer steps of two units."""
    out = []
    for i in range(steps):
        for j in range(2):
            step.static.load(units[(2 * i + j) % len(units)])
            step.accumulate()
        step.update(1e-3)
        out.append(step.read().loss)
    return out


def test_modes_agree_and_accumulate():
    shape, units = make_units(SMALL, 4)
    steps = {m: make_step(replace(SMALL, mode=m), shape, torch.device("cuda")) for m in ("eager", "graph", "compile")}
    runs = {m: losses(step, units) for m, step in steps.items()}
    assert [steps[m].replays() for m in ("eager", "graph", "compile")] == [None, 6 * 3, None]
    assert runs["graph"] == pytest.approx(runs["eager"], rel=2e-2)
    assert runs["graph"] == pytest.approx(runs["compile"], rel=2e-3)
    assert runs["graph"][-1] < runs["graph"][0]


def test_reduce_overhead_in_the_main_thread():
    shape, units = make_units(SMALL, 4)
    device = torch.device("cuda")
    expected = losses(make_step(replace(SMALL, mode="compile"), shape, device), units)
    assert losses(make_step(replace(SMALL, mode="reduce-overhead"), shape, device), units) == pytest.approx(
        expected, rel=2e-3
    )


def test_two_threads_on_one_gpu_give_one_threads_losses():
    shape, units = make_units(SMALL, 4)
    device = torch.device("cuda")
    expected = losses(make_step(replace(SMALL, mode="graph"), shape, device), units)
    results: dict[int, list[float]] = {}
    steps = [make_step(replace(SMALL, mode="graph"), shape, device) for _ in range(2)]
    torch.cuda.synchronize()
    ready = threading.Barrier(2)

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            steps[i].prepare()
            ready.wait(120)
            results[i] = losses(steps[i], units)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {0: expected, 1: expected}


def test_a_checkpoint_holds_the_state_of_its_moment(tmp_path):
    """The steps that follow are queued at once, while the state is still being copied."""
    shape, units = make_units(SMALL, 4)
    step, other = (make_step(replace(SMALL, mode="graph"), shape, torch.device("cuda")) for _ in range(2))
    losses(step, units)
    writer = checkpoint.Writer(tmp_path, 1, step)
    for number in (4, 8):
        expected = step.flat.masters.clone(), *moments(step)
        writer.start(number, {})
        losses(step, units)
        written = writer.finish()
        checkpoint.restore(checkpoint.read_checkpoint(written.path), other)
        for a, b in zip((other.flat.masters, *moments(other)), expected, strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(step.flat.masters, expected[0])
    writer.close()
