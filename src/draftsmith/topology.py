"""Which workers a host has, on which devices, and where each stands in the whole. Arithmetic only; imports no torch.

Every host runs the same recipe, so all cells are alike: local workers 0..N-1 are targets, the next ones trainers (called
`both` where each prefills its own units). Trainers are numbered over all hosts, host by host.
"""

from dataclasses import dataclass, replace
from typing import Literal

from draftsmith.config import Config
from draftsmith.errors import UserError
from draftsmith.mailbox import Cell

Role = Literal["both", "target", "trainer"]


@dataclass(frozen=True)
class Topology:
    """The workers of one host."""

    targets: int
    trainers: int
    threads: bool
    devices: tuple[str, ...]
    """Device of each local worker, e.g. "cuda:1" or "cpu"."""

    @property
    def workers(self) -> int:
        return self.targets + self.trainers

    @property
    def processes(self) -> int:
        return 1 if self.threads else self.workers

    def describe(self) -> str:
        """For the console: "2 targets (cuda:0, cuda:1) + 1 trainer (cuda:2), processes"."""
        kind = "threads of one process" if self.threads else "processes"
        trainers = f"{count(self.trainers, 'trainer')} ({', '.join(self.devices[self.targets :])})"
        if not self.targets:
            return f"colocated, {trainers}" + (f", {kind}" if self.workers > 1 else "")
        return f"{count(self.targets, 'target')} ({', '.join(self.devices[: self.targets])}) + {trainers}, {kind}"


@dataclass(frozen=True)
class Place:
    """Where one worker stands: local worker `local` of host `host` of `hosts`."""

    topology: Topology
    local: int = 0
    host: int = 0
    hosts: int = 1

    @property
    def role(self) -> Role:
        if not self.topology.targets:
            return "both"
        return "target" if self.local < self.topology.targets else "trainer"

    @property
    def index(self) -> int:
        """Among this host's workers of the role."""
        return self.local if self.role == "target" else self.local - self.topology.targets

    @property
    def number(self) -> int:
        """Among the workers of the role on all hosts; the trainer number decides which units it takes."""
        return self.host * (self.topology.targets if self.role == "target" else self.topology.trainers) + self.index

    @property
    def trainers(self) -> int:
        """On all hosts (R)."""
        return self.hosts * self.topology.trainers

    @property
    def device(self) -> str:
        return self.topology.devices[self.local]

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def is_first(self) -> bool:
        """The trainer that logs, saves and decides."""
        return self.role != "target" and self.number == 0

    @property
    def sharers(self) -> "list[Place]":
        """The workers whose memory is counted as one with this worker's: itself, and threads on the same device."""
        t = self.topology
        same = [t.threads and device == self.device for device in t.devices]
        return [replace(self, local=i) for i in range(t.workers) if i == self.local or same[i]]

    def cell(self) -> Cell:
        t = self.topology
        return Cell(t.targets, t.trainers, self.host * t.trainers, self.trainers)


def resolve_topology(config: Config, cuda_devices: int) -> Topology:
    """The recipe's [topology] on a host with so many CUDA devices (0: the CPU is used); UserError where it cannot be."""
    t = config.topology
    if cuda_devices == 0 and t.devices:
        raise UserError(
            f"topology.devices = {list(t.devices)}: no CUDA device is used (run.device, or none is visible)"
        )
    missing = [d for d in t.devices if d >= cuda_devices]
    if cuda_devices and missing:
        raise UserError(f"topology.devices: there is no device {missing[0]}, {cuda_devices} are visible")
    ids = t.devices or tuple(range(cuda_devices))
    trainers = t.trainers or max(1, len(ids) - t.targets)
    workers = t.targets + trainers
    devices = tuple(f"cuda:{ids[i % len(ids)]}" for i in range(workers)) if ids else ("cpu",) * workers
    topology = Topology(t.targets, trainers, t.workers == "threads", devices)
    shared = [d for d in devices[t.targets :] if d != "cpu" and devices[t.targets :].count(d) > 1]
    if shared and not topology.threads:
        raise UserError(
            f"topology: {devices[t.targets :].count(shared[0])} trainer processes on {shared[0]}, but NCCL sums gradients "
            'between devices only; give each its own device, or take topology.workers = "threads"'
        )
    return topology


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
