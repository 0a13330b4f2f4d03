"""Every family: taps of a packed row equal transformers' own hidden states of each document alone."""

from pathlib import Path

import pytest
import torch

from draftsmith.tables import load_tables
from draftsmith.target import Target
from target_families import FAMILIES, HIDDEN, LAYERS, VOCAB, save_family

TAPS = (0, 2, LAYERS - 2)
LENGTHS = (19, 12, 23)


class Case:
    """A saved model, its own answers and our target, made once a family."""

    def __init__(self, family: str, directory: Path):
        self.family = family
        self.model = save_family(family, directory)
        self.directory = directory
        self.target = Target.load(directory, TAPS, torch.float32, torch.device("cpu"))

    @torch.no_grad()
    def alone(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, K*H] by output_hidden_states[L + 1]."""
        states = self.model(input_ids=ids[None], output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1][0] for i in TAPS], -1)

    def packed(self, documents: list[torch.Tensor]) -> list[torch.Tensor]:
        ids = torch.cat(documents)
        positions = torch.cat([torch.arange(len(d)) for d in documents])
        numbers = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)])
        out = torch.full((len(ids), len(TAPS) * HIDDEN), float("nan"))
        self.target.prefill(ids, positions, numbers, out)
        return list(out.split([len(d) for d in documents]))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    torch.set_num_threads(1)
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def documents(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference of any tap relative to that layer's RMS."""
    got, want = got.unflatten(-1, (len(TAPS), -1)), want.unflatten(-1, (len(TAPS), -1))
    rms = want.square().mean((0, 2)).sqrt()
    return float(((got - want).abs().amax((0, 2)) / rms).max())


def unchanged(case: Case, got: torch.Tensor, before: torch.Tensor) -> bool:
    """Bit for bit; experts and recurrences sum in an order that depends on what else is in the batch."""
    exact = case.family not in ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
    return torch.equal(got, before) if exact else error(got, before) < 1e-5


def test_packed_equals_alone_at_every_place(case):
    parts = documents()
    for place in range(3):
        row = parts[place:] + parts[:place]
        for got, ids in zip(case.packed(row), row, strict=True):
            assert error(got, case.alone(ids)) < 1e-5


def test_a_changed_neighbour_changes_nothing(case):
    row = documents()
    before = case.packed(row)
    for place in range(3):
        other = [d if i == place else e for i, (d, e) in enumerate(zip(row, documents(1), strict=True))]
        assert unchanged(case, case.packed(other)[place], before[place])


def test_a_changed_token_changes_no_tap_before_it(case):
    row = documents()
    before = case.packed(row)[1]
    row[1] = row[1].clone()
    row[1][7] = (row[1][7] + 1) % VOCAB
    after = case.packed(row)[1]
    assert unchanged(case, after[:7], before[:7])
    assert not torch.allclose(after[7], before[7])


def test_packed_or_not_is_as_listed(case):
    assert case.target.packed == FAMILIES[case.family][2]


@torch.no_grad()
def test_frozen_tables_give_the_models_own_embeddings_and_logits(case):
    tables = load_tables(case.directory, torch.float32, torch.device("cpu"))
    ids = documents()[0]
    answer = case.model(input_ids=ids[None], output_hidden_states=True)
    embedded = torch.nn.functional.embedding(ids, tables.embedding) * tables.embed_scale
    torch.testing.assert_close(embedded, answer.hidden_states[0][0], rtol=1e-5, atol=1e-5)
    logits = answer.hidden_states[-1][0] @ tables.head.weight.T * tables.head.scale
    if tables.head.softcap:
        logits = torch.tanh(logits / tables.head.softcap) * tables.head.softcap
    torch.testing.assert_close(logits, answer.logits[0], rtol=1e-5, atol=1e-4)
