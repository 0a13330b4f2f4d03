"""doctor: a healthy recipe passes in its topology, and every injected fault makes its own line fail and names the cause.

Faults are put into the objects that a real set-up has made: the step or the target gets a faulty subclass.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith import config
from draftsmith.__main__ import main
from draftsmith.doctor import budgets, finish, order_of, quick, shortened
from draftsmith.doctor_checks import check_compilations
from draftsmith.doctor_checks_device import (
    check_allocator,
    check_growth,
    check_mode,
    check_peak,
    check_peers,
    check_replay,
    check_space,
)
from draftsmith.doctor_probe import CompileWatch, Growth, Launches
from draftsmith.doctor_run import Findings, Order, examine
from draftsmith.doctor_verdict import Verdict, failed, merge, passed, render
from draftsmith.errors import UserError
from draftsmith.events import EventLog
from draftsmith.host import Meeting, Notes, Worker
from draftsmith.job import open_job, topology_of
from draftsmith.loop import Loader, StopRequest
from draftsmith.run import open_run
from draftsmith.step import TrainStep
from draftsmith.step_modes import COMPILE_LOCK
from draftsmith.target import Target
from draftsmith.team import Team
from draftsmith.topology import Place, Topology
from draftsmith.train import set_up
from toy import toy_place

SMALL = ["--unit.tokens", "256", "--unit.anchors", "8", "--drafter.layers", "1", "--run.threads", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with target/, corpus/ and recipe.toml."""
    return toy_place(tmp_path_factory.mktemp("doctor"))


def recipe(place: Path) -> config.Config:
    c = config.load(place / "recipe.toml")
    return replace(
        c,
        unit=replace(c.unit, tokens=256, anchors=8),
        drafter=replace(c.drafter, layers=1),
        run=replace(c.run, threads=1),
    )


def examined(place: Path, run: Path, step: type | None = None, target: type | None = None) -> dict[str, Verdict]:
    """Verdicts of one colocated trainer on the CPU whose step and target are of these classes."""
    c = recipe(place)
    c = replace(c, run=replace(c.run, device="cpu"))
    topology = topology_of(c)
    job = open_job(shortened(c, topology))
    worker = Worker(
        job,
        open_run(run, job.config, False),
        Place(topology),
        StopRequest(),
        Notes(None, None),
        Team(1).member(0),
        None,
        False,
        Meeting(1, 60.0, forbids=False),
    )
    findings = Findings("both 0")
    with CompileWatch() as watch, EventLog(run, "both", 0) as events:
        shop = set_up(worker, events)
        shop.step.__class__ = step or TrainStep
        shop.target.__class__ = target or Target
        try:
            with Loader(shop.units.unit, shop.plan.all_units()) as loader:
                examine(shop, loader, watch, time.monotonic(), 0, findings)
        finally:
            shop.writer.close()
    return {v.name: v for v in findings.verdicts}


def test_a_healthy_trainer_fails_nothing(place, tmp_path):
    verdicts = examined(place, tmp_path / "run")
    assert [v for v in verdicts.values() if v.failed] == []
    assert {name for name, v in verdicts.items() if v.state == "not checked"} == {
        "compiled once", "compile lock", "graph replay", "links",
    }  # fmt: skip
    assert verdicts["input pointers"].figure.endswith("20 units")


class ItemInStep(TrainStep):
    def accumulate(self) -> None:
        super().accumulate()
        self.static.taps[0, 0].item()


class ReplacesBuffer(TrainStep):
    def accumulate(self) -> None:
        self.static.ids = self.static.ids.clone()
        super().accumulate()


class IgnoresTaps(TrainStep):
    def accumulate(self) -> None:
        kept = self.static.taps.clone()
        self.static.taps.zero_()
        super().accumulate()
        self.static.taps.copy_(kept)


class ScalesGradients(TrainStep):
    def accumulate(self) -> None:
        before = self.flat.gradient.clone()
        super().accumulate()
        self.flat.gradient.sub_(before).mul_(1.01).add_(before)


