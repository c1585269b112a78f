"""The cut of layers into virtual stages against trying every cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.pipeline_parallel.partition import partition, stages
from tests.reference.pipeline import every_partition

costs = st.one_of(
    st.integers(0, 4).map(float),
    st.floats(0, 10, allow_subnormal=False),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], float, float, int]:
    layers = draw(st.lists(costs, min_size=1, max_size=8))
    return layers, draw(costs), draw(costs), draw(st.integers(1, len(layers)))


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=300)
@given(cases())
def test_no_cut_is_cheaper_or_as_cheap_and_more_even(case: tuple[list[float], float, float, int]) -> None:
    found = partition(*case)
    rated = [
        (max(parts), sum(c * c for c in parts), sum(len(r) ** 2 for r in ranges), [r.stop for r in ranges], ranges)
        for ranges, parts in every_partition(*case)
    ]
    assert found == min(rated, key=lambda row: row[:4])[-1]


@settings(deadline=None, derandomize=True)
@given(cases())
def test_the_parts_cover_the_layers_in_order_and_none_is_empty(case: tuple[list[float], float, float, int]) -> None:
    found = partition(*case)
    assert len(found) == case[-1]
    assert [layer for part in found for layer in part] == list(range(len(case[0])))
    assert all(len(part) >= 1 for part in found)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert partition([1.0] * 8, 0.0, 3.0, 2) == [range(0, 5), range(5, 8)]
    assert partition([1.0] * 8, 1.0, 3.0, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]


def test_equal_layers_that_do_not_divide_leave_the_first_stages_lighter() -> None:
    """The first stages hold the most activations."""
    assert partition([0.1] * 7, 0.0, 0.0, 3) == [range(0, 2), range(2, 4), range(4, 7)]


def test_the_dearest_part_counts_before_evenness() -> None:
    assert partition([1.0, 6.0, 3.0, 3.0], 0.0, 0.0, 3) == [range(0, 1), range(1, 2), range(2, 4)]


def test_many_layers_are_cut_in_little_time() -> None:
    found = partition([1.0 + 0.01 * (i % 7) for i in range(160)], 2.5, 4.75, 64)
    assert len(found) == 64 and max(len(part) for part in found) <= 3


def test_virtual_stages_are_dealt_round_the_stages() -> None:
    ranges = [range(0, 1), range(1, 2), range(2, 4), range(4, 5), range(5, 7), range(7, 8)]
    assert stages(ranges, 2, 3) == [
        [range(0, 1), range(2, 4), range(5, 7)],
        [range(1, 2), range(4, 5), range(7, 8)],
    ]
