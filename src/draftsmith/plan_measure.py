"""Times both roles of a recipe on one of its devices for a few units, as the run would do the work."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from draftsmith.doctor_checks_device import time_copy, wait
from draftsmith.host import intra_op_threads
from draftsmith.job import Job, dtype_of, topology_of
from draftsmith.plan_speed import Times, Work, times_by_rates
from draftsmith.rates import Card, rates_of
from draftsmith.step import TrainStep
from draftsmith.unit import UnitSequence

TIMED = 3  # units, after one that warms up


def measure_times(job: Job, units: UnitSequence, card: Card | None, work: Work) -> Times:
    """Median seconds of prefill, micro-step and update on the last of the recipe's devices, which trains. What one device
    cannot show (the copy between devices where there is one, the all-reduce) is the table's for a known card, else memory
    speed. torch.OutOfMemoryError where the device does not hold both roles."""
    topology, c = topology_of(job.config), job.config
    device = torch.device(topology.devices[-1])
    dtype = dtype_of(c.target.dtype, device)
    with as_a_worker(device, intra_op_threads(c, topology)):
        target = job.load_target(device)
        step = TrainStep(
            job.make_drafter(), job.load_tables(device), job.shape, c.loss, c.optim, dtype, device,
            checkpoint_activations=c.run.checkpoint_activations, mode=c.run.mode,
        )  # fmt: skip
        step.prepare()
        seconds: dict[str, list[float]] = {"prefill": [], "unit": [], "update": []}
        static = step.static
        for u in range(1 + TIMED):
            static.load(units.unit(u))
            prefill = timed(lambda: target.prefill(static.ids, static.positions, static.documents, static.taps), device)
            found = {"prefill": prefill, "unit": timed(step.accumulate, device)}
            found["update"] = timed(lambda: step.update(0.0), device)
            for name, value in found.items() if u else ():
                seconds[name].append(value)
        copy = time_copy(static.taps, torch.empty_like(static.taps))
        pull = copy
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
            pull = time_copy(torch.empty_like(static.taps, device=other), static.taps)
    reduce = times_by_rates(work, rates_of(card)).reduce if card else copy / work.taps_bytes * 4 * work.parameters
    whole = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return Times(
        f"measured here over {TIMED} units on {device}, mode {step.mode}" + ("" if card else ", sums of gradients estimated"),
        False, middle["prefill"], middle["unit"], middle["update"], pull, copy, reduce, max(whole) / min(whole),
    )  # fmt: skip


@contextmanager
def as_a_worker(device: torch.device, threads: int) -> Iterator[None]:
    """Its device is the current one, on whose stream events of copies are recorded, and it has its share of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds until the device is done with it."""
    wait(device)
    begin = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - begin
