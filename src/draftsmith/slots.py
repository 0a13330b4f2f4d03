"""Where the taps lie on their way from a target to a trainer, and how the two get hold of the same memory.

| kind | memory | between |
|---|---|---|
| local | an ordinary tensor, passed by reference | threads of one process |
| shared | an anonymous file (memfd) that both map: no name, no /dev/shm limit, sealed in size | processes on the CPU |
| ipc | CUDA memory of the target, exported once, opened once by each trainer, which pulls from it | processes on GPUs |
| pinned | `shared`, page-locked by both sides: device -> host -> device | where GPUs refuse peer access |

Every target owns K slots of [T, K*H] for the whole run; they are handed over in the greeting on each connection.
"""

import base64
import fcntl
import json
import mmap
import os
import pickle
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.mailbox import MESSAGE_BYTES, Line, MailError, PeerLost
from draftsmith.run import start_time
from draftsmith.static import page_lock

Transport = Literal["local", "shared", "ipc", "pinned"]
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class SlotMemory:
    """The slots of one target: `tensors` are K times [T, K*H] for it to write into."""

    transport: Transport
    tensors: tuple[Tensor, ...]
    whole: Tensor  # [K, T, K*H]
    file: int | None = None

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """What one trainer needs to open the slots: values for a message, file descriptors to pass along."""
        facts = {"transport": self.transport, "shape": list(self.whole.shape), "dtype": str(self.whole.dtype)[6:]}
        if self.transport == "ipc":
            facts["handle"] = base64.b64encode(ForkingPickler.dumps(self.whole)).decode()
        return facts, [] if self.file is None else [self.file]


def choose_transport(targets: Sequence[torch.device], trainers: Sequence[torch.device]) -> tuple[Transport, str | None]:
    """What the devices of a cell allow, and a sentence where that is not the fast way."""
    if all(d.type == "cpu" for d in (*targets, *trainers)):
        return "shared", None
    for a in targets:
        for b in trainers:
            if a != b and not torch.cuda.can_device_access_peer(b.index, a.index):
                return (
                    "pinned",
                    f"{b} cannot read the memory of {a}: taps go through pinned host memory, which is slower",
                )
    return "ipc", None


