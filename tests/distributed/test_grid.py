"""Rank arithmetic as properties up to 4,096 ranks, and real groups on shapes that once hung."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import AXES, GridShape, build_grid, connect, single_axis, split_axis
from tests.ranks import grid, run_ranks
from tests.reference import grid as reference


def groups_of(shape: GridShape, *axes: str) -> list[tuple[int, ...]]:
    """A partition of the ranks, ordered by their first rank."""
    places = ((rank, shape.coordinates(rank)) for rank in range(shape.world_size))
    return [shape.members(rank, axes) for rank, place in places if not any(place[name] for name in axes)]


@st.composite
def shapes(draw: st.DrawFn, limit: int = 4096) -> GridShape:
    """Any grid of at most `limit` ranks, its axes filled in a random order."""
    sizes, left = {}, limit
    for name in draw(st.permutations(AXES)):
        sizes[name] = draw(st.integers(1, min(left, 64) if left > 1 else 1))
        left //= sizes[name]
    return GridShape(**sizes)


def subsets() -> st.SearchStrategy[tuple[str, ...]]:
    return st.sampled_from([axes for n in range(1, 5) for axes in combinations(AXES, n)])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(shapes(), subsets())
def test_groups_partition_the_ranks_and_equal_megatrons_order(shape: GridShape, axes: tuple[str, ...]) -> None:
    groups = groups_of(shape, *axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    assert {len(group) for group in groups} == {math.prod(getattr(shape, name) for name in axes)}
    sizes = {**{name: getattr(shape, name) for name in AXES}, "ep": 1}
    assert groups == reference.groups(sizes, axes)


@given(shapes(limit=128), subsets(), st.data())
def test_members_are_the_group_of_the_rank_in_ascending_order(
    shape: GridShape, axes: tuple[str, ...], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, shape.world_size - 1))
    members, place = shape.members(rank, axes), shape.coordinates(rank)
    assert all(0 <= place[name] < getattr(shape, name) for name in AXES) and shape.members(rank, ()) == (rank,)
    assert rank in members and list(members) == sorted(set(members))
    assert all(shape.members(peer, axes) == members for peer in members)


def test_megatrons_documented_example_of_tp2_cp2_dp2_pp2() -> None:
    shape = GridShape(tp=2, cp=2, dp=2, pp=2)
    assert groups_of(shape, "tp")[:2] == [(0, 1), (2, 3)]
    assert groups_of(shape, "cp")[:2] == [(0, 2), (1, 3)]
    assert groups_of(shape, "dp")[:2] == [(0, 4), (1, 5)]
    assert groups_of(shape, "pp")[:2] == [(0, 8), (1, 9)]
    assert groups_of(shape, "dp", "cp")[0] == (0, 2, 4, 6)


def test_one_process_needs_no_process_group_and_a_wrong_world_is_refused() -> None:
    one = build_grid(GridShape(), 0)
    assert {axis.size for axis in one.all_axes()} == {1} and one.over("dp", "cp").size == 1
    assert single_axis("tp", 7).global_ranks == (7,)
    with pytest.raises(ValueError, match="tp 2 x cp 1 x dp 1 x pp 2 needs 4 ranks, the world has 1; change --nproc"):
        build_grid(GridShape(tp=2, pp=2), 0)


def sum_ranks_over_every_axis(rank: int, world_size: int, shape: dict[str, int]) -> list[tuple[object, ...]]:
    mine = grid(**shape)
    channels = [mine.pipeline_channel(way, stage) for way in ("forward", "backward") for stage in (0, 1)]
    named = {**{"_".join(k): v for k, v in mine.axes.items()}, "embedding": mine.embedding, "world": mine.world}
    named |= {f"channel{i}": axis for i, axis in enumerate(channels)}
    inner, outer = split_axis(mine.world, 2)
    assert (inner.global_ranks, outer.global_ranks) == ((rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2))
    named |= {"channel inner": inner, "channel outer": outer}
    sums = []
    for name, axis in named.items():
        assert axis.global_ranks[axis.rank] == rank
        sums.append((name, axis.global_ranks, all_reduce(torch.tensor([float(rank)]), axis).item()))
    return sums


@pytest.mark.parametrize(
    "shape",
    # With three stages or more only the first and the last have an embedding group: torch names groups after how many a
    # rank has made, so a group that others lack makes every later one hang.
    [{"pp": 4}, {"tp": 2, "cp": 2}, {"dp": 2, "pp": 2}, {"cp": 4}],
    ids=lambda shape: "x".join(f"{k}{v}" for k, v in shape.items()),
)
def test_every_group_of_a_grid_reaches_exactly_its_members(shape: dict[str, int]) -> None:
    pure = GridShape(**shape)
    for rank, sums in enumerate(run_ranks(sum_ranks_over_every_axis, 4, shape, timeout=30)):
        for name, members, total in sums:
            assert total == sum(members), (rank, name)
            if name not in ("world", "embedding") and not name.startswith("channel"):
                assert members == pure.members(rank, name.split("_"))
        ends = pure.members(rank, ("pp",))[:: max(1, pure.pp - 1)]
        embedding = next(members for name, members, _ in sums if name == "embedding")
        assert embedding == (ends if rank in ends and pure.pp > 1 else (rank,))


def _connected(rank: int, world_size: int, shape: dict[str, int]) -> int:
    made = grid(**shape)
    connect(made.all_axes(), made.device)
    return sum(axis.traffic.total() for axis in made.all_axes())


def test_all_ranks_of_every_axis_meet_once_and_nothing_is_counted() -> None:
    """Middle stages have no embedding, for which others could wait for ever."""
    assert run_ranks(_connected, 6, {"pp": 3, "cp": 2}) == [0] * 6
