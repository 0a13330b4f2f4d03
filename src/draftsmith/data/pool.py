"""Worker processes that turn chunks into results, in order, with a deadline for each chunk.

A worker that dies or takes too long ends the work with a message that names the rows it had. Workers end when their
pipe does, so none outlives the process that started it.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from draftsmith.data.process import ChunkResult, ProcessRules, RowProcessor
from draftsmith.data.sources import Chunk
from draftsmith.data.template import TextSide
from draftsmith.errors import UserError

_AHEAD = 4  # chunks a worker that may be finished or in work before the oldest one is: bounds memory


def map_chunks(
    chunks: Iterable[Chunk], side: TextSide, rules: ProcessRules, workers: int, deadline: float, names: list[str]
) -> Iterator[ChunkResult]:
    """Results in the order of `chunks`. workers = 0: in this process, without a deadline. `names`: of the files."""
    if workers == 0:
        processor = RowProcessor(side, rules)
        yield from map(processor, chunks)
        return
    pool = _Pool(side, rules, workers, deadline, names)
    try:
        yield from pool.run(iter(chunks))
    finally:
        pool.close()


class _Job(NamedTuple):
    number: int
    what: str
    until: float


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class _Pool:
    def __init__(self, side: TextSide, rules: ProcessRules, workers: int, deadline: float, names: list[str]):
        context = multiprocessing.get_context("spawn")  # forks of a process with threads may hang
        self._deadline, self._names = deadline, names
        self._workers: list[_Worker] = []
        self._jobs: dict[int, _Job] = {}  # worker -> its job
        for number in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, side, rules), name=f"prepare-{number}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def run(self, chunks: Iterator[Chunk]) -> Iterator[ChunkResult]:
        done: dict[int, ChunkResult] = {}
        given = taken = 0
        more = True
        while more or taken < given:
            for worker in range(len(self._workers)):
                if more and worker not in self._jobs and given - taken < _AHEAD * len(self._workers):
                    chunk = next(chunks, None)
                    if chunk is None:
                        more = False
                        break
                    self._give(worker, given, chunk)
                    given += 1
            if self._jobs and taken not in done:
                for number, result in self._collect():
                    done[number] = result
            while taken in done:
                yield done.pop(taken)
                taken += 1

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _give(self, worker: int, number: int, chunk: Chunk) -> None:
        what = f"rows {chunk.lines[0]} to {chunk.lines[-1]} of {self._names[chunk.file]}"
        self._jobs[worker] = _Job(number, what, time.monotonic() + self._deadline)
        try:
            self._workers[worker].pipe.send(chunk)
        except OSError:
            self._fail_dead(worker)

    def _collect(self) -> list[tuple[int, ChunkResult]]:
        """Wait for at least one result."""
        pipes = {self._workers[w].pipe: w for w in self._jobs}
        ready = wait(list(pipes), max(0.0, min(job.until for job in self._jobs.values()) - time.monotonic()))
        results = []
        for pipe in ready:
            worker = pipes[pipe]
            try:
                good, value = pipe.recv()
            except (EOFError, OSError):
                self._fail_dead(worker)
            job = self._jobs.pop(worker)
            if not good:
                raise RuntimeError(f"{job.what}: a fault of draftsmith's own, please report it:\n{value}")
            results.append((job.number, value))
        if not ready:
            late = min(self._jobs.values(), key=lambda job: job.until)
            raise UserError(
                f"{late.what} took more than {self._deadline:g} seconds; take them out or raise --deadline "
                "(what is done so far is kept: the same command goes on there)"
            )
        return results

    def _fail_dead(self, worker: int) -> None:
        process = self._workers[worker].process
        process.join(5)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        raise UserError(
            f"{self._jobs[worker].what}: the worker process ended {how}; a kill often means that memory ran out: fewer "
            "--workers need less (the same command goes on where this one ended)"
        )


def _work(pipe: Connection, side: TextSide, rules: ProcessRules) -> None:
    """A worker's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees Ctrl-C and closes the pipe
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    processor = RowProcessor(side, rules)
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, Any] = True, processor(chunk)
        except Exception:  # noqa: BLE001 - it travels to the parent, which raises it with the rows' names
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return
