"""Bytes of tensors alive while a function runs, for tests that compare memory with a prediction."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts storages that operations make, until they are freed: those of an output that no input has."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        old = {x.untyped_storage().data_ptr() for x in given}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place = storage.data_ptr()
                if place and place not in self._alive and place not in old:
                    self._alive[place] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, place)
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, place: int) -> None:
        self.now -= self._alive.pop(place, 0)


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes that `run` adds to what is alive."""
    gc.collect()
    with Live() as live:
        run()
    return live.peak


def kept_by_autograd(forward: Callable[[], object], not_counted: list[torch.Tensor]) -> int:
    """Bytes of storages that autograd saves for the backward pass, without those of `not_counted`."""
    old = {t.untyped_storage().data_ptr() for t in not_counted}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in old:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(saved.values())
