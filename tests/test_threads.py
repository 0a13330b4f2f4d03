"""Compiled steps in several threads, and what a mode refuses, in which thread; a toy step for this and for test_step.py."""

import threading

import pytest
import torch

from draftsmith import step_modes
from draftsmith.config import LossConfig, OptimConfig
from draftsmith.drafters.dflash import DFlash, DFlashShape, init_random
from draftsmith.errors import UserError
from draftsmith.host import Meeting
from draftsmith.loss import Head
from draftsmith.mailbox import PeerLost
from draftsmith.step import Tables, TrainStep
from draftsmith.step_modes import COMPILE_LOCK
from draftsmith.target_run import FixedShape
from draftsmith.team import Barrier
from draftsmith.unit import UnitSequence, UnitShape
from toy import random_corpus

UNIT = UnitShape(96, 12, 4, 0.5)


def make_step(mode: str, seed: int = 0) -> TrainStep:
    shape = DFlashShape(
        hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=1, vocab_size=50,
        block_size=4, mask_token=49, taps=(1,), num_target_layers=6, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=512, windows=(None,),
    )  # fmt: skip
    drafter = DFlash(shape)
    init_random(drafter, seed, std=0.1)
    generator = torch.Generator().manual_seed(1)
    tables = Tables(torch.randn(50, 16, generator=generator), 1.0, Head(torch.randn(50, 16, generator=generator)))
    optim = OptimConfig(weight_decay=0.1)
    return TrainStep(drafter, tables, UNIT, LossConfig(), optim, torch.float32, torch.device("cpu"), mode=mode)


def losses(step: TrainStep, count: int = 4) -> list[float]:
    units = UnitSequence(random_corpus([30, 50, 20, 40, 44, 61], vocab=49), UNIT, seed=3)
    out = []
    for i in range(count):
        for u in (2 * i, 2 * i + 1):
            step.static.load(units.unit(u))
            step.static.taps.normal_(generator=torch.Generator().manual_seed(u))
            step.accumulate()
        step.update(1e-2)
        out.append(step.read().loss)
    return out


def test_reduce_overhead_in_a_worker_thread_is_refused_where_torch_cannot(monkeypatch):
    caught = []

    def work() -> None:
        try:
            step_modes.resolve_mode("reduce-overhead", torch.device("cuda"))
        except UserError as error:
            caught.append(str(error))

    for version, refused in (("2.11.0+cu130", 1), ("2.13.0", 1)):
        monkeypatch.setattr(torch, "__version__", version)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(caught) == refused
    assert "graph" in caught[0] and "2.13" in caught[0]


def test_graph_on_the_cpu_is_refused():
    with pytest.raises(UserError, match="CUDA"):
        step_modes.resolve_mode("graph", torch.device("cpu"))
    assert step_modes.resolve_mode("auto", torch.device("cpu")) == "eager"


def train_in_threads(workers: list[tuple[str, int]]) -> list[list[float]]:
    """Losses of one trainer a (mode, seed): each builds, compiles and trains in a thread of its own, all at once."""
    meeting = Meeting(len(workers), 300.0)
    found: dict[int, list[float]] = {}

    def work(index: int, mode: str, seed: int) -> None:
        with COMPILE_LOCK:
            step = make_step(mode, seed)
            step.prepare()
        meeting.wait()
        found[index] = losses(step)

    threads = [threading.Thread(target=work, args=(i, *one)) for i, one in enumerate(workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        step_modes.allow_recompiles()
    return [found.get(i, []) for i in range(len(workers))]


def check_threads(rounds: int) -> None:
    torch._dynamo.reset()
    alone = [losses(make_step("compile", seed)) for seed in (0, 1)]
    assert alone[0] != alone[1]
    for _ in range(rounds):
        torch._dynamo.reset()  # each round compiles anew
        assert train_in_threads([("compile", 0), ("compile", 1)]) == alone


def test_two_threads_compile_and_train_at_once():
    check_threads(rounds=2)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_threads_compile_and_train_at_once_many_times():
    check_threads(rounds=40)


def test_a_recompile_after_the_meeting_is_an_error():
    step = make_step("compile")
    step.prepare()
    Meeting(1, 1.0).wait()
    try:
        losses(step, 1)
        step.checkpoint_activations = True  # a guard of the compiled function
        with pytest.raises(RuntimeError, match="[Rr]ecompile"):
            step.accumulate()
    finally:
        step_modes.allow_recompiles()


class Scaled:
    def __init__(self, factor: int):
        self.factor = factor

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ids[0] * self.factor,)


def test_a_function_may_have_more_variants_than_the_compiler_allows_by_itself():
    """Each worker thread and each run of a process has one; torch gives up after 8."""
    ids = torch.arange(8)
    for factor in range(10):
        run = FixedShape(Scaled(factor).forward, 8, "compile", torch.device("cpu"))
        assert run.mode == "compile" and not run.notes
        assert torch.equal(run(ids, ids)[0], ids * factor)


def test_an_abort_takes_no_meeting_back():
    """threading.Barrier breaks those, too, who were let through but have not woken yet: a last record was lost so."""
    for _ in range(300):
        barrier, done = Barrier(3, 30.0), []

        def work(barrier: Barrier = barrier, done: list = done) -> None:
            barrier.wait()
            barrier.wait()
            barrier.abort()  # whoever wakes first
            done.append(1)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 3
        with pytest.raises(PeerLost):
            barrier.wait()


def test_a_barrier_is_aborted_by_a_failure_and_by_silence():
    for seconds, fails in ((30.0, True), (0.2, False)):
        barrier, caught = Barrier(3, seconds), []

        def work(barrier: Barrier = barrier, caught: list = caught) -> None:
            try:
                barrier.wait()
            except PeerLost as error:
                caught.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        if fails:
            barrier.abort()
        for thread in threads:
            thread.join(10.0)
        assert caught == ["another worker thread is gone or silent"] * 2
