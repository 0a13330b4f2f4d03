"""Two GPUs of one host against one: losses, resumed runs, killed workers. See two_gpus_h200.md.

    draftsmith bench pipeline --out OUT --shape qwen3-0.6b --ways two --per-step 4 --steps 20 --skip 10 --no-idle
    python records/two_gpus.py OUT [kills]

Takes the recipe that the bench wrote (OUT/run_two.json) and trains a few steps of it with one and with two trainers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftsmith.history import read_run
from draftsmith.run import EXIT_DONE, EXIT_STOPPED, start_time, write_json

STEPS = 12


def command(out: Path, name: str, trainers: int, targets: int = 0, steps: int = STEPS, **run: int) -> list[str]:
    recipe = json.loads((out / "run_two.json").read_text())["recipe"]
    recipe["optim"]["steps"] = steps
    recipe["run"] |= {"log_every": 1, "save_every": 10**6, "keep_last": 1} | run
    recipe["topology"] = {"targets": targets, "trainers": trainers}
    write_json(out / f"{name}.json", {"recipe": recipe})
    return [sys.executable, "-m", "draftsmith", "train", str(out / f"{name}.json"), "--run", str(out / name)]


def run(argv: list[str], code: int) -> None:
    done = subprocess.run([*argv, "--unchecked"], capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"{argv}: exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}")


def losses(path: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_run(path).steps}


def compare(name: str, a: dict[int, float], b: dict[int, float]) -> None:
    assert list(a) == list(b) == list(range(1, STEPS + 1)), (list(a), list(b))
    first, worst = abs(a[1] / b[1] - 1), max(abs(a[step] / b[step] - 1) for step in a)
    print(
        f"{name}: losses {b[1]:.6f} -> {b[STEPS]:.6f}, relative difference {first:.1e} at step 1, {worst:.1e} at most",
        flush=True,
    )


def kill_each(out: Path, name: str, targets: int, trainers: int) -> str:
    """SIGKILL to every worker in turn, in one run that starts again each time; what was seen, a line for each."""
    text = ""
    argv = command(out, name, trainers, targets, steps=60, save_every=2)
    path = out / name
    process = subprocess.Popen([*argv, "--unchecked", "--restarts", "2"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for attempt in range(2):
        wait_for(process, f"step {10 * (attempt + 1):2d}/")
        workers = {}
        for session in (path / "events").glob("*.jsonl"):
            for row in map(json.loads, session.read_text().rpartition("\n")[0].splitlines()):
                if row["kind"] == "open" and row["attempt"] == attempt and not row["role"].endswith("-gpu"):
                    workers[f"{row['role']} {row['index']}"] = row["pid"]
        victim = sorted(workers)[attempt]
        os.kill(workers[victim], signal.SIGKILL)
        killed = time.monotonic()
        while any(start_time(pid) is not None for pid in workers.values()):
            time.sleep(0.02)
        seconds = time.monotonic() - killed
        said = wait_for(process, "starting again")
        named = f"{victim} (process {workers[victim]}, attempt {attempt}) failed: SIGKILL" in said
        wait_for(process, "step ")
        text += (
            f"{name}: {victim} killed, all workers gone after {seconds:.2f} s, training again after "
            f"{time.monotonic() - killed:.1f} s; the message names it: {named}\n"
        )
    rest = process.stderr.read()
    assert process.wait() == 0, rest
    return text


def wait_for(process: subprocess.Popen, beginning: str) -> str:
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith(beginning):
            return seen
    sys.exit(f"ended with {process.wait()} before {beginning!r}:\n{seen[-6000:]}")


def chain(out: Path, name: str, *parts: tuple[int, int]) -> dict[int, float]:
    """Losses of STEPS steps in parts of equal length, each with so many targets and trainers."""
    for i, (targets, trainers) in enumerate(parts):
        last = i + 1 == len(parts)
        argv = command(out, name, trainers, targets, stop_after=0 if last else STEPS // len(parts) * (i + 1))
        run([*argv, *(["--resume"] if i else [])], EXIT_DONE if last else EXIT_STOPPED)
    return losses(out / name)


def main() -> None:
    """All at once: nothing here is timed but the end of killed workers. With `kills` only those."""
    out, only_kills = Path(sys.argv[1]), sys.argv[2:] == ["kills"]
    ways = (
        {}
        if only_kills
        else {
            "one trainer again": ((0, 1),),
            "two trainers": ((0, 2),),
            "split 1:1 over two GPUs": ((1, 1),),
            "six steps on two, six on one": ((0, 2), (0, 1)),
            "six steps on one, six on two": ((0, 1), (0, 2)),
        }
    )
    with ThreadPoolExecutor(8) as pool:
        one = None if only_kills else pool.submit(chain, out, "one", (0, 1))
        found = {way: pool.submit(chain, out, way.replace(" ", "_"), *parts) for way, parts in ways.items()}
        killed = [pool.submit(kill_each, out, *way) for way in (("killed_split", 1, 1), ("killed_two", 0, 2))]
        for way, other in found.items():
            compare(f"{way}, against one trainer", other.result(), one.result())
        for text in killed:
            print(text.result(), end="", flush=True)


if __name__ == "__main__":
    main()
