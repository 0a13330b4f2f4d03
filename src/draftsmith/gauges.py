"""What the first trainer tells of its device: facts and the ceiling once, memory, utilisation, power and recompilations at
log steps."""

import time
from typing import Any

import torch

from draftsmith.data.shards import Manifest
from draftsmith.meters import Meter
from draftsmith.step_modes import compiled_graphs

CEILING_SECONDS = {"cuda": 0.5, "cpu": 0.1}


class Gauges:
    """One device. `measure_ceiling` occupies it for up to half a second; make it before the first step, when every worker
    of the process has compiled: what is compiled from then on counts as recompiled."""

    def __init__(self, device: torch.device, dtype: torch.dtype, measure_ceiling: bool = True):
        self._device = device
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        self._meter = Meter(uuid)
        self._compiled = compiled_graphs()
        self._ceiling = ceiling_tflops(device, dtype) if measure_ceiling else None

    def read(self) -> dict[str, Any]:
        """Fields of StepRecord: ceiling_tflops, recompiles where anything was compiled, and what the meter tells."""
        recompiles = {"recompiles": compiled_graphs() - self._compiled} if compiled_graphs() else {}
        return {"ceiling_tflops": self._ceiling, **recompiles, **self._meter.read()}

    def about(self, corpus: Manifest) -> dict[str, Any]:
        """Facts for EventLog.plan: the device, and the corpus as the report shows it."""
        cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if cuda else f"CPU, threads: {torch.get_num_threads()}"
        return {"device": name, "corpus": {"counts": corpus.counts, "histogram": corpus.histogram}}


def ceiling_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """10^12 operations a second of one large matrix product over and over, as long as a chip takes to reach its pace.

    The best of the single rates on a CPU, where other programs disturb; on CUDA the mean over the second half.
    """
    size = 8192 if device.type == "cuda" else 1024
    seconds = CEILING_SECONDS[device.type]
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay as they are
    a, b = (torch.randn(size, size, device=device, generator=own).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    spent: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(spent) < 3:
        at = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - at)
    later = spent[len(spent) // 2 :]
    pace = sum(later) / len(later) if device.type == "cuda" else min(spent)
    return 2 * size**3 / pace / 1e12
