"""Hosts that go and come: launchers on this machine stand for hosts."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from draftsmith import launch
from draftsmith.errors import UserError
from draftsmith.options import StopOptions, TrainOptions
from draftsmith.run import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER,
    Owner,
    begin_attempt,
    check_run,
    flatten,
    last_attempt,
    write_json,
)
from draftsmith.train import train
from draftsmith.worker import check_apart, check_corpora, check_recipes
from pipeline import (
    agents_of,
    command,
    ended,
    free_port,
    kill,
    listens,
    losses,
    pids,
    read_until,
    recipe,
    records,
    same_values,
    start,
    until,
    worker_of,
)
from toy import toy_place

STEPS = 3000


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return toy_place(tmp_path_factory.mktemp("hosts"), hidden=32)


def of_one_host(place: Path, trainers: int = 1, **run):
    """On the CPU, since two hosts of one machine would share a GPU, between whose processes NCCL does not add up."""
    settings = {"save_every": 20, "evaluate_every": 10**6, "device": "cpu"} | run
    return recipe(place, 0, trainers, "processes" if trainers == 1 else "threads", steps=STEPS, **settings)


@pytest.fixture(scope="module")
def uncut(place) -> dict[int, float]:
    """The first steps of one host that nothing happens to."""
    assert train(of_one_host(place, stop_after=300), place / "uncut") == EXIT_STOPPED
    return losses(place / "uncut")


def hosts_of(place: Path, name: str, shared: bool, **run) -> tuple[int, list[list[str]]]:
    """A port, and commands for two hosts that meet there and share a run directory or have one each."""
    port = free_port()
    paths = [place / name] * 2 if shared else [place / f"{name}_{host}" for host in range(2)]
    more = ("--unchecked", "--hosts", "1:2", "--rendezvous", f"127.0.0.1:{port}", "--restarts", "2")
    return port, [command(place, path, of_one_host(place, **run), *more) for path in paths]


def start_two(place: Path, run: Path) -> tuple[int, list[subprocess.Popen]]:
    """Two hosts that share a run directory and end when one of them does; the first serves the meeting at the port."""
    port = free_port()
    c = of_one_host(place, save_every=10)
    argv = command(place, run, c, "--unchecked", "--hosts", "2", "--rendezvous", f"127.0.0.1:{port}")
    first = start(argv)
    until(lambda: listens(port))
    return port, [first, start(argv)]


def check_losses(found: dict[int, float], uncut: dict[int, float]) -> None:
    """Two trainers add up in another order than one, and losses are written with six digits."""
    assert len(found) > 100
    for step in found.keys() & uncut.keys():
        assert found[step] == pytest.approx(uncut[step], rel=1e-5 if step <= 100 else 1e-3), step


def test_killed_hosts_end_with_their_workers_and_the_run_goes_on(place):
    """The agent of one host at two moments: before the workers have met, and while they train."""
    run = place / "killed"
    port, (dying, other) = start_two(place, run)
    mine, others = worker_of(dying.pid, 0), worker_of(other.pid, 0)
    kill(dying.pid)
    assert ended([mine], 5)
    rest = other.stderr.read()
    assert other.wait() == EXIT_USER and f"the hosts did not meet at 127.0.0.1:{port}: no connection" in rest, rest
    assert ended([others], 5) and not (run / "config.json").exists()

    _, (other, dying) = start_two(place, run)
    mine = worker_of(dying.pid, 0)
    read_until(other, "saved ")
    kill(dying.pid)
    assert ended([mine], 5)
    rest = other.stderr.read()
    assert other.wait() == EXIT_FAILED, rest
    assert "failed: another worker, perhaps of another host, is gone or silent (exit code 4)" in rest
    assert f"complete checkpoints are untouched; go on with --run {run} --resume" in rest
    assert {row["index"] for row in records(run, "open")} == {0, 1} and ended(list(pids(run).values()))

    both = of_one_host(place, 2, stop_after=30, save_every=10**6)  # bitwise the same as two hosts
    assert train(both, run, resume=True) == EXIT_STOPPED
    assert train(both, place / "killed_uncut") == EXIT_STOPPED
    assert losses(run).keys() == set(range(1, 31)) and same_values(losses(run), losses(place / "killed_uncut"))


def test_a_run_that_another_host_owns_can_be_joined_in_the_background(place, tmp_path, monkeypatch, capsys):
    """With a shared directory; the process behind it is a stand-in, and the other host begins the next attempt."""
    run, c, looks = tmp_path / "run", of_one_host(place), iter(range(1, 9))
    elsewhere = {"pid": 1, "host": "elsewhere", "started": 1}

    def begin(attempt: int) -> None:
        begin_attempt(run, c, attempt, [Owner(**elsewhere)], same_launch=True)
        write_json(run / "running.json", elsewhere)

    class Launched:
        pid = 4321

        def __init__(self, argv, **_):
            self.argv = argv

        def poll(self):
            if next(looks) == 3:
                begin(1)

    begin(0)
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=Launched, DEVNULL=None))
    flags = dict(hosts="1:2", rendezvous="127.0.0.1:29500", unchecked=True, detach=True)
    assert launch.launch(TrainOptions(place / "recipe.toml", run=run, **flags), c) == EXIT_DONE
    assert "as process 4321" in capsys.readouterr().out and next(looks) == 4


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_host_dies_and_the_other_goes_on_without_it(place, uncut):
    port, (first, second) = hosts_of(place, "dies", shared=True, stop_after=150)
    run, staying = place / "dies", start(first, 300)
    until(lambda: listens(port))
    dying = start(second, 300)
    read_until(staying, "step   30/")
    kill(dying.pid)
    said = read_until(staying, "resumed from")
    assert "gone or silent (exit code 4)" in said and "another trainer is gone or silent" in said
    rest = staying.stderr.read()
    assert staying.wait() == EXIT_STOPPED, rest
    assert {r["index"] for r in records(run, "open") if r["attempt"] == 0} == {0, 1}
    assert {r["index"] for r in records(run, "open") if r["attempt"] == 1} == {0}
    check_losses(losses(run), uncut)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shared", [True, False])
def test_a_host_comes_later_and_is_taken_in(place, uncut, shared):
    """The workers stop with a checkpoint, and go on with those of the new host."""
    port, (first, second) = hosts_of(place, f"comes_{shared}", shared)
    run, early = (place / "comes_True" if shared else place / "comes_False_0"), start(first, 300)
    read_until(early, "step   30/")
    late = start(second, 300)
    said = read_until(early, "resumed from")
    assert "failed:" not in said
    resumed = int(said.rpartition("step_")[2])
    assert max(losses(run)) == resumed
    read_until(early, f"step {resumed + 30:4d}/")
    assert launch.stop(StopOptions(run, wait=True)) == EXIT_DONE
    assert early.wait() == EXIT_STOPPED and late.wait() == EXIT_STOPPED
    check_losses(losses(run), uncut)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_killed_agent_of_torchrun(place, uncut):
    run, c = place / "agents", of_one_host(place, stop_after=150)
    first, second = agents_of(place, c, "agents")
    until(lambda: any(row["step"] >= 30 for row in records(run, "step")))
    kill(second.pid)
    first.wait(15)
    assert ended(list(pids(run).values()))
    assert train(c, run, resume=True) == EXIT_STOPPED
    check_losses(losses(run), uncut)


def test_hosts_with_different_recipes_are_refused(place):
    recipes = [flatten(recipe(place, steps=steps).to_dict()) for steps in (5, 5, 6)]
    check_recipes(recipes[:2])
    check_recipes([recipes[0], recipes[1] | {"data.corpus": "/elsewhere"}])
    with pytest.raises(UserError, match="optim.steps is 6 on host 2 and 5 on host 0"):
        check_recipes(recipes)


def test_hosts_with_different_corpora_are_refused():
    check_corpora(["a", "a"])
    with pytest.raises(UserError, match=r"another corpus on host 1 \(identity b\) than on host 0 \(a\); copy one"):
        check_corpora(["a", "b"])


def test_a_run_of_a_host_that_is_gone(tmp_path, place):
    """Its launch goes on with it, anybody else is told to make sure."""
    c = recipe(place)
    begin_attempt(tmp_path, c, 0, [Owner(1, "launcher", 2)])
    assert last_attempt(tmp_path) == (0, [Owner(1, "launcher", 2)])
    write_json(tmp_path / "running.json", {"pid": 7, "host": "gone", "started": 1})
    with pytest.raises(UserError, match="trained by process 7 on gone.*if it is not, delete"):
        check_run(tmp_path, c, resume=True)
    assert check_run(tmp_path, c, resume=True, same_launch=True) == 1


def test_the_kubernetes_example_is_one_service_and_one_job():
    text = (Path(__file__).parents[1] / "docs/operations.md").read_text().partition("### Kubernetes")[2]
    block = "\n".join(line[4:] for line in text.partition("\n## ")[0].splitlines() if line.startswith("    "))
    service, job = yaml.safe_load_all(block)
    pod = job["spec"]["template"]["spec"]
    (words,) = pod["containers"][0]["args"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}:" in words and pod["subdomain"] == "draftsmith"
    flags = re.findall(r" (--[a-z]+)", words.replace("echo --resume", ""))
    assert {flag[2:] for flag in flags} <= {field.name for field in fields(TrainOptions)}


def test_hosts_that_share_a_gpu_are_refused():
    check_apart([(0, None), None, (1, None)])
    check_apart([(0, "a"), None, (0, "b"), (1, "c")])
    with pytest.raises(UserError, match=r"hosts 0 and 1 were given the same GPU \(UUID b\)"):
        check_apart([(0, "a"), (0, "b"), None, (1, "b")])
