"""What the doctor looks through while a step runs: compilations, reads on the host, addresses, memory, launches."""

import gc
import sysconfig
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.static import FIELDS
from draftsmith.step import TrainStep
from draftsmith.step_modes import COMPILE_LOCK, any_number_of_variants


@dataclass(frozen=True)
class Compilation:
    """One compilation as it began."""

    thread: str
    locked: bool
    """The thread held COMPILE_LOCK, or is one of autograd's, which works for a thread that holds it."""
    place: str
    """The product's line that led to it."""


@dataclass
class CompileWatch:
    """Every compilation of the process while the watch is on, in all threads, however many variants a function has."""

    seen: list[Compilation] = field(default_factory=list)
    _limits: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        from torch._dynamo.callback import callback_handler

        self._limits.enter_context(any_number_of_variants())
        callback_handler.register_start_callback(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        from torch._dynamo.callback import callback_handler

        if self._begin in callback_handler.start_callbacks:  # torch._dynamo.reset drops them all
            callback_handler.remove_start_callback(self._begin)
        self._limits.close()

    def _begin(self, _: Any) -> None:
        locked = COMPILE_LOCK._is_owned()  # threading.Condition's own way to ask
        if isinstance(threading.current_thread(), threading._DummyThread):
            locked = someone_compiles()  # a GPU's backward, compiled at its first run in autograd's thread
        self.seen.append(Compilation(threading.current_thread().name, locked, own_line()))


def someone_compiles() -> bool:
    """A thread holds COMPILE_LOCK."""
    free = COMPILE_LOCK.acquire(blocking=False)
    if free:
        COMPILE_LOCK.release()
    return not free


def recompile_reasons() -> list[str]:
    """Why the compiler compiled a function again, oldest first, as far as it remembers."""
    from torch._dynamo.utils import get_compilation_metrics

    return [" ".join(m.recompile_reason.split()) for m in get_compilation_metrics() if m.recompile_reason]


def graph_breaks() -> Counter:
    """Reasons of graph breaks so far in this process."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def own_line() -> str:
    """file:line of the innermost caller that is neither torch's, nor the standard library's, nor the doctor's."""
    library, torch_home = sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        standard = frame.filename.startswith(library) and not {"site-packages", "dist-packages"} & set(file.parts)
        if not standard and not frame.filename.startswith((torch_home, "<")) and not file.name.startswith("doctor_"):
            return f"{file.name}:{frame.lineno} {frame.line}"
    return "an unknown place"


HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2")


class HostReads(TorchDispatchMode):
    """Operations whose result the host has to know: on a GPU each waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions stay compiled under this mode."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.overloadpacket.__name__ in HOST_READS:
            self.places.append(f"{function.overloadpacket.__name__} at {own_line()}")
        return function(*args, **(kwargs or {}))


def host_reads(run: Callable[[], None], device: torch.device) -> list[str]:
    """Places where `run` makes the host wait for the device; on the CPU, where it would."""
    if device.type != "cuda":
        with HostReads() as mode:
            run()
        return mode.places
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # switching it on warns as well, that it is a prototype
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    syncs = [w for w in caught if "synchroniz" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}" for w in syncs]


def addresses(step: TrainStep) -> dict[str, int]:
    """Name -> address of everything a captured step reads or writes by address."""
    static = step.static
    found = {f"input {name}": getattr(static, name) for name in ("number", *FIELDS, "taps")}
    found |= {f"weight {name}": p for name, p in step.drafter.named_parameters()}
    found |= {"gradients": step.flat.reduced, "masters": step.flat.masters, "exp_avg": step.adamw.exp_avg}
    found |= {"exp_avg_sq": step.adamw.exp_avg_sq, "head": step.tables.head.weight, "embedding": step.tables.embedding}
    return {name: tensor.data_ptr() for name, tensor in found.items()}


class Growth:
    """Bytes that are left behind between marks.

    Counted is the memory of all tensors on the device that Python can reach. It belongs to the window, between two marks, at
    whose end it was first seen, and counts if it is in use when all is over: what other threads have in flight comes and
    goes. A GPU's allocator sees more, but its count is the whole process's, so it is asked only if `alone`: no other thread
    uses the device.
    """

    def __init__(self, device: torch.device, alone: bool):
        self._device, self._asks_allocator = device, alone and device.type == "cuda"
        # A weak reference keeps the key from being used again.
        self._seen: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._allocated: list[int] = []
        self._marks = 0

    def mark(self) -> None:
        """A window ends and the next one begins."""
        gc.collect()
        if self._asks_allocator:
            torch.cuda.synchronize(self._device)
            self._allocated.append(torch.cuda.memory_allocated(self._device))
        for storage in reachable(self._device):
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), self._marks)
        self._marks += 1

    def left(self) -> list[int]:
        """Bytes of each window that are in use now."""
        gc.collect()
        left = [0] * self._marks
        for reference, size, window in self._seen.values():
            left[window] += 0 if reference.expired() else size
        if self._asks_allocator:
            return [max(pair) for pair in zip(left[1:], np.diff(self._allocated).tolist(), strict=True)]
        return left[1:]


def reachable(device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Memory of the tensors on a device that Python can reach; several tensors may share one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object touches torch's deprecated ones
        kinds = (Tensor, torch.nn.Parameter)  # no subclasses: those of the compiler have no memory
        tensors = [o for o in gc.get_objects() if type(o) in kinds]
    return (t.untyped_storage() for t in tensors if t.device == device and torch._C._has_storage(t))


def peak_bytes(device: torch.device) -> int:
    """The most that has been in use since `reset_peak`: tensors on a GPU, the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@dataclass(frozen=True)
class Launches:
    """What the host asked of the driver."""

    graphs: int
    kernels: int


@contextmanager
def count_launches(device: torch.device) -> Iterator[Callable[[], Launches]]:
    """Counts launches on this device by torch's profiler; call the result after the block."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        yield lambda: _launches(profiler)
        torch.cuda.synchronize(device)


def _launches(profiler: Any) -> Launches:
    names = Counter(event.name for event in profiler.events())
    graphs = sum(n for name, n in names.items() if name.startswith(("cudaGraphLaunch", "cuGraphLaunch")))
    kernels = sum(n for name, n in names.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return Launches(graphs, kernels)
