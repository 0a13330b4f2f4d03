"""Every family's prefill on a GPU, in mode graph: which run as one graph, and that they compute what transformers does."""

import threading

import pytest
import torch

from draftsmith.target import RowPlan, Target
from draftsmith.target_run import FixedShape
from target_families import FAMILIES, HIDDEN, VOCAB, save_family
from test_target_families import TAPS, error

pytestmark = pytest.mark.gpu

SCALE, TOKENS, LONGEST = 4, 512, 180
LENGTHS = [131, LONGEST, 90, 111]  # three documents and an unused end
EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
LOOPS = ("qwen3_next", "falcon_h1")  # run document by document


def row(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, positions, documents [T]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (TOKENS,), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    return ids.cuda(), positions.cuda(), documents.cuda()


def prefill(target: Target, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], width: int) -> torch.Tensor:
    dtype = next(target.decoder.parameters()).dtype
    out = torch.full((TOKENS, width), float("nan"), device="cuda", dtype=dtype)
    target.prefill(*given, out)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_mode_graph_equals_transformers_in_float32(family, tmp_path, monkeypatch):
    """Rows that differ from the one that was captured; each document against the model alone."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions of linear attention: 1e-3 apart
    model = save_family(family, tmp_path, scale=SCALE).cuda()
    target = Target.load(tmp_path, TAPS, torch.float32, "cuda", mode="graph", rows=RowPlan(TOKENS, LONGEST))
    report = "\n".join(target.report())
    if family not in EXPERTS + LOOPS:
        assert f"rows of {TOKENS} tokens run in mode graph" in report, report
    for seed in range(2):
        given = row(seed)
        got = prefill(target, given, len(TAPS) * HIDDEN * SCALE)
        for ids, tap in zip(given[0].split(LENGTHS), got.split(LENGTHS), strict=True):
            with torch.no_grad():
                states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
            want = torch.cat([states[i + 1][0] for i in TAPS], -1)
            assert error(tap, want) < (1e-3 if family in LOOPS else 2e-4), report


@pytest.mark.parametrize("family", FAMILIES)
def test_mode_graph_in_bfloat16_is_near_eager(family, tmp_path):
    """Experts are a graph's own in bfloat16 alone (grouped_mm); a tie of the router may send a token elsewhere."""
    save_family(family, tmp_path, torch.bfloat16, scale=SCALE)
    rows = RowPlan(TOKENS, LONGEST)
    graph, eager = (
        Target.load(tmp_path, TAPS, torch.bfloat16, "cuda", mode=mode, rows=rows) for mode in ("graph", "eager")
    )
    report = "\n".join(graph.report())
    print(f"\n{family}\n{report}")
    if family not in LOOPS:
        assert f"rows of {TOKENS} tokens run in mode graph" in report, report
    given = row(3)
    got, want = (prefill(target, given, len(TAPS) * HIDDEN * SCALE).float() for target in (graph, eager))
    distance = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert distance.median() < 0.1, report
    assert (distance < 0.3).float().mean() > 0.8, report


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_threads_on_two_devices_each_capture_on_their_own(tmp_path):
    save_family("qwen3", tmp_path, scale=SCALE)
    given, found, lock = row(0), {}, threading.Lock()

    def work(device: str) -> None:
        torch.cuda.set_device(device)
        with lock:
            target = Target.load(tmp_path, TAPS, torch.float32, device, mode="graph", rows=RowPlan(TOKENS, LONGEST))
        out = torch.full((TOKENS, len(TAPS) * HIDDEN * SCALE), float("nan"), device=device)
        target.prefill(*(x.to(device) for x in given), out)
        found[device] = out.cpu(), target.packed, "\n".join(target.report()), torch.cuda.current_device()

    threads = [threading.Thread(target=work, args=(f"cuda:{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        out, packed, report, current = found[f"cuda:{i}"]
        assert packed and f"rows of {TOKENS} tokens run in mode graph" in report and current == i, report
        assert error(out, found["cuda:0"][0]) < 1e-4


def test_a_failed_capture_leaves_nothing_behind():
    """What reads the device cannot be captured: the caller's stream is current again, and the taps are right; random numbers
    are drawn, and memory that another stream has used is free again once that is done with it."""

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ids[0].float() * float(positions.sum()),)

    torch.cuda.empty_cache()
    before, reserved = torch.cuda.current_stream(), torch.cuda.memory_reserved()
    run = FixedShape(forward, 8, "graph", torch.device("cuda"))
    assert torch.cuda.current_stream() == before and run.mode != "graph" and run.notes
    ids = torch.arange(8, device="cuda")
    assert torch.equal(run(ids, ids)[0], ids * 28.0)
    torch.rand(8, device="cuda")

    held, other = torch.cuda.memory_allocated(), torch.cuda.Stream()
    used = torch.empty(1 << 24, device="cuda")
    used.record_stream(other)
    del used
    torch.cuda.synchronize()
    again = torch.empty(8, device="cuda")
    assert torch.cuda.memory_allocated() < held + (1 << 20)
    assert torch.cuda.memory_reserved() > reserved + (1 << 25)
    del again
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + (1 << 25)
