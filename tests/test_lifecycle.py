"""Stops, kills and restarts of real worker processes; checkpoints in the background."""

import errno
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from draftsmith import checkpoint, failure, launch
from draftsmith.errors import UserError
from draftsmith.history import read_run
from draftsmith.loop import StopRequest
from draftsmith.mailbox import TargetEnd
from draftsmith.options import StopOptions
from draftsmith.run import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_USER,
    check_run,
    open_run,
    read_owner,
    write_json,
)
from draftsmith.train import train
from draftsmith.worker import ErrorFile
from pipeline import (
    command,
    ended,
    in_a_terminal,
    kill,
    left_of,
    losses,
    pids,
    read_until,
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

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"

STEPS = 120
SPARSE = {"steps": STEPS, "evaluate_every": 50}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return toy_place(tmp_path_factory.mktemp("lifecycle"), hidden=32)


@pytest.fixture(scope="module")
def uncut(place) -> Path:
    """The run that nothing happens to, of one trainer."""
    assert train(recipe(place, 1, 1, **SPARSE), place / "uncut") == EXIT_DONE
    return place / "uncut"


@pytest.mark.parametrize("targets", [0, pytest.param(1, marks=pytest.mark.long)], ids=["colocated", "split"])
def test_a_terminal_shows_a_bar_with_the_time_left_and_gets_its_cursor_back(place, targets):
    run = place / f"terminal_{targets}"
    c = recipe(place, targets, 1, "processes", steps=40, stop_after=30, evaluate_every=0)
    code, text = in_a_terminal([*command(place, run, c), "--unchecked"])
    assert code == EXIT_STOPPED, text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert all(f"step {step:>2}/40  loss" in plain for step in range(1, 31)), "every log step stays on the screen"
    assert re.search(r"train [━╸╺]+ \d+ of 40 steps \d:\d\d:\d\d", plain) and re.search(r"\d s left", plain)
    assert ("load the target" in plain) == (targets == 0), "a target that is another process has a log of its own"
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > 0, "the cursor was hidden and is back"


def split(place: Path, **run):
    return recipe(place, 1, 1, "processes", **SPARSE | {"save_every": 5} | run)


def check_as_uncut(run: Path, uncut: Path) -> None:
    assert same_values(losses(run), losses(uncut))
    assert same(weights(run, STEPS), weights(uncut, STEPS))


def check_nothing_left(run: Path, attempts: int) -> None:
    numbers = [pid for attempt in range(attempts) for pid in pids(run, attempt).values()]
    assert len(numbers) >= attempts and ended(numbers)
    assert not list((run / "checkpoints").glob(".*.tmp"))
    until(lambda: not left_of(run), 10)
    for pid in numbers:
        assert not [*Path("/dev/shm").glob(f"*_{pid}_*"), *Path(tempfile.gettempdir()).glob(f"draftsmith-{pid}-*")]


def test_killed_workers_are_named_and_restarts_give_the_uncut_losses(place, uncut):
    """Each worker at two moments: before the workers have met, and while they train."""
    run = place / "killed"
    process = start(command(place, run, split(place), "--unchecked", "--restarts", "4"))
    for local, name in enumerate(("target 0", "trainer 0")):
        pid = worker_of(process.pid, local)
        kill(pid)
        assert f"{name} (process {pid}, attempt 0) failed: SIGKILL, killed" in read_until(process, "starting again")
    for attempt, victim, step in ((0, "target0", "  8"), (1, "trainer0", " 20")):
        said = read_until(process, f"step {step}/")
        numbers = pids(run, attempt)
        log = f"{run}/logs/attempt_{attempt}/{platform.node().split('.')[0]}.target0.log"
        assert said.count(f"target 0 loads on {DEVICE}; its lines: {log}\n") == 1
        kill(numbers[victim])
        assert ended(list(numbers.values()), 5)
        said = read_until(process, "starting again")
        assert f"{victim[:-1]} 0 (process {numbers[victim]}, attempt {attempt}) failed: SIGKILL, killed" in said
        assert f"its last lines, {run}/logs/attempt_{attempt}/" in said and "  | " in said
    rest = process.stderr.read()
    assert process.wait() == EXIT_DONE, rest
    assert f"resumed from {run}/checkpoints/step_" in rest
    check_as_uncut(run, uncut)
    check_nothing_left(run, 3)


def test_killed_launchers_detach_status_and_sigterm(place, uncut):
    """One run whose launcher is killed while the workers set up, again while they train, and then asked to stop."""
    run, c = place / "launchers", split(place, save_every=10)
    argv = command(place, run, c, "--unchecked")
    process = start(argv)
    until((run / "running.json").exists)
    numbers = [worker_of(process.pid, local) for local in range(2)]
    kill(process.pid)
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL and ended(numbers)

    out = subprocess.run([*argv, "--resume", "--detach"], capture_output=True, text=True, timeout=60, check=False)
    assert out.returncode == EXIT_DONE and f"training in {run}" in out.stdout, out.stderr
    with pytest.raises(UserError, match="is being trained by process"):
        check_run(run, c, resume=True)
    until(lambda: len(records(run, "step")) > 15 and checkpoint.list_checkpoints(run))
    assert read_run(run).state() == "running"
    kill(int(re.search(r"as process (\d+)", out.stdout)[1]))
    assert ended(list(pids(run, 1).values()))
    assert read_run(run).state() == "killed"

    process = start([*argv, "--resume"])
    read_until(process, f"step {checkpoint.list_checkpoints(run)[-1].step + 5:3d}/")
    process.terminate()
    rest = process.stderr.read()
    assert process.wait() == EXIT_STOPPED, rest
    assert "stopping after this step" in rest and "stopped after step" in rest
    assert checkpoint.list_checkpoints(run)[-1].step == max(row["step"] for row in records(run, "step")) < STEPS
    assert read_run(run).state() == "stopped" and not (run / "running.json").exists()
    check_nothing_left(run, 3)
    assert train(recipe(place, 2, 1, **SPARSE, save_every=10), run, resume=True) == EXIT_DONE
    check_as_uncut(run, uncut)


def test_a_run_outlives_the_reader_of_its_lines(place):
    """Such as a `tee` that was killed; all lines are in the logs."""
    run = place / "unread"
    reads, writes = os.pipe()
    os.close(reads)
    argv = command(place, run, recipe(place, 1, 1, "processes", steps=4), "--unchecked")
    done = subprocess.run(argv, stdout=writes, stderr=writes, timeout=120, check=False)
    os.close(writes)
    assert done.returncode == EXIT_DONE and checkpoint.list_checkpoints(run)[-1].step == 4
    assert "saved " in next((run / "logs" / "attempt_0").glob("*trainer0.log")).read_text()


def test_a_worker_that_starts_after_its_launchers_end_ends_too(place):
    written = place / "orphan.json"
    write_json(written, {"recipe": recipe(place, 1, 1, "processes").to_dict()})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    argv = [sys.executable, "-m", "draftsmith.worker", str(written), "--run", str(place / "orphan")]
    done = subprocess.run([*argv, "--launcher", str(gone.pid)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_TERMINATED, "", "")
    assert not (place / "orphan").exists()


def test_a_workers_error_file_is_complete_or_absent(tmp_path, monkeypatch):
    """Whatever ends a worker while it writes it."""
    place = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(json, "dump", Mock(side_effect=KeyboardInterrupt))
        ErrorFile().record_exception(ValueError("lost"))
    assert not place.exists()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place))
    ErrorFile().record_exception(ValueError("lost"))
    assert json.loads(place.read_text())["message"]["message"] == "ValueError: lost"


