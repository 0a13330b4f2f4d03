"""The unit law: purity, golden values, packing on both budgets, anchors, labels, fair shares."""

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.init import propose_unit
from draftsmith.unit import (
    PlanCache,
    UnitSequence,
    UnitShape,
    build_unit,
    hash64,
    plan_epoch,
    valid_anchors,
)
from toy import MemoryCorpus, random_corpus


def digest(unit) -> str:
    h = hashlib.sha256()
    for name in ("ids", "positions", "documents", "anchors", "starts", "labels", "scored"):
        h.update(np.ascontiguousarray(getattr(unit, name)).tobytes())
    return h.hexdigest()[:16]


SHAPE = UnitShape(tokens=256, anchors=48, block_size=8, anchor_rate=0.5)
GOLDEN_PROGRAM = """
import sys; sys.path.insert(0, '.')
from test_unit import SHAPE, digest, random_corpus, UnitSequence
s = UnitSequence(random_corpus(range(20, 120), seed=3), SHAPE, seed=11)
print([digest(s.unit(u)) for u in (7, 0, 40, 3)])
"""
GOLDEN = ["028b6cf1b14c370f", "bca8ad9706e2a7f1", "88a2f464a15ddac8", "5fd41783939604ef"]


def test_units_equal_golden_values_in_any_order_and_in_another_process(tmp_path):
    corpus = random_corpus(range(20, 120), seed=3)
    forward = UnitSequence(corpus, SHAPE, seed=11)
    in_order = {u: digest(forward.unit(u)) for u in range(41)}
    assert [in_order[u] for u in (7, 0, 40, 3)] == GOLDEN
    cached = UnitSequence(corpus, SHAPE, seed=11, plans=PlanCache(tmp_path))
    assert [digest(cached.unit(u)) for u in (40, 3, 7)] == [in_order[u] for u in (40, 3, 7)]
    again = UnitSequence(corpus, SHAPE, seed=11, plans=PlanCache(tmp_path))
    assert [digest(again.unit(u)) for u in (40, 3, 7)] == [in_order[u] for u in (40, 3, 7)]
    out = subprocess.run(
        [sys.executable, "-c", GOLDEN_PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert out.stdout.strip() == str(GOLDEN)


def test_a_plan_that_cannot_be_kept_is_made_anew(tmp_path):
    (tmp_path / "file").write_text("")
    corpus = random_corpus([30, 50, 20, 40, 44, 61])
    kept = UnitSequence(corpus, SHAPE, seed=1, plans=PlanCache(tmp_path / "file" / "plans"))
    assert np.array_equal(kept.unit(5).ids, UnitSequence(corpus, SHAPE, seed=1).unit(5).ids)


def damaged_plans(whole: bytes) -> dict[str, bytes]:
    swapped, short = io.BytesIO(), io.BytesIO()
    with np.load(io.BytesIO(whole)) as data:
        np.savez(swapped, documents=data["documents"] + 1, ends=data["ends"])
        np.savez(short, documents=data["documents"], ends=data["ends"][::-1])
    return {
        "empty": b"", "text": b"no plan", "cut": whole[:-30], "a byte": whole[:150] + b"\xff" + whole[151:],
        "documents that are not there": swapped.getvalue(), "ends in no order": short.getvalue(),
    }  # fmt: skip


def test_a_damaged_plan_is_made_anew(tmp_path):
    corpus = random_corpus([30, 50, 20, 140, 144, 61])
    sequence = lambda: UnitSequence(corpus, SHAPE, seed=1, plans=PlanCache(tmp_path))  # noqa: E731
    rows, file = sequence().rows_in_epoch(0), tmp_path / "epoch_0.npz"
    whole, unit = file.read_bytes(), digest(sequence().unit(0))
    for name, damage in damaged_plans(whole).items():
        file.write_bytes(damage)
        assert digest(sequence().unit(0)) == unit and sequence().rows_in_epoch(0) == rows, name
        assert np.load(file)["documents"].tolist() == np.load(io.BytesIO(whole))["documents"].tolist()


def test_counter_hash_golden():
    assert [int(x) for x in hash64(5, 7, np.arange(3))] == [
        7544007345247468926,
        4864211785349647905,
        5542889403615292111,
    ]
    keys = hash64(1, 2, np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    ones = np.unpackbits(keys.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 2e-3


documents = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2**30)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    documents,
    st.integers(90, 200),
    st.integers(1, 40),
    st.sampled_from([2, 4, 8]),
    st.floats(0.05, 1.0),
    st.integers(0, 5),
)
def test_every_token_once_an_epoch_and_lawful_anchors(drawn, tokens, anchors, block, rate, epoch):
    corpus = MemoryCorpus([])
    for length, seed in drawn:
        rng = np.random.default_rng(seed)
        corpus.documents.append(
            (rng.integers(0, 1000, length).astype(np.int32), (rng.random(length) < 0.6).astype(np.uint8))
        )
    corpus = MemoryCorpus(corpus.documents)
    shape = UnitShape(tokens, anchors, block, rate)
    rows = plan_epoch(corpus, shape, 1, epoch)
    assert sorted(d for row in rows for d in row) == list(range(len(drawn)))
    asked = np.minimum(np.ceil(corpus.anchor_counts * rate), anchors)
    for number, row in enumerate(rows):
        assert corpus.lengths[row].sum() <= tokens and asked[row].sum() <= anchors
        position = np.arange(tokens, dtype=np.uint64)
        unit = build_unit(
            corpus, row, shape, number, hash64(1, number, position) >> np.uint64(24) << np.uint64(24) | position
        )
        check_unit(corpus, row, shape, unit)


def check_unit(corpus, row, shape, unit):
    """The whole law of one unit, written the slow way."""
    T, A, B = shape.tokens, shape.anchors, shape.block_size
    at, valid = 0, set()
    owner = np.full(T, -1)
    supervised = np.zeros(T, bool)
    for index in row:
        t, m = corpus.documents[index]
        n = len(t)
        assert (unit.ids[at : at + n] == t).all() and (unit.positions[at : at + n] == np.arange(n)).all()
        assert len(set(unit.documents[at : at + n])) == 1
        owner[at : at + n], supervised[at : at + n] = at, m
        valid |= {at + a for a in range(n - 1) if m[a] and m[a + 1]}
        at += n
    assert unit.tokens_used == at and (unit.ids[at:] == 0).all()
    assert unit.anchors_used == min(A, len(valid))
    used = unit.anchors[: unit.anchors_used]
    assert set(used) <= valid and len(set(used)) == len(used)
    assert (np.diff(unit.anchors) >= 0).all() and (np.diff(unit.starts) >= 0).all()
    for i, a in enumerate(unit.anchors):
        if i >= unit.anchors_used:
            assert unit.starts[i] == a and not unit.scored[i].any()  # sees nothing but itself, weight 0
            continue
        assert unit.starts[i] == owner[a]
        for k in range(1, B):
            inside = a + k < T and owner[a + k] == owner[a]
            assert unit.scored[i, k - 1] == (inside and supervised[a + k])
            if unit.scored[i, k - 1]:
                assert unit.labels[i, k - 1] == unit.ids[a + k]


def log_normal_corpus(count: int, median: float, sigma: float, cap: int, seed: int) -> MemoryCorpus:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, count), 24, cap).astype(int)
    return random_corpus(lengths, seed=seed)


