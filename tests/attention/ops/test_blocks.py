"""Covers of the mask by fixed blocks and by calls contain exactly its pairs, for any pack and
order.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.attention.ops import tile_kernels
from megacp.attention.ops.blocks import BlockCover, block_cover
from megacp.attention.ops.kernel import Heads
from megacp.attention.ops.mask import CAUSAL, FULL, Metadata, TileTable, allowed, tile_table
from megacp.attention.ops.tile_kernels import KernelCall, table_calls
from tests.reference.packs import metadata, random_batch


def plain(*lengths: int) -> Metadata:
    """Return documents of these lengths without branches and spans."""
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths))


def pairs_by_block(dense: np.ndarray, size: int) -> dict[tuple[int, int], int]:
    """Count the allowed pairs of every non-empty block directly."""
    found = {}
    for i in range(0, dense.shape[0], size):
        for j in range(0, dense.shape[1], size):
            pairs = int(dense[i : i + size, j : j + size].sum())
            if pairs:
                found[i // size, j // size] = pairs
    return found


def pairs_of(cover: BlockCover) -> dict[tuple[int, int], int]:
    return dict(
        zip(
            zip(cover.q_block.tolist(), cover.k_block.tolist(), strict=True),
            cover.area.tolist(),
            strict=True,
        )
    )


@st.composite
def sides(draw: st.DrawFn) -> tuple[Metadata, Metadata]:
    """Draw queries and keys of a random pack in some order: the whole pack or, possibly empty,
    parts.
    """
    tokens = draw(st.integers(2, 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    flags = {name: draw(st.booleans()) for name in ("branches", "images", "padding")}
    meta = metadata(
        random_batch(rng, tokens, documents=draw(st.integers(1, min(tokens, 6))), **flags)
    )
    natural = np.arange(tokens)
    orders = [natural, np.roll(natural, int(rng.integers(tokens))), rng.permutation(tokens)]
    chosen = [draw(st.sampled_from(orders)) for _ in range(2)]
    bounds = [
        sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens)))) for _ in range(2)
    ]
    q, k = (meta.take(order[low:high]) for order, (low, high) in zip(chosen, bounds, strict=True))
    return draw(st.sampled_from([(meta, meta), (q, k), (q, meta), (meta, k)]))


@pytest.mark.slow
@settings(max_examples=500)
@given(sides(), st.sampled_from([1, 2, 3, 4, 8, 16, 100]))
def test_every_non_empty_block_is_there_once_with_its_number_of_pairs(
    pair: tuple[Metadata, Metadata], size: int
) -> None:
    q, k = pair
    cover = block_cover(tile_table(q, k), size)
    assert pairs_of(cover) == pairs_by_block(allowed(q, k), size)
    assert len(pairs_of(cover)) == len(cover.area), "a block appears twice"
    order = cover.q_block * (cover.k_blocks + 1) + cover.k_block
    assert (np.diff(order) > 0).all(), "blocks are ordered by query block, then key block"
    assert cover.area.sum() == cover.table.area
    assert (cover.q_blocks, cover.k_blocks) == (-(-len(q) // size), -(-len(k) // size))


@pytest.mark.slow
@settings(max_examples=200)
@given(sides(), st.sampled_from([1, 2, 3, 8]))
def test_full_blocks_hold_every_pair_and_the_others_have_the_rules_mask(
    pair: tuple[Metadata, Metadata], size: int
) -> None:
    q, k = pair
    cover, dense = block_cover(tile_table(q, k), size), allowed(q, k)
    for number, (i, j) in enumerate(
        zip(cover.q_block.tolist(), cover.k_block.tolist(), strict=True)
    ):
        part = dense[i * size : (i + 1) * size, j * size : (j + 1) * size]
        assert cover.full[number] == (part.shape == (size, size) and part.all())
        assert np.array_equal(cover.mask(number), part)


def test_the_last_blocks_that_stick_out_are_never_full() -> None:
    whole = Metadata.of_documents(np.zeros(130, int), span=1)
    cover = block_cover(tile_table(whole, whole))
    assert pairs_of(cover) == {(0, 0): 128 * 128, (0, 1): 2 * 128, (1, 0): 2 * 128, (1, 1): 4}
    assert cover.full.tolist() == [True, False, False, False]


def test_nothing_to_see_gives_no_block() -> None:
    nothing = Metadata.of_documents(np.full(300, -1))
    empty = nothing.take(np.arange(0))
    for q, k in ((nothing, nothing), (empty, nothing), (nothing, empty), (empty, empty)):
        cover = block_cover(tile_table(q, k))
        assert len(cover.area) == len(cover.full) == 0


NARROW, WIDE = Heads(8, 4, 8), Heads(32, 8, 128)


def halves(seed: int, tokens: int = 300) -> TileTable:
    """Return the table between two parts of a random pack, in which some queries see no key."""
    rng = np.random.default_rng(seed)
    meta = metadata(
        random_batch(rng, tokens, documents=12, branches=True, images=True, padding=True)
    )
    order = rng.permutation(tokens)
    return tile_table(
        *(meta.take(np.sort(part)) for part in (order[: tokens // 2], order[tokens // 3 :]))
    )


def keys_of(call: KernelCall) -> int:
    return sum(part.stop - part.start for part in call.keys)


def pairs_of_call(call: KernelCall) -> np.ndarray:
    """Return the mask as bool `[n, m]`."""
    if call.kind == CAUSAL:
        return np.tri(call.queries, keys_of(call), dtype=bool)
    return np.ones((call.queries, keys_of(call)), bool) if call.bias is None else call.bias == 0


@pytest.mark.parametrize("cost", [0, tile_kernels.CALL, 10**9])
@pytest.mark.parametrize("heads", [NARROW, WIDE])
def test_every_allowed_pair_is_in_one_call_and_no_other_pair_in_any(
    heads: Heads, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_kernels, "CALL", cost)
    monkeypatch.setattr(tile_kernels, "CUT", range(3, 1000))
    monkeypatch.setattr(tile_kernels, "TRIANGLE", 2)
    masked = 0
    for seed in range(12):
        for table in (halves(seed), halves(seed, 90).q.own_table):
            counts, begun = (
                np.zeros((table.queries, table.keys), int),
                np.zeros(table.queries, bool),
            )
            for call in table_calls(table, heads):
                keys = np.concatenate([np.arange(part.start, part.stop) for part in call.keys])
                counts[call.rows, keys] += pairs_of_call(call)
                assert call.first == (not begun[call.rows].any()), (
                    "the first call of a row writes, others merge"
                )
                begun[call.rows] = True
                assert pairs_of_call(call).any(1).all(), "a query that sees nothing would make NaN"
                masked += call.bias is not None
            assert np.array_equal(counts, allowed(table.q, table.k))
    assert (masked > 0) == (cost > 0)


def short_documents(number: int, tokens: int) -> TileTable:
    document = np.repeat(np.arange(number), tokens)
    return Metadata.of_documents(document).own_table


def test_short_documents_are_a_few_calls_and_long_ones_a_call_each() -> None:
    assert len(table_calls(short_documents(64, 8), NARROW)) <= 8
    assert [call.kind for call in table_calls(short_documents(3, 400), NARROW)] == [CAUSAL] * 3


def test_a_triangle_of_which_a_kernel_would_compute_too_much_is_cut() -> None:
    calls = table_calls(short_documents(2, 600), NARROW)
    assert [(call.queries, call.kind, call.first) for call in calls[: len(calls) // 2]] == [
        (256, CAUSAL, True),
        (256, CAUSAL, True),
        (256, FULL, False),
        (88, CAUSAL, True),
        (88, FULL, False),
    ]


def test_wide_heads_compute_fewer_pairs_in_vain() -> None:
    computed = {}
    for heads in (NARROW, WIDE):
        table = short_documents(64, 8)
        computed[heads] = sum(call.queries * keys_of(call) for call in table_calls(table, heads))
    assert computed[WIDE] < computed[NARROW] / 2


def test_a_mask_is_never_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_kernels, "CALL", 10**9)
    monkeypatch.setattr(tile_kernels, "MOST_PAIRS", 1000)
    sizes = [
        call.bias.size
        for call in table_calls(short_documents(64, 8), NARROW)
        if call.bias is not None
    ]
    assert sizes and max(sizes) <= 1000


def test_calls_are_made_once_for_a_table_and_heads() -> None:
    table = short_documents(4, 8)
    assert table_calls(table, NARROW) is table_calls(table, NARROW) is not table_calls(table, WIDE)