# In one process -------------------------------------------------------------------------------------------------------


def test_time_limit_ends_like_a_stop_by_hand(place):
    run = place / "limited"
    assert train(recipe(place, 1, 1, **SPARSE, time_limit=1e-6), run) == EXIT_STOPPED
    (saved,) = checkpoint.list_checkpoints(run)
    assert saved.step == 2  # the stop travels with the sums of one step and is obeyed after the next


def test_stop_by_command(place):
    run = place / "told"
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, recipe(place, 0, 2, steps=10**5, evaluate_every=10**6), run)
        until(lambda: records(run, "step") or training.done())
        assert launch.stop(StopOptions(run, wait=True)) == EXIT_DONE
        assert training.result(20) == EXIT_STOPPED
    (saved,) = checkpoint.list_checkpoints(run)
    assert saved.step == max(row["step"] for row in records(run, "step"))
    assert not (run / "running.json").exists() and not (run / "stop").exists()
    with pytest.raises(UserError, match="nobody trains here"):
        launch.stop(StopOptions(run))


def test_stop_request_reads_its_file(tmp_path):
    stop = StopRequest(tmp_path / "stop")
    assert not stop.watch()
    (tmp_path / "stop").touch()
    assert not stop.watch()  # looked a moment ago
    time.sleep(0.6)
    assert stop.watch()


