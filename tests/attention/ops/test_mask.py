"""The tile table is exactly the mask, for any pack and any cut of it, and small for simple masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.attention.ops.mask import CAUSAL, FULL, Metadata, Reach, allowed, tile_table
from megacp.attention.ops.once import once
from tests.reference import attention as reference
from tests.reference.packs import dense_mask, metadata, random_batch

reaches = st.one_of(
    st.just(Reach()),
    st.integers(1, 30).map(Reach),
    st.integers(1, 30).map(lambda chunk: Reach(0, chunk)),
    st.builds(Reach, st.integers(1, 9), st.integers(1, 20)),
)


@st.composite
def packs(draw: st.DrawFn, branches: bool | None = None, images: bool | None = None) -> Metadata:
    """Draw metadata of a random pack of 2 to 48 tokens."""
    tokens = draw(st.integers(2, 48))
    return metadata(
        random_batch(
            np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
            tokens,
            documents=draw(st.integers(1, min(tokens, 6))),
            branches=draw(st.booleans()) if branches is None else branches,
            images=draw(st.booleans()) if images is None else images,
            padding=draw(st.booleans()),
            depth=draw(st.integers(1, 5)) if branches is None else 1,
        )
    )


def plain(*lengths: int) -> Metadata:
    """Return documents of these lengths without branches and spans."""
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths))


@settings(max_examples=200, deadline=None)
@given(packs(), reaches)
def test_the_rule_equals_its_pairwise_twin(meta: Metadata, reach: Reach) -> None:
    assert np.array_equal(allowed(meta, meta, reach), reference.visible(meta, meta, reach))


@settings(max_examples=150, deadline=None)
@given(packs(), reaches, st.data())
def test_tiles_cover_exactly_the_allowed_pairs_for_any_permutation_cut_into_ranks(
    meta: Metadata, reach: Reach, data: st.DataObject
) -> None:
    n = len(meta)
    kind = data.draw(st.sampled_from(["any", "rotated", "natural"]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    order = {
        "any": np.random.default_rng(seed).permutation(n),
        "rotated": np.roll(np.arange(n), seed % n),
        "natural": np.arange(n),
    }[kind]
    low, high = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    parts = [meta.take(order[:low]), meta.take(order[low:high]), meta.take(order[high:]), meta]
    for q in parts:
        for k in parts:
            table = tile_table(q, k, reach)
            dense = allowed(q, k, reach)
            assert np.array_equal(dense_mask(table), dense)
            assert np.array_equal(table.keys_per_query, dense.sum(1)), (
                "tiles overlap or the area is wrong"
            )
            assert table.area == dense.sum()
            assert np.array_equal(table.needed_keys, dense.any(0))


@settings(max_examples=200, deadline=None)
@given(packs(), reaches)
@pytest.mark.slow
def test_rows_are_ordered_disjoint_and_tiles_lie_inside_the_table(
    meta: Metadata, reach: Reach
) -> None:
    table = tile_table(meta, meta, reach)
    stop = 0
    for row in table.rows:
        assert stop <= row.q_start < row.q_stop <= table.queries
        stop, key = row.q_stop, 0
        assert row.tiles
        for tile in row.tiles:
            assert key <= tile.k_start < tile.k_stop <= table.keys
            assert tile.kind == FULL or tile.k_stop - tile.k_start == row.q_stop - row.q_start
            key = tile.k_stop


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(packs(branches=True))
def test_the_mask_equals_the_published_molmo2_rule(meta: Metadata) -> None:
    """With one span per document, every image token of an example sees every other one; images come
    before branches.
    """
    end = np.maximum.accumulate(meta.leave)  # of the document
    span = np.where((meta.span > 0) & (meta.leave == end), 1 + meta.document, 0)
    ours = dataclasses.replace(meta, span=span)
    subsegment = 100_000 * meta.document + np.where(meta.leave == end, 10_000, meta.leave)
    subsegment = np.where(meta.leave > 0, subsegment, -1)
    theirs = reference.molmo2_visible(subsegment, span > 0)
    assert np.array_equal(allowed(ours, ours), theirs)
    assert np.array_equal(dense_mask(tile_table(ours, ours)), allowed(ours, ours))


def test_windows_and_chunks_end_where_a_branch_does() -> None:
    """Trees of five levels: a window reaches into the order of a neighbouring branch but must not
    see it.
    """
    for seed in range(12):
        row = metadata(
            random_batch(
                np.random.default_rng(seed), 40, documents=2, depth=5, images=bool(seed % 2)
            )
        )
        for reach in (Reach(4), Reach(9), Reach(0, 5), Reach(4, 11)):
            expected = reference.visible(row, row, reach)
            assert np.array_equal(dense_mask(tile_table(row, row, reach)), expected), (seed, reach)


def test_a_token_is_as_deep_as_its_path_is_long() -> None:
    for seed in range(20):
        batch = random_batch(np.random.default_rng(seed), 60, documents=3, padding=True, depth=5)
        assert np.array_equal(
            metadata(batch).depth[batch.leave > 0], batch.position_ids[batch.leave > 0]
        )


def test_a_branch_sees_its_prefix_and_itself_only() -> None:
    branch = np.array([0, 0, 1, 1, 2, 2])
    mask = allowed(*[Metadata.of_documents(np.zeros(6, int), branch)] * 2)
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_padding_sees_nothing_and_is_seen_by_nobody() -> None:
    meta = Metadata.of_documents(np.array([0, -1, 0, -1]), span=np.array([1, 1, 1, 0]))
    mask = dense_mask(tile_table(meta, meta))
    assert not mask[[1, 3]].any() and not mask[:, [1, 3]].any() and mask[0, 2]
    nothing = Metadata.of_documents(np.full(4, -1))
    assert tile_table(nothing, nothing).rows == () and tile_table(nothing, nothing).area == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_plain_pack_on_one_process_costs_one_kernel_call_per_document(lengths: list[int]) -> None:
    table = tile_table(plain(*lengths), plain(*lengths))
    assert [len(row.tiles) for row in table.rows] == [1] * len(lengths)
    kinds = [tile.kind for row in table.rows for tile in row.tiles]
    assert kinds == [CAUSAL if n > 1 else FULL for n in lengths]
    assert table.area == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_number_of_tiles_grows_with_documents_not_with_tokens(cp: int) -> None:
    for scale in (1, 50):
        lengths = [scale * n for n in (64, 16, 128, 8, 40)]
        meta = plain(*lengths)
        chunks = np.arange(len(meta)).reshape(2 * cp, -1)
        for rank in range(cp):
            mine = meta.take(np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]]))
            tiles = sum(len(row.tiles) for row in tile_table(mine, meta).rows)
            assert tiles <= 2 * len(lengths) + 2 * 2, (
                "each document, and each of the two cuts, adds at most two tiles"
            )


def test_a_long_mixed_pack_is_planned_in_milliseconds_without_a_quadratic_mask() -> None:
    meta = plain(*[37] * 2000)
    table = tile_table(meta, meta)
    assert sum(len(row.tiles) for row in table.rows) == 2000
    image = random_batch(
        np.random.default_rng(0), 100_000, documents=50, branches=True, images=True
    )
    whole = metadata(image)
    assert tile_table(whole, whole).area > 0  # a mask of 100,000 x 100,000 would be 10 GB


def test_a_part_is_made_once_for_a_function_and_its_arguments() -> None:
    table = plain(3).own_table
    # two functions with the same name
    first, second = (once(lambda table, number: [number]) for _ in range(2))
    parts = [first(table, 1), first(table, 2), second(table, 1)]
    assert parts == [[1], [2], [1]] and first(table, 1) is parts[0] is not second(table, 1)
