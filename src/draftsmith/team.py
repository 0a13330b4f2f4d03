"""The trainers of a run as one: their gradients summed in a fixed order, small values exchanged, state handed out.

A process holds one Team and one Member for each of its trainers: one, or several threads. Threads sum their buffers in
the order of their numbers, and only the first of them joins the process group, so that sums do not depend on whether
trainers are threads or processes of a host: ((r0 + r1) + r2) + ... On CUDA NCCL chooses the order between processes.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.errors import first_line
from draftsmith.mailbox import Patience, PeerLost

PART = 1 << 24  # numbers of another thread's gradients that are on this one's device at a time


@dataclass(frozen=True)
class Groups:
    """The process groups between the first trainers of all processes; `control` is gloo, `gradients` NCCL on CUDA."""

    control: dist.ProcessGroup
    gradients: dist.ProcessGroup
    size: int
    rank: int


class Barrier:
    """Threads wait here until all have come. Unlike threading.Barrier, an abort does not reach those who were let through
    already but have not woken yet: whatever the last of them then does, each of them has held the same meetings."""

    def __init__(self, threads: int, seconds: float, action: Callable[[], None] = lambda: None):
        """`action` is what the last one to come does before the others go on. A wait may last `seconds`."""
        self._threads, self._seconds, self._action = threads, seconds, action
        self._changed = threading.Condition()
        self._here = self._held = 0
        self._aborted = False

    def wait(self) -> None:
        """PeerLost if another thread called `abort`, or did not come in time."""
        with self._changed:
            meeting = self._held
            self._here += 1
            if self._here == self._threads and not self._aborted:
                self._action()
                self._here, self._held = 0, meeting + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._aborted or self._held > meeting, self._seconds)
            if self._held == meeting:
                self.abort()
                raise PeerLost("another worker thread is gone or silent")

    def abort(self) -> None:
        """A thread has failed: whoever waits, or comes later, learns of it."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class Team:
    """What the trainers of one process share."""

    def __init__(self, threads: int = 1, groups: Groups | None = None, seconds: float = 3600.0):
        self.threads, self.groups = threads, groups
        self.values: list[Any] = [None] * threads
        self.everything: list[Any] = []
        self._barrier = Barrier(threads, seconds)

    def member(self, index: int) -> "Member":
        return Member(self, index)

    def abort(self) -> None:
        """A thread has failed: whoever waits for it at a meeting learns of it."""
        self._barrier.abort()

    def meet(self) -> None:
        if self.threads > 1:
            self._barrier.wait()


class Member:
    """One trainer's part in the team. Every member must make the same calls in the same order."""

    def __init__(self, team: Team, index: int):
        self.team, self.index = team, index

    @property
    def alone(self) -> bool:
        return self.team.threads == 1 and self.team.groups is None

    @torch.no_grad()
    def add_up(self, flat: Tensor) -> None:
        """Sum `flat` [n] float32 over all trainers, in place."""
        team = self.team
        if team.threads > 1:
            self._publish(flat)
            if self.index == 0:
                for other in team.values[1:]:
                    for mine, part in zip(flat.split(PART), other.split(PART), strict=True):
                        mine.add_(part.to(flat.device))
        if self.index == 0 and team.groups is not None:
            with peers("the sum of the gradients"):
                if flat.device.type == "cuda":
                    dist.all_reduce(flat, group=team.groups.gradients)
                else:
                    sum_in_order(flat, team.groups)
        if team.threads > 1:
            self._collect(flat)

    def turns(self) -> Iterator[None]:
        """A loop of one pass, which the trainers of this process make one after the other."""
        for turn in range(self.team.threads):
            if turn == self.index:
                yield
            self.team.meet()

    def exchange(self, value: Any) -> list[Any]:
        """Every trainer's value, in order of their numbers, to every trainer."""
        team = self.team
        team.values[self.index] = value
        team.meet()
        if self.index == 0:
            team.everything = list(team.values)
            if team.groups is not None:
                parts: list[Any] = [None] * team.groups.size
                with peers("an exchange"):
                    dist.all_gather_object(parts, team.everything, group=team.groups.control)
                team.everything = [value for part in parts for value in part]
        team.meet()
        everything = team.everything
        team.meet()
        return everything

    @torch.no_grad()
    def hand_out(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite `tensors` everywhere with those of trainer `source`, the first of its process."""
        team = self.team
        if self.index == 0 and team.groups is not None:
            rank = source // team.threads
            with peers("the hand-out of the checkpoint"):
                for tensor in tensors:
                    group = team.groups.gradients if tensor.device.type == "cuda" else team.groups.control
                    dist.broadcast(tensor, group=group, group_src=rank)
        if team.threads > 1:
            for tensor in tensors:
                self._publish(tensor)
                self._collect(tensor)

    def _publish(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        self.team.values[self.index] = tensor
        self.team.meet()

    def _collect(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        self.team.meet()
        if self.index != 0:
            tensor.copy_(self.team.values[0])
            if tensor.device.type == "cuda":
                torch.cuda.current_stream(tensor.device).synchronize()
        self.team.meet()  # the first trainer's buffer is read until here


def sum_in_order(flat: Tensor, groups: Groups) -> None:
    """flat [n] on the CPU: each process adds up one part of everybody's buffers in order of rank and hands it out.

    gloo's own all_reduce adds in a ring, whose order differs between parts and from that of threads.
    """
    size = groups.size
    whole = flat.new_zeros(-(-flat.numel() // size) * size)
    whole[: flat.numel()] = flat
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=groups.gradients)
    first, *others = parts.view(size, -1)
    for part in others:
        first.add_(part)
    dist.all_gather(list(whole.view(size, -1)), first, group=groups.gradients)
    flat.copy_(whole[: flat.numel()])


@contextmanager
def peers(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeError when a peer is gone or late."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what} failed, another trainer is gone or silent: {first_line(error)}") from error


class World:
    """All worker processes of a run: a gloo group for control; `groups` among those that train."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    @classmethod
    def join(cls, rank: int, size: int, restart: int, hosts: int, seconds: float) -> Self:
        """Meet at the launcher's store. The restart count prefixes its keys: those of an earlier start are stale."""
        limit = timedelta(seconds=seconds)
        if hosts == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo reads it when it connects; nothing leaves the host
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent serves the store
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=rank == 0 and not hosted, timeout=limit, wait_for_workers=False)
        with peers("the workers' first meeting"):
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"start {restart}", store), rank=rank, world_size=size, timeout=limit
            )
        return cls(rank, size)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, to every process."""
        values: list[Any] = [None] * self.size
        with peers("an exchange of all workers"):
            dist.all_gather_object(values, value)
        return values

    def groups(self, ranks: Sequence[int], backend: str, patience: Patience) -> Groups | None:
        """The groups among `ranks`; every process of the world must call this. None where there is one, or not ours."""
        if len(ranks) == 1:
            return None
        with peers("the trainers' first meeting"):
            control = dist.new_group(list(ranks), timeout=timedelta(seconds=patience.first), backend="gloo")
            gradients = dist.new_group(list(ranks), timeout=timedelta(seconds=patience.later), backend=backend)
        return Groups(control, gradients, len(ranks), ranks.index(self.rank)) if self.rank in ranks else None
