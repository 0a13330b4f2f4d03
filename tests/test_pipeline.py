"""The same losses in every topology: threads, processes, split, colocated, two hosts; resumed in another one."""

import subprocess
from pathlib import Path

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.run import EXIT_DONE, EXIT_STOPPED
from draftsmith.topology import Place, resolve_topology
from draftsmith.train import train
from pipeline import (
    ROUNDING,
    acceptance,
    agents_of,
    command,
    held_out_losses,
    losses,
    recipe,
    records,
    same,
    same_values,
    weights,
)
from toy import toy_place

STEPS = 6
SHAPES = [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (3, 2), (0, 3)]  # (targets, trainers)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return toy_place(tmp_path_factory.mktemp("pipeline"), hidden=32)


@pytest.fixture(scope="module")
def runs(place) -> dict[tuple[int, int], Path]:
    """Every shape once, its workers as threads of this process."""
    made = {}
    for targets, trainers in SHAPES:
        run = place / f"threads_{targets}_{trainers}"
        assert train(recipe(place, targets, trainers), run) == EXIT_DONE
        made[targets, trainers] = run
    return made


def check_bitwise(a: Path, b: Path, step: int = STEPS) -> None:
    """On GPUs to rounding: each worker's compiler chooses kernels by their speed."""
    assert same_values(losses(a), losses(b)) and len(losses(a)) == step
    assert acceptance(a) == acceptance(b) and same_values(held_out_losses(a), held_out_losses(b))
    assert same(weights(a, step), weights(b, step))


def test_same_number_of_trainers_same_bits(runs):
    for (targets, trainers), run in runs.items():
        check_bitwise(run, runs[0, trainers])
        assert len(acceptance(run)) == 2, (targets, trainers)


def test_across_numbers_of_trainers_to_rounding(runs):
    one = losses(runs[0, 1])
    for run in runs.values():
        for step, loss in losses(run).items():
            assert loss == pytest.approx(one[step], rel=max(1e-6, ROUNDING))
        assert acceptance(run) == acceptance(runs[0, 1])
        assert held_out_losses(run) == pytest.approx(held_out_losses(runs[0, 1]), rel=max(1e-6, ROUNDING))
    assert one[STEPS] < one[1]


def test_waits_of_each_role_are_recorded(runs):
    split = records(runs[2, 2], "step")
    assert all({"trainers_wait_share", "targets_wait_share", "bound_by"} <= row.keys() for row in split)
    assert all("targets_wait_share" not in row for row in records(runs[0, 1], "step"))
    names = {row["name"] for row in records(runs[2, 2], "spans")}
    assert {"prefill", "step", "wait_taps", "wait_slot", "wait_unit", "wait_peers", "evaluate", "checkpoint"} <= names


def run_command(place: Path, name: str, c, *extra: str) -> tuple[Path, subprocess.CompletedProcess]:
    run = place / name
    out = subprocess.run(command(place, run, c, *extra), capture_output=True, text=True, timeout=200, check=False)
    return run, out


@pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="NCCL adds up between devices: two trainer processes need two"
)
def test_processes_equal_threads_bitwise(place, runs):
    run, out = run_command(place, "processes_2_2", recipe(place, 2, 2, "processes"))
    assert out.returncode == EXIT_DONE, out.stderr
    check_bitwise(run, runs[2, 2])
    assert sorted(p.name.split(".")[-2] for p in (run / "logs/attempt_0").glob("*.log")) == [
        "target0", "target1", "trainer0", "trainer1",
    ]  # fmt: skip
    assert not (run / "running.json").exists()


def test_resumed_in_another_topology(place):
    """Ten steps colocated over two trainers, ten more with three targets beside the two: the bits of twenty."""
    whole, parts = place / "whole", place / "parts"
    assert train(recipe(place, 0, 2, steps=20), whole) == EXIT_DONE
    assert train(recipe(place, 0, 2, steps=20, stop_after=10), parts) == EXIT_STOPPED
    assert train(recipe(place, 3, 2, steps=20), parts, resume=True) == EXIT_DONE
    check_bitwise(parts, whole, 20)


def two_hosts(place: Path, c, name: str, shared: bool) -> list[Path]:
    """Run directories of the two hosts, the same one twice if it is shared."""
    for host, process in enumerate(agents_of(place, c, name, shared)):
        assert process.wait(200) == 0, (place / f"{name}_{host}.out").read_text()
    return [place / name if shared else place / f"{name}_{host}" for host in range(2)]


def test_two_agents_as_two_hosts_with_directories_of_their_own(place, runs):
    """On the CPU: NCCL takes no device twice, and both hosts are this machine."""
    paths = two_hosts(place, recipe(place, 0, 1, "processes", device="cpu"), "hosts", shared=False)
    (writer,) = [path for path in paths if records(path, "step")]
    whole = place / "as_one_host"
    assert train(recipe(place, 0, 2, device="cpu"), whole) == EXIT_DONE
    check_bitwise(writer, whole)


@pytest.mark.long
@pytest.mark.parametrize("targets,trainers", [(1, 1), (2, 1), (0, 2), (1, 2), (3, 2), (0, 3)])
def test_every_shape_as_processes(place, runs, targets, trainers):
    run, out = run_command(place, f"p_{targets}_{trainers}", recipe(place, targets, trainers, "processes"))
    assert out.returncode == EXIT_DONE, out.stderr
    check_bitwise(run, runs[targets, trainers])


@pytest.mark.long
def test_two_hosts_with_a_split_each_and_a_shared_directory(place, runs):
    path, _ = two_hosts(place, recipe(place, 1, 1, "processes", device="cpu"), "split_hosts", shared=True)
    whole = place / "as_one_split_host"
    assert train(recipe(place, 0, 2, device="cpu"), whole) == EXIT_DONE
    check_bitwise(path, whole)


def test_refusals_name_the_key(place):
    with pytest.raises(UserError, match="topology.devices.*no CUDA device"):
        c = recipe(place, device="cpu")
        train(type(c)(**{**c.__dict__, "topology": type(c.topology)(devices=(0,))}), place / "refused")
    c = recipe(place, 1, 2, "processes")
    with pytest.raises(UserError, match="NCCL"):
        resolve_topology(c, 1)
    assert resolve_topology(recipe(place, 1, 2), 1).devices == ("cuda:0", "cuda:0", "cuda:0")
    assert not (place / "refused").exists()


def test_places_by_arithmetic(place):
    topology = resolve_topology(recipe(place, 6, 2, "processes"), 8)
    assert topology.devices == tuple(f"cuda:{i}" for i in range(8))
    second = [Place(topology, local, host=1, hosts=2) for local in range(8)]
    assert [p.name for p in second] == [f"target {i}" for i in range(6, 12)] + ["trainer 2", "trainer 3"]
    assert second[6].cell() == (6, 2, 2, 4)
    colocated = resolve_topology(recipe(place, 0, 0, "processes"), 8)
    assert colocated.trainers == 8 and Place(colocated, 3).role == "both"