@pytest.mark.parametrize("number,error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_first_signal_asks_for_a_stop_and_the_second_ends(number, error):
    said = []
    with StopRequest(say=said.append) as stop:
        signal.raise_signal(number)
        assert stop.watch() and said == ["stopping after this step; once more ends at once"]
        with pytest.raises(error) as ended_by:
            signal.raise_signal(number)
    assert error is KeyboardInterrupt or ended_by.value.code == 128 + number


def test_targets_do_not_wait_for_the_last_checkpoint(place, monkeypatch):
    left, leave, finish = threading.Event(), TargetEnd.finish, checkpoint.Writer.finish
    waits = []

    def written(self):
        waits.append(left.wait(30))
        return finish(self)

    monkeypatch.setattr(TargetEnd, "finish", lambda self: (leave(self), left.set()))
    monkeypatch.setattr(checkpoint.Writer, "finish", written)
    assert train(recipe(place, 1, 1), place / "slow_disk") == EXIT_DONE
    assert waits and all(waits)


def test_one_file_written_by_two_hosts_with_equal_process_numbers(tmp_path, monkeypatch):
    nodes, move = iter("ab"), Path.replace

    def moved(self, to):
        monkeypatch.setattr(Path, "replace", move)
        write_json(to, "the other's")
        return move(self, to)

    monkeypatch.setattr(platform, "node", lambda: next(nodes))
    monkeypatch.setattr(Path, "replace", moved)
    write_json(tmp_path / "outcome.json", "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    assert (tmp_path / "outcome.json").read_text() == '"mine"'


def test_a_failing_thread_ends_all_and_its_error_is_raised(place, monkeypatch):
    from draftsmith import taps

    def fail(self, kind, number):
        raise UserError(f"no taps for {kind} {number}")

    monkeypatch.setattr(taps.MailedTaps, "fill", fail)
    with pytest.raises(UserError, match="no taps for unit 0"):
        train(recipe(place, 2, 1), place / "failing_threads")
    monkeypatch.undo()
    assert not (place / "failing_threads" / "running.json").exists()


def test_non_finite_updates_are_skipped_counted_and_end_the_run(place):
    c = recipe(place, 1, 2, **SPARSE)
    broken = type(c)(
        **{**c.__dict__, "optim": type(c.optim)(**{**c.optim.__dict__, "lr": 1e30, "max_skipped": 3, "clip": 0.0})}
    )
    with pytest.raises(UserError, match=r"last 3 updates were skipped.*last in unit \d+"):
        train(broken, place / "nan")
    last = records(place / "nan", "step")[-1]
    assert last["skipped_updates"] >= 3


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code,oom,words",
    [
        (-9, 0, "SIGKILL, killed: by hand"),
        (-9, 1, "memory limit was reached"),
        (-7, 0, "SIGBUS, bus error: a file that it had mapped"),
        (-11, 0, "SIGSEGV, segmentation fault"),
        (1, 0, "an error (exit code 1)"),
        (2, 0, "a mistake in the recipe"),
        (4, 0, "another worker"),
    ],
)
def test_exit_codes_are_explained(code, oom, words):
    assert words in failure.meaning(code, oom)


def test_the_cause_comes_before_its_consequences():
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    def failed(rank: int, code: int) -> ProcessFailure:
        return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="")

    failures = [failed(0, 143), failed(1, 4), failed(2, -9), failed(3, -15)]
    assert failure.first_failure(failures).local_rank == 2
    assert failure.first_failure(failures[:2]).local_rank == 1


