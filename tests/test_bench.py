"""bench: the commands run as the table of commands says, and a device that is not there is one line."""

import pytest
import torch

from draftsmith.__main__ import main

SMALL = ["--shape", "tiny", "--tokens", "64", "--doc", "32", "--device", "cpu"]


def bench(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    return end.value.code


def test_the_step_is_measured_on_a_cpu(capsys):
    assert bench("step", *SMALL, "--anchors", "4", "--block", "4", "--steps", "1") == 0
    out = capsys.readouterr().out
    assert "mode" in out and "eager" in out and "step_ms" in out


def test_the_prefill_is_measured_on_a_cpu(capsys):
    assert bench("target", *SMALL, "--seconds", "0.001") == 0
    out = capsys.readouterr().out
    assert out.startswith("CPU\n") and "prefill, mode eager" in out and "ceiling" in out


@pytest.mark.parametrize("what", ["step", "target"])
def test_cuda_that_is_not_there_is_one_line(what, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(what, "--device", "cuda") == 2
    assert capsys.readouterr().err == f"draftsmith bench {what}: --device cuda: this torch sees no CUDA device\n"


def test_nothing_comes_after_the_name_but_options(capsys):
    assert bench("step", "step", *SMALL) == 2
    assert "step" in capsys.readouterr().err


def test_a_document_longer_than_the_row_is_one_line(capsys):
    for what in ("step", "target"):
        assert bench(what, *SMALL, "--doc", "128") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
