"""A function of (ids, positions) at one shape: eager, compiled, or compiled inside one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.errors import first_line
from draftsmith.step_modes import Graph, compiling, on_side_stream

Forward = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # ids [1, T], positions [1, T] -> K taps [T, H]

WARM_UP = 3  # calls before a capture: compilation, autotuning, workspaces


class FixedShape:
    """Static inputs, and a graph over them where mode and model allow it. `notes` says what did not work and why.

    `in_parts`: compiled, but in parts with Python between them, some of which may be compiled only when they are needed.
    """

    def __init__(self, forward: Forward, length: int, mode: str, device: torch.device):
        """mode: eager, compile, reduce-overhead or graph (CUDA). What fails falls back to the one before, with a note."""
        self.length, self.mode, self.notes = length, mode, []
        self.in_parts = False
        self.ids, self.positions = (torch.zeros(1, length, dtype=torch.int64, device=device) for _ in range(2))
        self.positions.copy_(torch.arange(length, device=device))
        self._call = forward if mode == "eager" else self._compiled(forward)
        self._graph: Graph | None = None
        if mode == "graph" and self.mode != "eager":
            self._capture()

    def __call__(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """ids, positions [T] -> taps; after a capture they are static buffers that the next call overwrites."""
        self.ids.copy_(ids[None])
        self.positions.copy_(positions[None])
        if self._graph is not None:
            self._graph()
            return self._taps
        return self._call(self.ids, self.positions)

    def _compiled(self, forward: Forward) -> Forward:
        options = {"mode": "reduce-overhead"} if self.mode == "reduce-overhead" else {}
        for whole in (True, False):
            call = torch.compile(forward, dynamic=False, fullgraph=whole, **options)
            try:
                with compiling():
                    for _ in range(WARM_UP):
                        call(self.ids, self.positions)
            except RuntimeError as error:  # dynamo's and inductor's errors are RuntimeErrors
                what = "does not compile as one graph" if whole else "does not compile, runs eagerly"
                self.notes.append(f"{what}: {first_line(error)}")
            else:
                self.in_parts = not whole
                return call
        self.mode = "eager"
        return forward

    def _capture(self) -> None:
        """On a stream of this device: torch's default one belongs to the device that captured first in this process."""
        device = self.ids.device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            try:
                on_side_stream(lambda: self._call(self.ids, self.positions), stream)
                self._graph = Graph(self._keep_taps, stream)
            except RuntimeError as error:
                self.mode = "compile"
                self.notes.append(f"cannot be captured in a CUDA graph, runs compiled: {first_line(error)}")
            else:
                self._check_replay()

    def _keep_taps(self) -> None:
        self._taps = self._call(self.ids, self.positions)

    def _check_replay(self) -> None:
        """Work that ran beside the capture instead of into it would leave every unit the taps of the first."""
        want = [tap.clone() for tap in self._call(self.ids, self.positions)]
        for tap in self._taps:
            tap.fill_(float("nan"))
        self._graph()
        if not all(close(a, b) for a, b in zip(self._taps, want, strict=True)):
            self._graph, self.mode = None, "compile"
            self.notes.append("a replay of its CUDA graph does not compute the taps, runs compiled")


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    return torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05 * float(b.float().std()), equal_nan=True)
