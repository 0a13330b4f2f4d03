"""What events tell of a GPU: its memory, utilisation and power, and spans on its own clock."""

import time
from pathlib import Path

import pytest
import torch

from draftsmith.device_spans import DeviceSpans
from draftsmith.events import EventLog
from draftsmith.history import read_run
from draftsmith.meters import Meter
from draftsmith.run import EXIT_DONE
from draftsmith.train import train
from pipeline import recipe
from toy import toy_place

pytestmark = pytest.mark.gpu


def test_meter_reads_the_gpu() -> None:
    held = torch.zeros(2**28, device="cuda")  # 1 GiB
    reading = Meter(str(torch.cuda.get_device_properties(held.device).uuid)).read()
    assert held.nbytes <= reading["memory_bytes"] < reading["memory_total_bytes"]
    assert 0 <= reading["gpu_utilisation_percent"] <= 100 and reading["power_watts"] > 0


def test_device_spans_tell_what_the_gpu_did(tmp_path: Path) -> None:
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)
    with EventLog(tmp_path, "trainer-gpu") as log:
        spans = DeviceSpans(log, device)
        for round_ in range(3):
            for unit in range(4):
                with spans.span("step", unit=unit):
                    for _ in range(20):
                        a @ a
            with torch.cuda.stream(side), spans.span("pull", unit=round_):
                a.clone()
            begin = time.monotonic_ns()
            spans.collect()
            assert time.monotonic_ns() - begin > 10e6, "the host ran ahead: its own spans would tell nothing"
    found: dict[str, list[tuple[float, float]]] = {}
    for columns in read_run(tmp_path, spans=True).sessions[0].spans():
        ends = zip(columns.start, columns.start + columns.seconds, strict=True)
        found.setdefault(columns.name, []).extend((float(b), float(e)) for b, e in ends)
    steps = sorted(found["step"])
    assert len(steps) == 12 and len(found["pull"]) == 3
    flops = 20 * 2 * 8192**3
    for i, (begin_s, end_s) in enumerate(steps):
        assert 1e13 < flops / (end_s - begin_s) < 1.2e15, "a rate that the device can have"
        assert i == 0 or begin_s > steps[i - 1][1] - 1e-4, "one after the other"


def test_a_run_shows_what_its_gpu_did(tmp_path: Path) -> None:
    place = toy_place(tmp_path)
    assert train(recipe(place, steps=6, device="cuda", mode="eager"), tmp_path / "run") == EXIT_DONE
    run = read_run(tmp_path / "run", spans=True)
    (device,) = (session for session in run.sessions if session.of_device)
    found: dict[str, list[int]] = {}
    for columns in device.spans():
        assert (columns.seconds >= 0).all()
        assert (columns.start > device.start).all() and (columns.start + columns.seconds < device.last + 1e-3).all()
        found.setdefault(columns.name, []).extend(columns.attributes.get("unit", columns.attributes.get("step", [])))
    assert found["step"] == list(range(18)) and found["update"] == found["wait_peers"] == list(range(1, 7))
    assert set(range(18)) <= set(found["prefill"])
    for line in device.busy():
        assert 0 < sum(line["span_seconds"].values()) <= line["seconds"] * 1.01, "one thing at a time"
