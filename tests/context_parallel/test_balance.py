"""Dealing documents anew between ranks keeps what the balanced layout promises and saves keys that travel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.context_parallel import balance
from megacp.core.context_parallel.balance import MOST_AREA, deal_balanced, remote_rows
from megacp.core.context_parallel.regroup import Regrouping
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.synthetic.mixed import mixed_row
from megacp.core.ops.mask import Metadata, allowed
from tests.reference.packs import metadata, random_batch


def stretches(meta: Metadata, cp: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The balanced layout before documents are dealt anew."""
    with monkeypatch.context() as patch:
        patch.setattr("megacp.core.context_parallel.regroup.ATTEMPTS", 0)
        return deal_balanced(meta, cp)


def area_over_mean(meta: Metadata, indices: np.ndarray) -> float:
    area = meta.own_table.keys_per_query[indices].sum(1)
    return float(area.max() / area.mean())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 16), st.integers(1, 5), st.integers(0, 9_999))
def test_remote_rows_are_those_of_the_dense_mask(cp: int, tokens: int, documents: int, seed: int) -> None:
    """Any deal, not only good ones: branches, spans across them and padding wherever they fall."""
    rng = np.random.default_rng(seed)
    meta = metadata(random_batch(rng, cp * tokens, documents=documents, branches=True, images=True, padding=True))
    indices = np.sort(rng.permutation(cp * tokens).reshape(cp, -1), 1)
    seen = [allowed(meta.take(rows), meta).any(0) for rows in indices]
    assert remote_rows(meta, indices) == sum(
        int(keys.sum() - keys[rows].sum()) for keys, rows in zip(seen, indices, strict=True)
    )


def test_branches_of_large_numbers_cost_no_memory_for_the_numbers_between() -> None:
    """Would catch an array as long as the largest number."""
    meta = metadata(random_batch(np.random.default_rng(0), 64, documents=3, branches=True, images=True))
    wide = dataclasses.replace(meta, branch=10**15 * meta.branch.astype(np.int64))
    assert meta.branch.any() and np.array_equal(deal_balanced(wide, 4), deal_balanced(meta, 4))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 40), st.integers(1, 12), st.integers(0, 9_999))
def test_every_token_is_dealt_once_in_equal_parts_and_alike_on_every_rank(
    cp: int, tokens: int, documents: int, seed: int
) -> None:
    """A second call is another rank: one number that differs would leave ranks with different plans."""
    rng = np.random.default_rng(seed)
    meta = metadata(random_batch(rng, cp * tokens, documents=documents, branches=True, images=True, padding=True))
    indices = deal_balanced(meta, cp)
    assert indices.shape == (cp, tokens) and np.array_equal(np.sort(indices.reshape(-1)), np.arange(cp * tokens))
    assert (np.diff(indices) > 0).all()
    assert np.array_equal(indices, deal_balanced(meta.take(np.arange(len(meta))), cp))


@pytest.mark.parametrize("cp", [2, 8])
@pytest.mark.slow
def test_dealing_anew_saves_remote_rows_of_mixed_packs_within_the_limit_of_area(
    cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs of about a dozen documents: a fifth to nine tenths is saved; a search that finds no move saves nothing."""
    before = after = 0
    for seed in range(3):
        meta = mask_metadata(mixed_row(36_864, seed))
        start, found = stretches(meta, cp, monkeypatch), deal_balanced(meta, cp)
        assert area_over_mean(meta, found) <= max(1 + MOST_AREA, area_over_mean(meta, start)) + 1e-9
        assert remote_rows(meta, found) <= remote_rows(meta, start)
        before, after = before + remote_rows(meta, start), after + remote_rows(meta, found)
    assert after <= 0.85 * before


def regrouped(start: list[list[int]], cost: np.ndarray, limit: float, monkeypatch: pytest.MonkeyPatch) -> list:
    """Two documents of four rows each, dealt anew; ranks in the order of their first row."""
    monkeypatch.setattr("megacp.core.context_parallel.regroup.TOKENS_OF_AN_ATTEMPT", 1)  # 8 attempts
    found = Regrouping(np.repeat([0, 1], 4), np.array(start), cost, {0: 2, 1: 2}, limit).run()
    return sorted(found.tolist())


def test_documents_come_home_when_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold 3 + 1 and 1 + 3 rows of two equal documents: exchanging a row brings both home."""
    found = regrouped([[0, 1, 2, 4], [3, 5, 6, 7]], np.full(8, 4), 16.0, monkeypatch)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_no_move_breaks_the_limit_of_area_for_the_sake_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 4 dear and 4 light rows: both at home would give one rank nearly all the area."""
    start, cost = [[0, 1, 4, 5], [2, 3, 6, 7]], np.repeat([9, 1], 4)
    assert regrouped(start, cost, 20.0, monkeypatch) == start
    assert regrouped(start, cost, 36.0, monkeypatch) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_start_is_kept_where_dealing_anew_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are means, so a deal that should be cheaper may not be: the count decides."""
    meta = mask_metadata(mixed_row(8_192, 0))
    start = stretches(meta, 4, monkeypatch)
    monkeypatch.setattr(balance, "remote_rows", lambda meta, indices: 7)
    assert np.array_equal(deal_balanced(meta, 4), start)
