"""Image shards: the requirements of the partition against brute force, the named cases, the three strategies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.data.image_shards import (
    BOUNDARY_DTYPE,
    compute_image_shard_boundaries,
    units_of,
)
from tests.reference.packing import least_largest_cost

UNITS = st.lists(st.integers(1, 9), max_size=8)


def shards(images: list[int], ranks: int) -> list[list[int]]:
    """Images of the units of each rank, for pooled tokens = 10 x images; the table is checked on the way."""
    bounds = np.cumsum(images, dtype=np.int64), np.cumsum(images, dtype=np.int64) * 10
    table = compute_image_shard_boundaries(*bounds, ranks)
    assert table.dtype == BOUNDARY_DTYPE and np.array_equal(table["end_pool_idx"], 10 * table["end_image_idx"])
    parts = [units_of(table, bounds[0], rank) for rank in range(ranks)]
    assert list(itertools.chain(*parts)) == list(range(len(images))), "every unit once, in ascending order"
    return [[images[u] for u in part] for part in parts]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(UNITS, st.integers(1, 6))
def test_the_largest_cost_is_the_optimum_and_no_rank_starves_needlessly(images: list[int], ranks: int) -> None:
    parts = shards(images, ranks)
    assert max(map(sum, parts)) == least_largest_cost(images, ranks)
    assert sum(not part for part in parts) == max(0, ranks - len(images))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=12), st.integers(1, 8))
@pytest.mark.slow
def test_every_field_of_the_table_counted_by_hand(units: list[tuple[int, int]], ranks: int) -> None:
    """Would catch pooled ranges that are derived from images, and a table that its own checker alone finds right."""
    crops, pooled = [c for c, _ in units], [p for _, p in units]
    bounds = np.cumsum(crops, dtype=np.int64), np.cumsum(pooled, dtype=np.int64)
    table = compute_image_shard_boundaries(*bounds, ranks)
    edges = {(sum(crops[:unit]), sum(pooled[:unit])) for unit in range(len(units) + 1)}
    before, largest = (0, 0), 0
    for row in table.tolist():
        start_image, end_image, start_pool, end_pool, most = row
        assert (start_image, start_pool) == before and (end_image, end_pool) in edges
        before, largest = (end_image, end_pool), max(largest, end_pool - start_pool)
        assert most == table["max_num_tokens"][0]
    assert before == (sum(crops), sum(pooled)) and largest == table["max_num_tokens"][0]


@pytest.mark.parametrize(
    ("images", "ranks", "expected"),
    [
        ([1, 2], 2, [[1], [2]]),
        ([1, 3], 3, [[1], [3], []]),
        ([2, 1, 1, 3], 4, [[2], [1], [1], [3]]),
        ([2, 1, 3, 1], 4, [[2], [1], [3], [1]]),
        ([], 3, [[], [], []]),
        ([5], 4, [[5], [], [], []]),
        ([9] + [1] * 128, 2, [[9] + [1] * 60, [1] * 68]),
        ([1, 1, 64, 1, 1], 2, [[1, 1, 64], [1, 1]]),
    ],
)
def test_cases_that_a_greedy_split_gets_wrong(images: list[int], ranks: int, expected: list[list[int]]) -> None:
    found = shards(images, ranks)
    assert max(map(sum, found)) == max(map(sum, expected))
    assert [len(part) == 0 for part in found] == [len(part) == 0 for part in expected]
    if len(images) <= ranks:
        assert found == expected


def test_a_nine_crop_image_before_a_long_video_is_balanced() -> None:
    loads = [sum(part) for part in shards([9] + [1] * 128, 2)]
    assert sorted(loads) == [68, 69]
