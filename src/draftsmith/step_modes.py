"""How a step's device work is run: eagerly, compiled, through Inductor's graph trees, or as two CUDA graphs.

| mode | micro-step (forward, loss, backward) | update |
|---|---|---|
| eager | as written | torch's fused AdamW |
| compile | body compiled (dynamic=False), loss kernels as they are | one pass over memory on CUDA |
| reduce-overhead | body compiled with Inductor's CUDA graph trees | the same |
| graph | the compiled micro-step in one torch.cuda.CUDAGraph, replayed for every unit | a second graph |

Threads: torch.compile is not thread-safe, so every thread compiles under COMPILE_LOCK, forward and backward, before any
thread trains; then `forbid_recompiles` (host.Meeting). A CUDA graph belongs to the thread and stream that captured it.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal

import torch

from draftsmith.errors import UserError

Resolved = Literal["eager", "compile", "reduce-overhead", "graph"]
COMPILE_LOCK = threading.RLock()  # one for the process, as the compiler's own state is
MANY = 1 << 30
WARM_UP = 2  # runs before capture: compilation, kernel selection and library workspaces all happen in them


def resolve_mode(mode: str, device: torch.device) -> Resolved:
    """auto -> graph on CUDA, eager on CPU. Refuses what this torch, device or thread cannot do."""
    if mode == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if mode == "graph" and device.type != "cuda":
        raise UserError('run.mode = "graph" needs a CUDA device; use "compile" or "eager" on the CPU')
    if mode == "reduce-overhead" and threading.current_thread() is not threading.main_thread():
        version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
        if version < (2, 13):
            raise UserError(
                f'run.mode = "reduce-overhead" in a worker thread: the graph trees of torch {torch.__version__} keep their '
                'state in the main thread and fail elsewhere (fixed in torch 2.13); use run.mode = "graph", which is '
                "one graph a thread and as fast, or workers as processes"
            )
    return mode


def forbid_recompiles() -> None:
    """From here on compiling anything, in any thread, is an error. Call it once every thread has prepared."""
    torch.compiler.set_stance("fail_on_recompile")


def allow_recompiles() -> None:
    """The process may compile again: its next run does."""
    torch.compiler.set_stance("default")


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far, in whichever thread; 0 where nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by the first torch.compile, and slowly
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def compiled(function: Callable, mode: Resolved) -> Callable:
    """`function` as the mode wants it. Options travel with the function: config set in another thread would not."""
    if mode == "eager":
        return function
    trees = "reduce-overhead" if mode == "reduce-overhead" else None
    return torch.compile(function, dynamic=False, fullgraph=True, mode=trees)


def any_number_of_variants() -> AbstractContextManager[None]:
    """torch gives up on a function, without a word, after 8 variants of it, as a guard against shapes that change."""
    import torch._dynamo  # slow, and modes that compile nothing do without

    return torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile inside, holding COMPILE_LOCK; each worker thread, and each run of the process, has a variant of its own."""
    with COMPILE_LOCK, any_number_of_variants(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32")  # float32 is kept for what has to be exact
        yield


class Graph:
    """A callable without arguments or results, over static buffers, as one CUDA graph."""

    def __init__(self, function: Callable[[], None], stream: torch.cuda.Stream):
        """Capture. `function` has run on `stream` before, at least WARM_UP times. After a RuntimeError all is as before."""
        self.graph, self.replays = torch.cuda.CUDAGraph(), 0
        before, pool = torch.cuda.current_stream(stream.device), torch.cuda.graph_pool_handle()
        try:
            # thread_local: only this thread's own unsafe calls break the capture, not those of other workers
            with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            torch.cuda.set_stream(before)
            end_failed_capture(stream, pool)
            raise

    def __call__(self) -> None:
        self.graph.replay()
        self.replays += 1


def end_failed_capture(stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """Do what torch's capture_end leaves undone when CUDA says there that the capture had broken.

    The allocator would go on as if it were capturing (memory that another stream has used is never free again, none is
    given back before it says that there is no more), and random numbers of the device would be refused for good.
    """
    with suppress(RuntimeError):  # it had ended
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros((), device=stream.device)  # the end of a whole capture takes the generator out of it


def on_side_stream(function: Callable[[], None], stream: torch.cuda.Stream) -> None:
    """Run `function` on `stream`, ordered after and before the current stream's work."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
