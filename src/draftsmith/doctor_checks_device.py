"""Checks on the device and the machine: memory, time, launches, links, space, and settings of the environment."""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.console import size
from draftsmith.doctor_probe import Launches
from draftsmith.doctor_verdict import Verdict, failed, judge, not_checked, passed
from draftsmith.slots import ALLOCATOR_VARIABLES, choose_transport
from draftsmith.step_modes import Resolved
from draftsmith.topology import Place, Topology

# torch version -> what has been run on it and where; other versions work by the documentation alone.
VERIFIED = {"2.11": "all modes, on an H200", "2.13": "eager and compile, on CPUs"}


def check_mode(mode: Resolved, threads: bool, main_settings: Mapping[str, str]) -> list[Verdict]:
    """What the mode switches on, as the thread that compiles sees it; `main_settings` are the main thread's."""
    from torch._inductor import list_mode_options

    version = ".".join(torch.__version__.split(".")[:2])
    known = VERIFIED.get(version)
    trust = f"torch {version}: {known}" if known else f"torch {version}: not verified on it"
    if mode == "eager":
        return [passed("mode", f"eager: no compiler, no graphs; {trust}")]
    wanted = "reduce-overhead" if mode == "reduce-overhead" else "default"
    options = list_mode_options(wanted) or {}
    extra = ", and one torch.cuda.CUDAGraph for a micro-step and one for the update" if mode == "graph" else ""
    shown = ", ".join(f"{k} = {v}" for k, v in options.items()) or "Inductor's defaults"
    verdicts = [passed("mode", f"{mode}: {shown}{extra}; {trust}")]
    mine = compiler_settings()
    differ = sorted(k for k, value in main_settings.items() if mine.get(k) != value)
    shown = ", ".join(f"{k} = {mine.get(k)} instead of {main_settings[k]}" for k in differ[:3])
    verdicts.append(
        judge(
            "compiler settings",
            not (threads and differ),
            f"{len(mine)} settings in the thread that compiles, "
            + (f"{len(differ)} unlike the main thread's: {shown}" if differ else "all as in the main thread"),
            f"{differ[0] if differ else ''} was set in the main thread and does not hold in this one (torch >= 2.12 keeps "
            "settings per thread)",
            "set it with an environment variable, or in the thread that compiles",
        )
    )
    return verdicts


def compiler_settings() -> dict[str, str]:
    """Every plain setting of the compiler as the calling thread sees it."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    plain = (bool, int, float, str, type(None))
    return {
        f"{module.__name__.removeprefix('torch.')}.{name}": repr(value)
        for module in (dynamo, inductor)
        for name, value in module.get_config_copy().items()
        if isinstance(value, plain)
    }


def check_replay(mode: Resolved, seen: Launches | None, micro_steps: int, updates: int) -> Verdict:
    """Launches of `micro_steps` micro-steps and `updates` updates, by the profiler; None where there is no CUDA device."""
    name = "graph replay"
    if mode != "graph" or seen is None:
        return not_checked(name, f"mode {mode} replays no graph of its own")
    due = micro_steps + updates
    stray = 4 * due  # the learning rate, the copy of the statistics, the copy of the unit
    return judge(
        name,
        seen.graphs == due and seen.kernels <= stray,
        f"{seen.graphs} graph launches for {micro_steps} micro-steps and {updates} updates, {seen.kernels} other kernels",
        f"{due} graph launches and at most {stray} other kernels were due: part of the step runs outside its graph",
        "something in the step is not captured; mode compile runs the same work without graphs",
    )


def check_growth(left: list[int], window: int, units: int) -> Verdict:
    """Bytes that each of several windows of `window` units has left behind at the end of `units` units. What grows does so
    in all of them; what is made once does not."""
    growth = min(left)
    return judge(
        "memory growth",
        growth <= 0,
        f"{max(0, growth)} bytes of {window} units are still in use after {units} units",
        f"{growth / window:.0f} bytes more are in use after every unit",
        "the step keeps tensors (a list, a graph of autograd, a hook): find who holds them",
    )


def check_peak(name: str, place: Place, peak: int, predicted: int) -> Verdict:
    """The most that was in use by this worker and all that share its memory, and plan's prediction of that (0: none)."""
    device, names = torch.device(place.device), [sharer.name for sharer in place.sharers]
    what = "tensors" if device.type == "cuda" else "the process"
    together = ""
    if len(names) > 1:
        what += f" of {' + '.join(names)}, threads on {place.device}"
        together = " for them together"
    share = f"{peak / predicted:.2f} of what plan predicts{together}" if predicted else "no prediction"
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()
    return judge(
        name,
        peak <= room,
        f"{size(peak)} ({what}) of {size(room)}; {share}",
        "the device is too small",
        "fewer unit.anchors or unit.tokens, run.checkpoint_activations, or a split topology; `draftsmith plan` says which",
    )


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_time(first: float, steady: float) -> Verdict:
    """Seconds of the first step with everything it compiles and captures, and of a later one."""
    return passed("step time", f"first {first:.1f} s with compilation, then {steady * 1e3:.1f} ms")