class FlipsASign(TrainStep):
    def accumulate(self) -> None:
        one = self.flat.named(self.flat.gradient)["layers.0.o_proj.weight"]
        before = one.clone()
        super().accumulate()
        one.sub_(before).neg_().add_(before)


class Grows(TrainStep):
    def accumulate(self) -> None:
        super().accumulate()
        self.__dict__.setdefault("history", []).append(self.static.ids.float())


class GrowsALittle(TrainStep):
    def accumulate(self) -> None:
        super().accumulate()
        self.__dict__.setdefault("history", []).append(self.static.taps[0, 0].clone())


class LeaksNeighbours(TrainStep):
    def accumulate(self) -> None:
        kept = self.static.starts.clone()
        self.static.starts.zero_()
        super().accumulate()
        self.static.starts.copy_(kept)


class Remembers(TrainStep):
    def clear(self) -> None:
        super().clear()
        self.flat.gradient.add_(self.__dict__.setdefault("left", torch.zeros_like(self.flat.gradient)))

    def accumulate(self) -> None:
        super().accumulate()
        self.__dict__["left"] = self.flat.gradient.clone()


class NotANumberEverySecondTime(TrainStep):
    def accumulate(self) -> None:
        super().accumulate()
        times = self.__dict__["times"] = self.__dict__.get("times", 0) + 1
        if times % 2:
            self.flat.named(self.flat.gradient)["norm.weight"][0] = torch.nan


