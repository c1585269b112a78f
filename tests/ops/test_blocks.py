"""The cover by fixed blocks is exactly the mask, block by block, for any pack, any order of tokens and any block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.ops.blocks import BlockCover, block_cover
from megacp.core.ops.mask import Metadata, allowed, tile_table
from tests.reference.packs import metadata, random_batch


def plain(*lengths: int) -> Metadata:
    """Documents of these lengths, no branches, no spans."""
    n = sum(lengths)
    return Metadata(np.repeat(np.arange(len(lengths)), lengths), np.zeros(n, int), np.zeros(n, int), np.arange(n))


def pairs_by_block(dense: np.ndarray, size: int) -> dict[tuple[int, int], int]:
    """The obvious count: the allowed pairs of every block that has one."""
    found = {}
    for i in range(0, dense.shape[0], size):
        for j in range(0, dense.shape[1], size):
            pairs = int(dense[i : i + size, j : j + size].sum())
            if pairs:
                found[i // size, j // size] = pairs
    return found


def pairs_of(cover: BlockCover) -> dict[tuple[int, int], int]:
    return dict(zip(zip(cover.q_block.tolist(), cover.k_block.tolist(), strict=True), cover.area.tolist(), strict=True))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Metadata, Metadata]:
    """Queries and keys of one random pack in some order: the whole pack, or parts of it, perhaps empty ones."""
    tokens = draw(st.integers(2, 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    flags = {name: draw(st.booleans()) for name in ("branches", "images", "padding")}
    meta = metadata(random_batch(rng, tokens, documents=draw(st.integers(1, min(tokens, 6))), **flags))
    natural = np.arange(tokens)
    orders = [natural, np.roll(natural, int(rng.integers(tokens))), rng.permutation(tokens)]
    chosen = [draw(st.sampled_from(orders)) for _ in range(2)]
    bounds = [sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens)))) for _ in range(2)]
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
    for number, (i, j) in enumerate(zip(cover.q_block.tolist(), cover.k_block.tolist(), strict=True)):
        part = dense[i * size : (i + 1) * size, j * size : (j + 1) * size]
        assert cover.full[number] == (part.shape == (size, size) and part.all())
        assert np.array_equal(cover.mask(number), part)


def test_the_last_blocks_that_stick_out_are_never_full() -> None:
    whole = Metadata(np.zeros(130, int), np.zeros(130, int), np.ones(130, int), np.arange(130))
    cover = block_cover(tile_table(whole, whole))
    assert pairs_of(cover) == {(0, 0): 128 * 128, (0, 1): 2 * 128, (1, 0): 2 * 128, (1, 1): 4}
    assert cover.full.tolist() == [True, False, False, False]


def test_nothing_to_see_gives_no_block() -> None:
    nothing = Metadata(*[np.full(300, -1)] * 3, np.arange(300))
    empty = nothing.take(np.arange(0))
    for q, k in ((nothing, nothing), (empty, nothing), (nothing, empty), (empty, empty)):
        cover = block_cover(tile_table(q, k))
        assert len(cover.area) == len(cover.full) == 0
