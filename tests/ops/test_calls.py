"""The calls of a table compute each allowed pair once, and rows are joined where that is cheaper."""

from __future__ import annotations

import numpy as np
import pytest

from megacp.core.ops import tile_kernels
from megacp.core.ops.kernel import Heads
from megacp.core.ops.mask import Metadata, TileTable, allowed, tile_table
from megacp.core.ops.tile_kernels import KernelCall, table_calls
from tests.reference.packs import metadata, random_batch

NARROW, WIDE = Heads(8, 4, 8), Heads(32, 8, 128)


def halves(seed: int, tokens: int = 300) -> TileTable:
    """The table between two parts of a random pack, in which some queries see nothing."""
    rng = np.random.default_rng(seed)
    meta = metadata(random_batch(rng, tokens, documents=12, branches=True, images=True, padding=True))
    order = rng.permutation(tokens)
    return tile_table(*(meta.take(np.sort(part)) for part in (order[: tokens // 2], order[tokens // 3 :])))


def keys_of(call: KernelCall) -> int:
    return sum(part.stop - part.start for part in call.keys)


def pairs_of(call: KernelCall) -> np.ndarray:
    """bool `[n, m]`."""
    if call.causal:
        return np.tri(call.queries, keys_of(call), dtype=bool)
    return np.ones((call.queries, keys_of(call)), bool) if call.bias is None else call.bias == 0


@pytest.mark.parametrize("cost", [0, tile_kernels.CALL, 10**9])
@pytest.mark.parametrize("heads", [NARROW, WIDE])
def test_every_allowed_pair_is_in_one_call_and_no_other_pair_in_any(
    heads: Heads, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_kernels, "CALL", cost)
    masked = 0
    for seed in range(12):
        for table in (halves(seed), halves(seed, 90).q.own_table):
            counts, begun = np.zeros((table.queries, table.keys), int), np.zeros(table.queries, bool)
            for call in table_calls(table, heads):
                keys = np.concatenate([np.arange(part.start, part.stop) for part in call.keys])
                counts[call.rows, keys] += pairs_of(call)
                assert call.first == (not begun[call.rows].any()), "the first call of a row writes, others merge"
                begun[call.rows] = True
                assert pairs_of(call).any(1).all(), "a query that sees nothing would make NaN"
                masked += call.bias is not None
            assert np.array_equal(counts, allowed(table.q, table.k))
    assert (masked > 0) == (cost > 0)


def short_documents(number: int, tokens: int) -> TileTable:
    document = np.repeat(np.arange(number), tokens)
    zeros = np.zeros_like(document)
    return Metadata(document, zeros, zeros, np.arange(len(document))).own_table


def test_short_documents_are_a_few_calls_and_long_ones_a_call_each() -> None:
    assert len(table_calls(short_documents(64, 8), NARROW)) <= 8
    assert [call.causal for call in table_calls(short_documents(3, 400), NARROW)] == [True] * 3


def test_wide_heads_compute_fewer_pairs_in_vain() -> None:
    computed = {}
    for heads in (NARROW, WIDE):
        table = short_documents(64, 8)
        computed[heads] = sum(call.queries * keys_of(call) for call in table_calls(table, heads))
    assert computed[WIDE] < computed[NARROW] / 2


def test_a_mask_is_never_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_kernels, "CALL", 10**9)
    monkeypatch.setattr(tile_kernels, "MOST_PAIRS", 1000)
    sizes = [call.bias.size for call in table_calls(short_documents(64, 8), NARROW) if call.bias is not None]
    assert sizes and max(sizes) <= 1000


def test_calls_are_made_once_for_a_table_and_heads() -> None:
    table = short_documents(4, 8)
    assert table_calls(table, NARROW) is table_calls(table, NARROW) is not table_calls(table, WIDE)