@torch.compile(backend="eager", dynamic=False)
def total(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum()


class ShapeFromData(TrainStep):
    def accumulate(self) -> None:
        with COMPILE_LOCK:
            total(self.static.taps[: 8 + int(self.static.number)])
        super().accumulate()


@pytest.mark.parametrize(
    ("fault", "line", "cause"),
    [
        (ItemInStep, "host syncs", r"test_doctor.py:\d+"),
        (ShapeFromData, "compiled once", "test_doctor.py"),
        (ReplacesBuffer, "input pointers", "input ids: a new tensor took the place"),
        (IgnoresTaps, "stale inputs", "does not see its taps"),
        (ScalesGradients, "gradients against eager", "all gradients are off, scales 1.0100 to 1.0100"),
        (FlipsASign, "gradients against eager", "layers.0.o_proj.weight points another way: cosine -1.000"),
        (Grows, "memory growth", "1024 bytes more are in use after every unit"),
        (GrowsALittle, "memory growth", "^4 bytes more are in use after every unit"),
        (LeaksNeighbours, "packed document, step", "a neighbour leaks into the document"),
        (Remembers, "repeatable", "keeps something from one unit to the next"),
        (NotANumberEverySecondTime, "repeatable", "keeps something from one unit to the next"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_a_fault_of_the_step_fails_its_line_and_names_the_cause(place, tmp_path, fault, line, cause):
    verdict = examined(place, tmp_path / "run", step=fault)[line]
    assert verdict.failed and verdict.remedy, verdict
    assert re.search(cause, verdict.cause), verdict.cause


class LeakyTarget(Target):
    def prefill(self, ids, positions, documents, out) -> None:
        super().prefill(ids, positions, torch.zeros_like(documents), out)


class OneLayerOff(Target):
    def forward(self, ids, positions) -> tuple[torch.Tensor, ...]:
        below = self.__dict__.setdefault("below", self.decoder)
        states = below(input_ids=ids, position_ids=positions, use_cache=False, output_hidden_states=True).hidden_states
        self._outputs.clear()
        return tuple(states[index][0] for index in self.taps)  # hidden_states[L + 1] is tap L


@pytest.mark.parametrize(
    ("fault", "line", "cause"),
    [
        (LeakyTarget, "packed document, taps", "a neighbour leaks into the document"),
        (OneLayerOff, "taps", "tap 1 is layer 0's output"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_a_fault_of_the_target_fails_its_line_and_names_the_cause(place, tmp_path, fault, line, cause):
    verdict = examined(place, tmp_path / "run", target=fault)[line]
    assert verdict.failed and cause in verdict.cause and verdict.remedy


def test_a_thread_that_compiles_without_the_lock_is_named():
    def compile_in(name: str, around: Callable[[], AbstractContextManager]) -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def work() -> None:
            with around():
                torch.compile(double, backend="eager", dynamic=False)(torch.ones(3))

        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()

    with CompileWatch() as watch:
        compile_in("trainer 0", lambda: COMPILE_LOCK)
        good = list(watch.seen)
        torch._dynamo.reset_code_caches()
        compile_in("trainer 1", nullcontext)
    once, lock = check_compilations(good, [], 20, "compile", [])
    assert once.state == lock.state == "pass"
    _, lock = check_compilations(watch.seen, [], 20, "compile", [])
    assert lock.failed and "thread trainer 1 compiled at test_doctor.py" in lock.cause


def test_compilation_lines_without_a_compiler():
    assert all(v.state == "not checked" for v in check_compilations([], [], 20, "eager", []))
    once, _ = check_compilations([], [], 20, "compile", [])
    assert once.failed and "nothing was compiled" in once.cause


def test_lines_that_a_cpu_cannot_show_are_judged_by_their_counts(tmp_path):
    """The figures come from a GPU; what is made of them is arithmetic."""
    assert check_replay("graph", Launches(4, 3), 3, 1).state == "pass"
    for launches in (Launches(3, 3), Launches(4, 400)):
        verdict = check_replay("graph", launches, 3, 1)
        assert verdict.failed and "4 graph launches" in verdict.cause
    assert check_replay("compile", None, 3, 1).state == "not checked"
    split, colocated = Topology(1, 1, False, ("cuda:0", "cuda:0")), Topology(0, 1, False, ("cuda:0",))
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    bad = check_allocator(split, "auto", expandable)
    assert bad.failed and "unset PYTORCH_CUDA_ALLOC_CONF" in bad.remedy
    assert not check_allocator(colocated, "auto", expandable).failed
    assert not check_allocator(split, "pinned", expandable).failed
    assert check_space(tmp_path / "runs" / "a", 1 << 60, 4).failed
    growth = check_growth([500, 900], 5, 20)
    assert growth.failed and "100 bytes more" in growth.cause
    assert not check_growth([1 << 20, 0], 5, 20).failed  # made once
    assert check_peak("peak memory", Place(Topology(0, 1, False, ("cpu",))), 1 << 60, 0).failed
    mode, settings = check_mode("compile", True, {"_dynamo.config.recompile_limit": "77"})
    assert mode.state == "pass" and settings.failed and "recompile_limit" in settings.cause
    assert not any(v.failed for v in check_mode("compile", False, {"_dynamo.config.recompile_limit": "77"}))


def test_gpus_without_peer_access_are_told_of_and_train(monkeypatch):
    """Taps go through pinned memory by themselves there, so no memory is exported either."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    told = {
        Topology(1, 1, False, ("cuda:0", "cuda:1")): "taps go through host memory",
        Topology(0, 2, False, ("cuda:0", "cuda:1")): "gradients go through host memory",
        Topology(1, 2, True, ("cuda:0", "cuda:1", "cuda:2")): "taps and gradients go through host memory",
    }
    for topology, words in told.items():
        verdict = check_peers(topology)
        assert verdict.state == "pass" and words in verdict.figure, verdict
        assert not check_allocator(topology, "auto", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).failed
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert check_peers(Topology(0, 2, False, ("cuda:0", "cuda:1"))).figure == "2 of 2 pairs of devices"


def test_checkpoints_that_lie_there_need_no_more_room(tmp_path, monkeypatch):
    """A run that was killed while it wrote, on a disk of just the size that plan asks for, may go on."""
    for name, count in (("step_2", 1000), ("step_4", 1000), (".step_6.1234.tmp", 600)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(bytes(count))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=400))
    assert not check_space(tmp_path, 1000, 3).failed
    assert check_space(tmp_path, 1000, 4).failed and check_space(tmp_path / "other", 1000, 1).failed


def test_settings_of_the_doctor_itself_are_no_difference_in_a_worker_thread(place):
    c = recipe(place)
    topology = topology_of(c)
    settings = order_of(budgets(open_job(c), topology), topology).settings
    with CompileWatch():
        verdicts = check_mode("compile", True, settings)
    assert not any(v.failed for v in verdicts), verdicts


@pytest.mark.parametrize("leaks", [True, False])
def test_growth_is_what_stays_not_what_others_have_in_flight(leaks):
    """Other threads' tensors are there at every mark, of another size each time, and gone some units later."""
    growth, kept, flight = Growth(torch.device("cpu"), alone=False), [], [torch.ones(1000)] * 4
    for unit in range(20):
        if unit in (0, 5, 10):
            growth.mark()
        flight = [*flight[1:], torch.ones(1 << unit)]
        if leaks:
            kept.append(torch.ones(3)[1])  # a view of 12 bytes
    assert growth.left() == ([60, 60] if leaks else [0, 0])


def test_the_peak_of_threads_on_one_device_is_compared_with_the_sum_of_their_predictions():
    order = Order({"target": 30 << 30, "trainer": 20 << 30}, 0, {})
    together = Place(Topology(1, 2, True, ("cuda:0", "cuda:0", "cuda:1")))
    assert [p.name for p in together.sharers] == ["target 0", "trainer 0"]
    assert order.peak(together) == 50 << 30
    assert order.peak(replace(together, local=2)) == 20 << 30
    processes = Topology(1, 1, False, ("cuda:0", "cuda:0"))
    assert [order.peak(Place(processes, i)) >> 30 for i in range(2)] == [30, 20]
    on_cpu = Place(Topology(1, 2, True, ("cpu",) * 3), 1)
    order = Order({"target": 3 << 20, "trainer": 2 << 20}, 1 << 20, {})
    assert order.peak(on_cpu) == 8 << 20
    figure = check_peak("peak memory", on_cpu, 16 << 20, order.peak(on_cpu)).figure
    assert figure.startswith("16.0 MiB (the process of target 0 + trainer 0 + trainer 1, threads on cpu) of ")
    assert figure.endswith("; 2.00 of what plan predicts for them together")


def test_lines_of_several_workers_are_merged_where_they_agree():
    same = [passed("mode", "eager"), passed("peak", "1 GiB")]
    other = [passed("mode", "eager"), failed("peak", "9 GiB", "too much", "buy more")]
    lines = merge([("trainer 0", same), ("trainer 1", other)])
    assert [(v.name, v.worker) for v in lines] == [
        ("mode", "trainer 0, trainer 1"), ("peak", "trainer 0"), ("peak", "trainer 1"),
    ]  # fmt: skip
    text = render(lines)
    assert "FAIL peak" in text and "why: too much" in text and "do:  buy more" in text
    assert text.endswith("2 passed, 1 failed, 0 not checked here")


def test_exit_code_and_the_file_in_the_run_directory(tmp_path, capsys):
    assert finish([passed("mode", "eager")], {"both 0": {"step_seconds": 0.1}}, tmp_path / "good", False) == 0
    assert finish([failed("mode", "x", "why", "what")], {}, tmp_path / "bad", True) == 1
    written = json.loads((tmp_path / "good" / "doctor.json").read_text())
    assert written["figures"]["both 0"]["step_seconds"] == 0.1 and written["verdicts"][0]["state"] == "pass"
    out = capsys.readouterr().out
    assert "1 passed, 0 failed, 0 not checked here: go" in out and '"state": "fail"' in out


def test_the_quick_half_starts_no_worker(place, tmp_path):
    verdicts = quick(recipe(place), tmp_path / "run")
    names = [v.name for v in verdicts]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert {"layer ids", "mask token", "chat template", "allocator settings", "disk space", f"memory, {device}"} <= {
        *names
    }
    assert not any(v.failed for v in verdicts) and not (tmp_path / "run").exists()


def test_a_mask_token_that_the_corpus_holds_is_refused(place, tmp_path):
    """Free as far as tokenizer and template go, and yet in a text."""
    shutil.copytree(place / "corpus", tmp_path / "corpus")
    file = tmp_path / "corpus" / "held_out" / "tokens.bin"
    tokens = np.fromfile(file, "<i4")
    tokens[[3, 5]] = 260
    tokens.tofile(file)
    c = recipe(place)
    c = replace(c, data=replace(c.data, corpus=str(tmp_path / "corpus")))
    (verdict,) = (v for v in quick(c, tmp_path / "run") if v.name == "mask token")
    assert verdict.failed and "; 2 of the corpus's" in verdict.figure and verdict.cause == "texts of the corpus hold it"
    with pytest.raises(UserError, match="258 is .*(stop token|eos)"):
        open_job(replace(c, target=replace(c.target, mask_token=258)))


def doctor(place: Path, run: Path, *words: str) -> tuple[int, list[dict]]:
    """The command itself: exit code and the lines that it leaves in the run directory."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(place / "recipe.toml"), "--run", str(run), *SMALL, *words])
    return end.value.code, json.loads((run / "doctor.json").read_text())["verdicts"]


def passes(place: Path, run: Path, workers: set[str], *words: str) -> list[dict]:
    code, lines = doctor(place, run, *words)
    assert code == 0, [line for line in lines if line["state"] == "fail"]
    seen = {name for line in lines for name in line["worker"].split(", ") if name}
    assert seen == workers
    assert [p.name for p in run.parent.glob(".*doctor*")] == []
    return lines


def test_threads_pass_and_a_run_may_begin_in_the_directory_afterwards(place, tmp_path, capsys):
    words = ["--topology.targets", "1", "--topology.trainers", "2", "--topology.workers", "threads"]
    lines = passes(place, tmp_path / "run", {"target 0", "trainer 0", "trainer 1"}, *words)
    assert any(line["name"] == "link, all-reduce" for line in lines)
    peaks = {line["name"]: line for line in lines if line["name"].startswith("peak")}
    assert peaks["peak memory"]["figure"].endswith("for them together")
    assert peaks["peak memory, target"]["state"] == "not checked"
    assert "0 failed" in capsys.readouterr().out
    open_run(tmp_path / "run", recipe(place), False)


def test_split_processes_pass(place, tmp_path):
    words = ["--topology.targets", "1", "--topology.trainers", "1"]
    lines = passes(place, tmp_path / "run", {"target 0", "trainer 0"}, *words)
    by_name = {line["name"]: line for line in lines}
    assert by_name["taps"]["worker"] == "target 0" and by_name["link, taps"]["state"] == "pass"


@pytest.mark.long
@pytest.mark.parametrize(
    ("targets", "trainers", "workers"), [(0, 2, "processes"), (2, 2, "processes"), (0, 2, "threads"), (3, 2, "threads")]
)
def test_every_topology_passes(place, tmp_path, targets, trainers, workers):
    role = "trainer" if targets else "both"
    names = {f"target {i}" for i in range(targets)} | {f"{role} {i}" for i in range(trainers)}
    words = ["--topology.targets", str(targets), "--topology.trainers", str(trainers), "--topology.workers", workers]
    passes(place, tmp_path / "run", names, *words)


@pytest.mark.long
@pytest.mark.parametrize("workers", ["processes", "threads"])
def test_mode_compile_passes_with_its_compiler(place, tmp_path, workers):
    words = ["--run.mode", "compile", "--topology.trainers", "2", "--topology.workers", workers]
    lines = passes(place, tmp_path / "run", {"both 0", "both 1"}, *words)
    by_name = {line["name"]: line for line in lines}
    assert by_name["compiled once"]["state"] == by_name["compile lock"]["state"] == "pass"


def test_train_refuses_what_the_quick_half_finds(place, tmp_path, capsys):
    words = ["train", str(place / "recipe.toml"), "--run", str(tmp_path / "run"), "--run.keep_last", "1000000000"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and not (tmp_path / "run").exists()
    assert "(--unchecked trains all the same)" in capsys.readouterr().err


@pytest.mark.long
def test_train_takes_the_topology_that_plan_ranks_first(place, tmp_path):
    words = ["train", str(place / "recipe.toml"), "--run", str(tmp_path / "run"), "--topology", "auto"]
    with pytest.raises(SystemExit) as end:
        main([*words, *SMALL, "--optim.steps", "2"])
    assert end.value.code == 0
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["topology"]
    assert (resolved["targets"], resolved["trainers"]) == (0, 1)
