"""Twenty kills at random moments, loading included, of one run: each worker, the launcher, a host's agent."""

import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.run import EXIT_FAILED, EXIT_STOPPED, EXIT_USER
from draftsmith.train import train
from pipeline import (
    command,
    ended,
    free_port,
    kill,
    left_of,
    listens,
    losses,
    recipe,
    records,
    same,
    same_values,
    start,
    until,
    weights,
    worker_of,
)
from toy import toy_place

ENDLESS = {"steps": 10**5, "evaluate_every": 50, "save_every": 7}


class Kills:
    """Kills of processes that train in `run`, at moments that a dice chooses: half of them before the first step."""

    def __init__(self, run: Path):
        self.run, self.said = run, list[str]()
        self._dice = random.Random(0)

    def resume(self) -> list[str]:
        """The run may have been killed before it had begun."""
        return ["--resume"] if (self.run / "config.json").exists() else []

    def shuffled(self, victims: list[int]) -> list[int]:
        return self._dice.sample(victims, len(victims))

    def kill(self, pid: int, name: str) -> None:
        """Called when the workers have just been started."""
        begin, steps = time.monotonic(), self._steps()
        if self._dice.random() < 0.5:
            time.sleep(self._dice.uniform(0, 5))
        else:
            until(lambda: self._steps() > steps)
            time.sleep(self._dice.uniform(0, 2))
        kill(pid)
        self.said.append(f"{name}: after {time.monotonic() - begin:.1f} s and {self._steps() - steps} steps")

    def _steps(self) -> int:
        """How many were taken by all attempts, again or not."""
        return len(records(self.run, "step"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_kills(tmp_path):
    """The run goes on from each kill, in several topologies of two trainers; the losses never differ, bit for bit."""
    place = toy_place(tmp_path, hidden=32)
    kills = Kills(place / "run")
    begin = time.monotonic()
    kill_workers(place, kills, [0, 1, 2] * 4)
    for _ in range(3):
        kill_launcher(place, kills)
    for host in (0, 1, 0, 1):
        kill_host(place, kills, host)
    print(*kills.said, f"{time.monotonic() - begin:.0f} s", sep="\n")
    assert len(kills.said) == 20 and not left_of(kills.run)

    last = max(losses(kills.run)) + 5
    assert train(recipe(place, 2, 2, **ENDLESS, stop_after=last), kills.run, resume=True) == EXIT_STOPPED
    uncut = recipe(place, 0, 2, **ENDLESS | {"save_every": 10**6}, stop_after=last)
    assert train(uncut, place / "uncut") == EXIT_STOPPED
    assert len(losses(kills.run)) == last and same_values(losses(kills.run), losses(place / "uncut"))
    assert same(weights(kills.run, last), weights(place / "uncut", last))


def kill_workers(place: Path, kills: Kills, victims: list[int]) -> None:
    """One host in split 1:2: the launcher starts again after each killed worker, and is killed at last."""
    out = place / "workers.out"  # a pipe that nobody empties would block the run
    argv = command(place, kills.run, recipe(place, 1, 2, "processes", **ENDLESS), "--unchecked", "--restarts", "99")
    launcher = start(argv, 400, stderr=out.open("w"))
    for local in kills.shuffled(victims):
        assert launcher.poll() is None, out.read_text()[-3000:]
        workers = [worker_of(launcher.pid, each) for each in range(3)]
        kills.kill(workers[local], ("target 0", "trainer 0", "trainer 1")[local])
        assert ended(workers, 5), out.read_text()[-3000:]
    workers = [worker_of(launcher.pid, each) for each in range(3)]
    kills.kill(launcher.pid, "launcher")
    assert ended(workers, 5)
    assert out.read_text().count(") failed: SIGKILL, killed") == len(victims), out.read_text()


def kill_launcher(place: Path, kills: Kills) -> None:
    """One host, colocated."""
    argv = command(place, kills.run, recipe(place, 0, 2, "processes", **ENDLESS), "--unchecked", *kills.resume())
    launcher = start(argv, stderr=subprocess.DEVNULL)
    workers = [worker_of(launcher.pid, each) for each in range(2)]
    kills.kill(launcher.pid, "launcher")
    assert ended(workers, 5)


def kill_host(place: Path, kills: Kills, dies: int) -> None:
    """Two colocated hosts. The agent of one is killed; the other one says so and ends."""
    c, port = recipe(place, 0, 1, "processes", **ENDLESS), free_port()
    c = replace(c, topology=replace(c.topology, first_patience=20.0))  # so long a host waits for a dead one
    argv = command(place, kills.run, c, "--unchecked", "--hosts", "2", "--rendezvous", f"127.0.0.1:{port}")
    told = [place / f"{len(kills.said)}_{host}.out" for host in range(2)]
    hosts = [start([*argv, *kills.resume()], stderr=told[0].open("w"))]
    until(lambda: listens(port))  # the first serves the meeting
    hosts.append(start([*argv, *kills.resume()], stderr=told[1].open("w")))
    workers = [worker_of(host.pid, 0) for host in hosts]
    kills.kill(hosts[dies].pid, f"agent of host {dies}")
    assert ended([workers[dies]], 5)
    code, said = hosts[1 - dies].wait(60), told[1 - dies].read_text()
    assert code in (EXIT_FAILED, EXIT_USER) and ended([workers[1 - dies]], 5), said
    ends = ("is gone or silent (exit code 4)", "the hosts did not meet at", f"the meeting at 127.0.0.1:{port} is lost")
    kills.said[-1] += f"; host {1 - dies} ended with {code}: " + ", ".join(words for words in ends if words in said)
    assert any(words in said for words in ends), said
