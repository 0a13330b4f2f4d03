"""What a worker's device does: memory, utilisation and power, from NVML or, without a GPU, the process's memory. No torch.

Reading takes tens of microseconds and touches no CUDA stream; it belongs to log steps all the same.
"""

import os
from pathlib import Path
from typing import TypedDict

import pynvml


class Reading(TypedDict, total=False):
    """Fields of StepRecord; one that the device does not tell is left out."""

    memory_bytes: int
    memory_total_bytes: int
    gpu_utilisation_percent: float
    power_watts: float


class Meter:
    """Reads one device. `uuid`: that of the CUDA device, as torch.cuda.get_device_properties(device).uuid says it; None: CPU.

    A machine without NVML, or a GPU that NVML does not know, gives readings without the fields concerned.
    """

    def __init__(self, uuid: str | None = None):
        self._handle = _handle(uuid) if uuid else None
        self._cpu = uuid is None

    def read(self) -> Reading:
        """The state now. Memory is the whole device's, other processes included; on a CPU it is this process's."""
        if self._cpu:
            return _process_memory()
        reading = Reading()
        if self._handle is None:
            return reading
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            reading |= Reading(memory_bytes=int(memory.used), memory_total_bytes=int(memory.total))
            reading["gpu_utilisation_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            reading["power_watts"] = pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        except pynvml.NVMLError:
            pass  # a field that this device or driver does not tell; those read before stand
        return reading


def _handle(uuid: str) -> "pynvml.c_nvmlDevice_t | None":
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def _process_memory() -> Reading:
    """Resident memory of this process, where /proc tells it."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return Reading()
    page = os.sysconf("SC_PAGE_SIZE")
    return Reading(memory_bytes=resident * page, memory_total_bytes=os.sysconf("SC_PHYS_PAGES") * page)
