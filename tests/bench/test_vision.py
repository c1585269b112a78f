"""Figures of images: the optimum they are held against, the plain loop, and rows whose image tokens are features."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import vision as figures
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.data.synthetic.mixed import FRAME_TOKENS, mixed_row
from tests.reference.image_shards import least_largest_cost


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 5))
def test_the_optimum_by_dynamic_programming_is_that_of_all_partitions(costs: list[int], cp: int) -> None:
    """Would catch a benchmark that holds the ranges against themselves."""
    assert figures.least_largest_cost(np.array(costs), cp) == least_largest_cost(costs, cp)


def test_the_plain_loop_starves_ranks_in_the_named_cases() -> None:
    """Would catch a comparison with something better than what it speaks of."""
    parts = {
        (1, 2): [[1, 2], []],
        (1, 3, 0): [[1, 3], [], []],
        (2, 1, 1, 3): [[2], [1, 1], [3], []],
        (1,) * 8: [[1, 1], [1, 1], [1, 1], [1, 1]],
    }
    for key, expected in parts.items():
        crops = np.array([number for number in key if number])
        stops = [0, *figures.greedy_by_images(crops, len(expected))]
        assert [crops[a:b].tolist() for a, b in zip(stops, stops[1:], strict=False)] == expected


def test_synthetic_packs_are_those_of_the_description() -> None:
    for kind in figures.KINDS:
        for seed in range(20):
            crops, pooled = figures.synthetic_units(np.random.default_rng(seed), kind)
            assert 128 <= crops.sum() <= 137 and crops.max() <= 9 and len(pooled) == len(crops)
            assert set((pooled / crops).tolist()) <= {81.0, 144.0}
    assert (figures.synthetic_units(np.random.default_rng(0), "image, video")[0][1:] == 1).all()


def test_every_image_token_of_a_row_is_one_feature_that_travels_at_most_once() -> None:
    row = figures.with_vision(mixed_row(4_096, seed=1))
    assert row.vision is not None and row.vision.num_features == int((row.span > 0).sum()) > 1_000
    tokens = np.diff(row.vision.cum_token_pooling_bounds, prepend=0)
    assert np.count_nonzero(tokens == FRAME_TOKENS) > 5
    for layout in LAYOUTS.values():
        routes = figures.routes_of(row, layout, 4)
        counted = figures.feature_bytes(routes, 8)
        assert counted.routed == 8 * int((routes.source != routes.target).sum())
        assert counted.gathered == 4 * counted.busiest_gathered >= counted.routed >= counted.busiest_routed
