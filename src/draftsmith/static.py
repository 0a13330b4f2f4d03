"""Buffers with fixed addresses between the host and a step: one unit in, one step's figures out, nobody waiting.

On CUDA both directions pass through rings of pinned memory, so that a copy is asynchronous and the host only waits for
an event of its own, long past, before it writes to a place again.
"""

import mmap

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.unit import Unit, UnitShape

RING = 3
FIELDS = ("ids", "positions", "documents", "anchors", "starts", "labels", "scored")


class StaticUnit:
    """Preallocated device buffers that hold one unit; `load` copies into them, so their addresses never change."""

    number: Tensor  # [] int64
    ids: Tensor  # [T] int64, as are positions and documents
    positions: Tensor
    documents: Tensor
    anchors: Tensor  # [A] int64, as are starts
    starts: Tensor
    labels: Tensor  # [A, B-1] int64
    scored: Tensor  # [A, B-1] bool
    taps: Tensor  # [T, K*H] in the compute dtype; the target writes them itself

    def __init__(self, shape: UnitShape, taps_width: int, dtype: torch.dtype, device: torch.device):
        T, A, S = shape.tokens, shape.anchors, shape.block_size - 1
        self._sizes = [(T,), (T,), (T,), (A,), (A,), (A, S), (A, S)]
        bytes_each = [8 * int(np.prod(size)) for size in self._sizes[:-1]] + [A * S]  # flags last: all aligned
        self._device = torch.zeros(8 + sum(bytes_each), dtype=torch.uint8, device=device)
        self._cuts = np.cumsum([8, *bytes_each]).tolist()
        self.number, *fields = self._views(self._device)
        for name, view in zip(FIELDS, fields, strict=True):
            setattr(self, name, view)
        self.taps = torch.zeros(T, taps_width, dtype=dtype, device=device)
        places = RING if device.type == "cuda" else 1
        self._ring = [torch.zeros_like(self._device, device="cpu", pin_memory=places > 1) for _ in range(places)]
        self._events = [torch.cuda.Event() for _ in self._ring] if places > 1 else []
        self._hosts = [[x.numpy() for x in self._views(place)] for place in self._ring]
        self._turn = 0

    def _views(self, flat: Tensor) -> list[Tensor]:
        number, *fields = flat.tensor_split(self._cuts)[: len(FIELDS) + 1]
        views = [x.view(torch.int64).view(size) for x, size in zip(fields, self._sizes[:-1], strict=False)]
        return [number.view(torch.int64).view(()), *views, fields[-1].view(torch.bool).view(self._sizes[-1])]

    def load(self, unit: Unit) -> None:
        """Copy everything but the taps. One asynchronous copy on CUDA, ordered in the current stream."""
        self._turn = (self._turn + 1) % len(self._ring)
        if self._events:
            self._events[self._turn].synchronize()
        number, *fields = self._hosts[self._turn]
        number[...] = unit.number
        for name, view in zip(FIELDS, fields, strict=True):
            np.copyto(view, getattr(unit, name))  # numpy: torch would wake its thread pool for each of them
        self._device.copy_(self._ring[self._turn], non_blocking=True)
        if self._events:
            self._events[self._turn].record()


class PinnedRing:
    """The last values of one small device tensor, copied to the host without waiting."""

    def __init__(self, source: Tensor):
        self._source = source
        places = RING if source.is_cuda else 1
        self._ring = [torch.zeros_like(source, device="cpu", pin_memory=places > 1) for _ in range(places)]
        self._events = [torch.cuda.Event() for _ in self._ring] if places > 1 else []
        self._turn = 0

    def put(self) -> None:
        """Enqueue a copy of what the source holds at this point of the current stream."""
        self._turn = (self._turn + 1) % len(self._ring)
        if self._events:
            self._events[self._turn].synchronize()
        self._ring[self._turn].copy_(self._source, non_blocking=True)
        if self._events:
            self._events[self._turn].record()

    def get(self) -> list[float]:
        """The last `put`; waits for it alone."""
        if self._events:
            self._events[self._turn].synchronize()
        return self._ring[self._turn].tolist()


def page_locked(like: Tensor, what: str) -> Tensor:
    """Zeros on the host, of `like`'s shape and dtype, page-locked for its device, so that copies do not hold up the host.

    torch's own pinned memory is rounded up to a power of two, which nearly doubles large states. `page_unlock` it before it
    is dropped. UserError, which begins with `what`, where memory cannot be locked.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, like.numel() * like.element_size(), flags=private)  # no page is shared: each is locked once
    memory = torch.frombuffer(pages, dtype=like.dtype, count=like.numel()).view(like.shape)
    with torch.cuda.device(like.device):  # a new thread would make a context on device 0
        page_lock(memory, what)
    return memory


def page_lock(memory: Tensor, what: str) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)
    if int(status) != 0:
        raise UserError(f"{what}: host memory cannot be page-locked ({status}); raise `ulimit -l`")


def page_unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