# Long -----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_soak_memory_and_descriptors_are_flat(place):
    run, c = (
        place / "soak",
        recipe(place, 2, 2, "processes", steps=2000, evaluate_every=200, save_every=250, log_every=50),
    )
    process = start(command(place, run, c), 1700)

    def at(step: int) -> dict[str, tuple[int, int]]:
        until(lambda: process.poll() is not None or any(row["step"] >= step for row in records(run, "step")), 1700)
        assert process.poll() is None
        return {
            worker: (
                int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                len(list(Path(f"/proc/{pid}/fd").iterdir())),
            )
            for worker, pid in pids(run).items()
        }

    begin = time.monotonic()
    early, late = at(400), at(1800)
    process.stderr.read()
    assert process.wait() == EXIT_DONE
    print(f"2,000 steps, {time.monotonic() - begin:.0f} s; resident MiB and open files of each worker:")
    for worker in late:
        (m, f), (n, g) = early[worker], late[worker]
        print(f"  {worker}: step 400 {m / 2**20:.1f} and {f}, step 1,800 {n / 2**20:.1f} and {g}")
    for worker, (memory, descriptors) in late.items():
        assert memory < early[worker][0] + 24 * 2**20, (worker, early, late)
        assert descriptors <= early[worker][1] + 2, (worker, early, late)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_while_a_checkpoint_is_written(place, uncut):
    """Checkpoints after every step: most moments are within a write."""
    dice = random.Random(1)
    run = place / "writing"
    resume: list[str] = []
    for _ in range(6):
        process = start(command(place, run, split(place, save_every=1), *resume))
        read_until(process, "step ")
        time.sleep(dice.uniform(0.0, 0.5))
        if (
            pid := pids(run, max(r["attempt"] for r in records(run, "open"))).get("trainer0")
        ) and process.poll() is None:
            os.kill(pid, signal.SIGKILL)
        process.stderr.read()
        process.wait()
        for found in checkpoint.list_checkpoints(run):
            checkpoint.load_weights(found)
        resume = ["--resume"]
    process = start(command(place, run, split(place, save_every=1), "--resume"))
    process.stderr.read()
    assert process.wait() == EXIT_DONE
    check_as_uncut(run, uncut)


@pytest.mark.long
def test_a_worker_that_fails_is_shown_with_its_exception(place):
    """The run directory is removed under the workers: the trainer's own error is reported, not its peers' loss of it."""
    run = place / "broken"
    process = start(command(place, run, split(place, save_every=10**6), "--unchecked"))
    read_until(process, "step   8/")
    shutil.rmtree(run)
    rest = process.stderr.read()
    assert process.wait() in (EXIT_FAILED, EXIT_USER), rest
    assert "trainer 0 (process" in rest and "failed:" in rest


@pytest.mark.long
def test_a_corpus_that_becomes_shorter_under_the_run_is_a_bus_error(place):
    """Workers map the corpus. (Their slots cannot become shorter: test_mailbox.py.)"""
    corpus = shutil.copytree(place / "corpus", place / "short_corpus")
    c = split(place, steps=10**5)
    process = start(command(place, place / "bus", replace(c, data=replace(c.data, corpus=str(corpus))), "--unchecked"))
    read_until(process, "step")
    for shard in corpus.rglob("*"):
        if shard.is_file() and "tokens" in shard.name:
            os.truncate(shard, 0)
    rest = process.stderr.read()
    assert process.wait() == EXIT_FAILED, rest[-3000:]
    assert "failed: SIGBUS, bus error: a file that it had mapped became shorter" in rest
    check_nothing_left(place / "bus", 1)