def make_slots(
    transport: Transport, count: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> SlotMemory:
    """Allocate a target's slots; UserError where the memory cannot be had or cannot be exported."""
    shape, file = (count, tokens, width), None
    if transport in ("shared", "pinned"):
        whole, file = _anonymous_file(shape, dtype)
        if transport == "pinned":
            page_lock(whole, "topology.slots")
    else:
        if transport == "ipc":
            _refuse_expandable_segments()
        whole = torch.zeros(shape, dtype=dtype, device=device)
    return SlotMemory(transport, tuple(whole), whole, file)


def open_slots(facts: dict[str, Any], files: Sequence[int]) -> tuple[Tensor, ...]:
    """The other side of `SlotMemory.export`."""
    if facts["transport"] == "ipc":
        return tuple(pickle.loads(base64.b64decode(facts["handle"])))  # from our own user's process: see `greeted`
    (file,) = files
    whole = _map(file, tuple(facts["shape"]), getattr(torch, facts["dtype"]))
    os.close(file)
    if facts["transport"] == "pinned":
        page_lock(whole, "topology.slots")
    return tuple(whole)


def _anonymous_file(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    size = torch.Size(shape).numel() * dtype.itemsize
    file = os.memfd_create("draftsmith-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, size)  # fails now, not with a SIGBUS at the first write
    except OSError as error:
        os.close(file)
        raise UserError(
            f"topology.slots: {size / 2**30:.2f} GiB of shared memory cannot be had: {error}; take fewer slots or tokens"
        ) from None
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _map(file, shape, dtype), file


def _map(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(shape)


def _refuse_expandable_segments() -> None:
    for variable in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise UserError(
                f"{variable}={os.environ[variable]}: memory of expandable segments cannot be shared between processes; "
                "unset it, or train with --topology.transport pinned or --topology.workers threads"
            )


# Getting connected ----------------------------------------------------------------------------------------------------


def private_directory() -> Path:
    """A new directory that only this user may enter, for sockets or notes of this process; whoever made it removes it."""
    sweep_private_directories()
    return Path(tempfile.mkdtemp(prefix=f"draftsmith-{os.getpid()}-", dir=_base()))


def sweep_private_directories() -> None:
    """Remove those whose maker was killed."""
    for left in _base().glob("draftsmith-*-*"):
        maker = left.name.split("-")[1]
        if maker.isdigit() and start_time(int(maker)) is None:
            shutil.rmtree(left, ignore_errors=True)


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) < 60 else Path("/tmp")  # names of sockets are short


def listen(directory: Path, target: int) -> socket.socket:
    """The socket at which target `target` of this host waits for the trainers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(directory / f"target-{target}"))
    listener.listen()
    return listener


def connect(directory: Path, targets: int) -> list[socket.socket]:
    """A trainer's connections to every target of its host, which all listen already."""
    socks = []
    for target in range(targets):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(directory / f"target-{target}"))
        socks.append(sock)
    return socks


def accept(listener: socket.socket, trainers: int, seconds: float) -> list[socket.socket]:
    """A target's connections, one from each trainer, in no particular order."""
    listener.settimeout(seconds)
    try:
        return [listener.accept()[0] for _ in range(trainers)]
    except TimeoutError:
        raise PeerLost(f"not all of the {trainers} trainers connected within {seconds:.0f} s") from None
    finally:
        listener.close()


def socket_pairs(targets: int, trainers: int) -> tuple[list[list[socket.socket]], list[list[socket.socket]]]:
    """The same connections inside one process: [target][trainer] and [trainer][target]."""
    pairs = [
        [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(trainers)] for _ in range(targets)
    ]
    return [[a for a, _ in row] for row in pairs], [[pairs[t][r][1] for t in range(targets)] for r in range(trainers)]


def offer(
    socks: Sequence[socket.socket], me: str, attempt: int, memory: SlotMemory, seconds: float
) -> tuple[list[Line], int]:
    """A target's greeting: hear each trainer, hand it the slots. Lines in order of the trainers' index in the cell, and
    the optimizer step they start from."""
    lines: dict[int, Line] = {}
    starts: set[int] = set()
    for sock in socks:
        hello, _ = greeted(sock, me, attempt, seconds)
        facts, files = memory.export()
        message = {"act": "slots", "attempt": attempt, "name": me, "pid": os.getpid(), **facts}
        socket.send_fds(sock, [json.dumps(message).encode()], files)
        lines[hello["index"]] = Line(sock, hello["name"])
        starts.add(hello["start"])
    if memory.file is not None:
        os.close(memory.file)
    if memory.transport == "ipc":
        _unlink_counters()
    if len(starts) != 1:
        raise MailError(f"{me}: the trainers start from different steps, {sorted(starts)}")
    return [lines[index] for index in range(len(socks))], starts.pop()


def _unlink_counters() -> None:
    """torch keeps a small file in /dev/shm to count who holds exported memory, and a killed process leaves it there. The
    slots live until the last trainer has said bye, so nobody needs the count."""
    for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):
        path.unlink(missing_ok=True)


def receive(
    socks: Sequence[socket.socket],
    me: str,
    index: int,
    attempt: int,
    start: int,
    local: dict[str, SlotMemory] | None,
    seconds: float,
) -> tuple[list[Line], list[tuple[Tensor, ...]]]:
    """A trainer's greeting: name itself to each target, open its slots. `local` holds those of threads by name."""
    lines, slots = [], []
    hello = {"act": "hello", "attempt": attempt, "name": me, "index": index, "start": start, "pid": os.getpid()}
    for sock in socks:
        sock.send(json.dumps(hello).encode())
    for sock in socks:
        facts, files = greeted(sock, me, attempt, seconds)
        slots.append(local[facts["name"]].tensors if facts["transport"] == "local" else open_slots(facts, files))
        lines.append(Line(sock, f"{facts['name']} (pid {facts['pid']})"))
    return lines, slots


def greeted(sock: socket.socket, me: str, attempt: int, seconds: float) -> tuple[dict[str, Any], list[int]]:
    """The peer's first message, from a process of our own user and of this attempt."""
    user = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    if user != os.getuid():
        raise MailError(f"{me}: a process of user {user} connected")
    sock.settimeout(seconds)
    begin = time.monotonic()
    try:
        data, files, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 1)
    except TimeoutError:
        raise PeerLost(
            f"{me} waited {time.monotonic() - begin:.0f} s for a peer's greeting (does it still load?)"
        ) from None
    if not data:
        raise PeerLost(f"{me}: a peer went away before its greeting")
    message = json.loads(data)
    if message["attempt"] != attempt:
        raise MailError(f"{me}: {message['name']} is of attempt {message['attempt']}, this is attempt {attempt}")
    return message, files