def check_links(place: Place, pull: tuple[float, int] | None, reduce: tuple[float, int] | None) -> list[Verdict]:
    """(seconds, bytes) of a copy of taps from another worker's slot and of a sum of the gradients."""
    if place.topology.workers == 1 and place.trainers == 1:
        return [not_checked("links", "one worker: nothing crosses a link")]
    verdicts = [check_peers(place.topology)]
    for name, found, what in (("taps", pull, "a slot of taps"), ("all-reduce", reduce, "the gradients")):
        if found is not None:
            seconds, count = found
            speed = f"{size(count)} in {seconds * 1e3:.3g} ms, {count / seconds / 1e9:.1f} GB/s"
            verdicts.append(passed(f"link, {name}", f"{what}: {speed}"))
    return verdicts


def check_peers(topology: Topology) -> Verdict:
    """Which devices reach each other's memory. Never a failure: taps and gradients of the others go through the host."""
    ids = sorted({int(d.removeprefix("cuda:")) for d in topology.devices if d != "cpu"})
    if len(ids) < 2:
        return not_checked("peer access", "all workers are on the CPU" if not ids else "all workers are on one device")
    pairs = [(a, b) for a in ids for b in ids if a != b]
    blind = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    figure = f"{len(pairs) - len(blind)} of {len(pairs)} pairs of devices"
    if blind:
        what = " and ".join(["taps"] * (topology.targets > 0) + ["gradients"] * (topology.trainers > 1))
        figure += (
            f"; cuda:{blind[0][0]} cannot read the memory of cuda:{blind[0][1]}: {what} go through host memory, slower"
        )
    return passed("peer access", figure)


def check_allocator(topology: Topology, transport: str, environment: Mapping[str, str]) -> Verdict:
    """Settings of torch's allocator that break the export of memory to another process. `transport`: topology.transport."""
    name = "allocator settings"
    found = {v: environment[v] for v in ALLOCATOR_VARIABLES if environment.get(v)}
    shown = ", ".join(f"{k}={v}" for k, v in found.items()) or "none in the environment"
    breaking = [k for k, v in found.items() if "expandable_segments:true" in v.lower().replace(" ", "")]
    devices = [torch.device(d) for d in topology.devices]
    split = topology.targets > 0 and not topology.threads and transport != "pinned"
    if breaking and split and choose_transport(devices[: topology.targets], devices[topology.targets :])[0] == "ipc":
        return failed(
            name,
            shown,
            "expandable segments cannot be exported to trainers over CUDA IPC",
            f'unset {breaking[0]}, or topology.transport = "pinned"',
        )
    return passed(name, shown + (" (harmless here: no memory is exported)" if breaking else ""))


def check_space(run: Path, need: int, keep: int) -> Verdict:
    """Room for `keep` checkpoints of `need` bytes where the run will write; what it has written of them already counts."""
    directory = (run / "checkpoints").resolve()
    place = next(p for p in (directory, *directory.parents) if p.exists())
    free, written = shutil.disk_usage(place).free, bytes_under(directory)
    missing = need * keep - written - free
    return judge(
        "disk space",
        missing <= 0,
        f"{keep} checkpoints of {size(need)}, "
        + (f"{size(written)} of it there already, " if written else "")
        + f"{size(free)} free at {place}",
        f"{size(missing)} are missing",
        "free some space, lower run.keep_last, or name another --run directory",
    )


def bytes_under(directory: Path) -> int:
    """Of all files in it, 0 where it is not there."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a run that goes on removes its old checkpoints
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def time_copy(source: Tensor, out: Tensor, times: int = 5) -> float:
    """Seconds of one copy, the best of several."""
    best = float("inf")
    for _ in range(times):
        wait(out.device)
        begin = time.perf_counter()
        out.copy_(source)
        wait(out.device)
        best = min(best, time.perf_counter() - begin)
    return best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