@pytest.fixture
def small_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here (root may)")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.long
def test_a_disk_that_fills_up_ends_the_run_with_one_clear_line(place, small_disk):
    run = small_disk / "full"
    process = start(command(place, run, split(place, steps=10**5, save_every=20, keep_last=10**3), "--unchecked"))
    rest = process.stderr.read()
    assert process.wait() == EXIT_USER, rest[-3000:]
    assert "the checkpoint could not be written" in rest and "Traceback" not in rest
    found = checkpoint.list_checkpoints(run)
    assert found and all(len(checkpoint.load_weights(one)) for one in found)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: on a CPU torch compiles without workers"
)
def test_compile_workers_end_with_a_killed_launcher(place):
    run = place / "compiling"
    process = start(command(place, run, split(place, mode="compile"), "--unchecked"))
    until(lambda: any("compile_worker" in words for words in left_of(run).values()))
    kill(process.pid)
    process.stderr.close()
    until(lambda: not left_of(run), 30)


# The run directory ----------------------------------------------------------------------------------------------------


def test_of_launches_at_once_one_gets_the_directory(place, tmp_path):
    c = recipe(place, steps=40)
    for resume in ((), ("--resume",)):
        both = [start(command(place, tmp_path / "run", c, "--unchecked", *resume)) for _ in range(2)]
        said = [one.stderr.read() for one in both]
        assert sorted(one.wait() for one in both) == [EXIT_DONE, EXIT_USER], said
        if not resume:
            shutil.rmtree(tmp_path / "run" / "checkpoints")


def test_a_copy_of_a_run_that_is_trained_is_nobodys(place, tmp_path):
    run = open_run(tmp_path / "run", recipe(place), False)
    assert read_owner(run.path) is not None
    shutil.copytree(run.path, tmp_path / "copy")
    assert read_owner(tmp_path / "copy") is None
    run.path.rename(tmp_path / "moved")
    assert read_owner(tmp_path / "moved") is not None


def test_a_full_disk_before_the_run_began_leaves_room_for_it(place, tmp_path, monkeypatch):
    c, write = recipe(place), Path.write_text

    def full(self, *rest):
        write(self, "half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="cannot be written: .*No space left"):
        open_run(tmp_path / "run", c, False)
    monkeypatch.undo()
    assert open_run(tmp_path / "run", c, False).attempt == 0


def test_a_file_in_the_way_of_the_run_directory(place, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        out = subprocess.run(command(place, path, recipe(place)), capture_output=True, text=True, check=False)
        assert (
            out.returncode == EXIT_USER
            and f"{path}: cannot be a run directory, {tmp_path}/file is a file" in out.stderr
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_threads_at_once(place, tmp_path, number):
    c = recipe(place, 1, 2, steps=100_000, log_every=10)
    process = start(command(place, tmp_path / "run", c, "--unchecked"))
    read_until(process, "step ")
    process.send_signal(number)
    read_until(process, "stopping after this step")
    process.send_signal(number)
    said = process.stderr.read()
    assert process.wait() in (128 + number, EXIT_STOPPED), said  # it may have stopped by then
    assert "Traceback" not in said and "terminate called" not in said


def test_a_stop_asked_for_before_the_next_attempt_has_begun_is_obeyed(place, tmp_path):
    run = tmp_path / "run"
    argv = command(place, run, recipe(place, 1, 1, "processes", steps=100_000, save_every=5), "--unchecked")
    process = start([*argv, "--restarts", "1"])
    until(lambda: checkpoint.list_checkpoints(run))
    kill(pids(run)["target0"])
    read_until(process, "starting again")
    process.terminate()
    said = process.stderr.read()
    assert process.wait() == 128 + signal.SIGTERM and "ended at once by SIGTERM" in said, said