@pytest.mark.parametrize(("median", "sigma", "cap"), [(400, 0.8, 3072), (150, 0.5, 1024), (60, 0.3, 256)])
def test_proposed_shape_fills_both_budgets(median, sigma, cap):
    corpus = log_normal_corpus(3000, median, sigma, cap, seed=1)
    shape = propose_unit(corpus, corpus, 8, "cpu").shape
    sequence = UnitSequence(corpus, shape, seed=0)
    units = [sequence.unit(u) for u in range(sequence.rows_in_epoch(0))]
    tokens = sum(u.tokens_used for u in units) / (len(units) * shape.tokens)
    anchors = sum(u.anchors_used for u in units) / (len(units) * shape.anchors)
    assert tokens >= 0.97 and anchors >= 0.95, (tokens, anchors, shape)


def test_a_document_s_share_of_anchors_follows_its_supervised_tokens():
    corpus = random_corpus([400, 60, 120, 240, 30, 90], seed=5)
    shape = UnitShape(1024, 128, 8, 0.3)
    drawn = np.zeros(6)
    draws = 400
    for u in range(draws):
        position = np.arange(1024, dtype=np.uint64)
        unit = build_unit(
            corpus, range(6), shape, u, hash64(9, u, position) >> np.uint64(24) << np.uint64(24) | position
        )
        drawn += np.bincount(unit.documents[unit.anchors[: unit.anchors_used]], minlength=6)
    share = corpus.anchor_counts / corpus.anchor_counts.sum()
    assert np.abs(drawn / (draws * 128) - share).max() < 0.01


def test_anchors_change_by_unit_and_seed_and_epochs_reshuffle():
    corpus = random_corpus(range(20, 120), seed=3)
    a, b = UnitSequence(corpus, SHAPE, 0), UnitSequence(corpus, SHAPE, 1)
    assert digest(a.unit(0)) != digest(b.unit(0))
    assert plan_epoch(corpus, SHAPE, 0, 0) != plan_epoch(corpus, SHAPE, 0, 1)
    rows = a.rows_in_epoch(0)
    assert a.place(rows - 1) == (0, rows - 1) and a.place(rows) == (1, 0)


def test_a_document_longer_than_a_unit_is_refused():
    with pytest.raises(ValueError, match="document 1 has 300 tokens.*unit.tokens = 256.*384"):
        UnitSequence(random_corpus([100, 300]), SHAPE, 0)


def test_valid_anchors_need_two_supervised_tokens():
    assert valid_anchors(np.array([0, 1, 0, 1, 1, 1, 0, 1], np.uint8)).tolist() == [3, 4]
    assert valid_anchors(np.array([1], np.uint8)).tolist() == []


def test_plans_are_not_kept_in_a_run_directory_that_is_gone(tmp_path):
    corpus = random_corpus([30] * 8)
    for run, kept in ((tmp_path / "run", True), (tmp_path / "gone", False)):
        if kept:
            run.mkdir()
        UnitSequence(corpus, UnitShape(96, 12, 4, 0.5), 0, PlanCache(run / "plans" / "corpus")).unit(0)
        assert run.exists() == kept == (run / "plans" / "corpus" / "epoch_0.npz").is_file()
