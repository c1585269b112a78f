"""Rank arithmetic as properties up to 4,096 ranks, and real groups of shapes that once hung."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.distributed.collectives import all_gather, all_reduce, barrier
from megacp.distributed.grid import build_grid, connect, single_axis, split_axis
from megacp.distributed.shape import AXES, GridShape
from megacp.training.checkpoint.commit import SaveError
from megacp.training.start import launch
from megacp.training.start.launch import (
    Rendezvous,
    World,
    device_type,
    fresh_store,
    join,
    named,
    pick_device,
    rendezvous,
    report_failure,
    run_store,
    stop,
    was_hit,
    world_from_environment,
)
from tests.faults.processes import free_port
from tests.ranks import grid, run_ranks
from tests.reference import grid as reference


def groups_of(shape: GridShape, *axes: str) -> list[tuple[int, ...]]:
    """Return a partition of the ranks, ordered by first ranks."""
    places = ((rank, shape.coordinates(rank)) for rank in range(shape.world_size))
    return [
        shape.members(rank, axes) for rank, place in places if not any(place[name] for name in axes)
    ]


@st.composite
def shapes(draw: st.DrawFn, limit: int = 4096) -> GridShape:
    """Draw a grid of at most `limit` ranks; its axes are filled in random order."""
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
def test_groups_partition_the_ranks_and_equal_megatrons_order(
    shape: GridShape, axes: tuple[str, ...]
) -> None:
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
    assert all(0 <= place[name] < getattr(shape, name) for name in AXES) and shape.members(
        rank, ()
    ) == (rank,)
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
    with pytest.raises(
        ValueError, match="tp 2 x cp 1 x dp 1 x pp 2 needs 4 ranks, but there are 1; change --nproc"
    ):
        build_grid(GridShape(tp=2, pp=2), 0)


def sum_ranks_over_every_axis(
    rank: int, world_size: int, shape: dict[str, int]
) -> list[tuple[object, ...]]:
    mine = grid(**shape)
    channels = [
        mine.pipeline_channel(way, stage) for way in ("forward", "backward") for stage in (0, 1)
    ]
    named = {
        **{"_".join(k): v for k, v in mine.axes.items()},
        "embedding": mine.embedding,
        "world": mine.world,
    }
    named |= {f"channel{i}": axis for i, axis in enumerate(channels)}
    inner, outer = split_axis(mine.world, 2)
    assert (inner.global_ranks, outer.global_ranks) == (
        (rank // 2 * 2, rank // 2 * 2 + 1),
        (rank % 2, rank % 2 + 2),
    )
    named |= {"channel inner": inner, "channel outer": outer}
    sums = []
    for name, axis in named.items():
        assert axis.global_ranks[axis.rank] == rank
        sums.append((name, axis.global_ranks, all_reduce(torch.tensor([float(rank)]), axis).item()))
    return sums


@pytest.mark.parametrize(
    "shape",
    # With three or more stages, only the first and the last have an embedding group. torch names
    # groups by the number of groups that a rank has created, so a group on only some ranks would
    # make every later group hang.
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
    """Middle stages have no embedding group, so other ranks must not wait for them."""
    assert run_ranks(_connected, 6, {"pp": 3, "cp": 2}) == [0] * 6


KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
STORE_KEYS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove torchrun's variables from the environment."""
    for key in (*KEYS, *STORE_KEYS):
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


def test_the_launchers_variables_are_read_and_may_be_absent(
    environment: pytest.MonkeyPatch,
) -> None:
    assert world_from_environment() == World(0, 1, 0, 1)
    for key, value in zip(KEYS, ("5", "8", "1", "4"), strict=True):
        environment.setenv(key, value)
    assert world_from_environment() == World(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"RANK": "one", "WORLD_SIZE": "8"}, ["RANK=one"]),
        (
            {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "-4"},
            ["LOCAL_WORLD_SIZE=-4"],
        ),
        ({"RANK": "8", "WORLD_SIZE": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
            ["LOCAL_RANK=4"],
        ),
        ({"RANK": "1"}, ["WORLD_SIZE=(not set)"]),
        ({"WORLD_SIZE": "1"}, ["RANK=(not set)"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_ADDR=, MASTER_PORT="]),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "x"},
            ["MASTER_PORT=x"],
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            ["MASTER_PORT=1"],
        ),
    ],
    ids=str,
)
def test_variables_that_cannot_be_meant_are_named(
    environment: pytest.MonkeyPatch, values: dict[str, str], named: list[str]
) -> None:
    for key, value in values.items():
        environment.setenv(key, value)
    with pytest.raises(ValueError) as caught:
        rendezvous(world_from_environment(), 0.3)
    assert all(text in str(caught.value) for text in named)


def together(ranks: Sequence[int], action: Callable[[int], Any]) -> dict[int, Any]:
    """Return the result of `action` or the message of its ValueError, for each rank in a thread."""
    found: dict[int, Any] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = action(rank)
        except ValueError as error:
            found[rank] = f"refused: {error}"

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def at_once(
    size: int, action: Callable[[Rendezvous], str], seconds: float = 5.0, absent: int = -1
) -> list[str]:
    """Return the result or error of `action` for every rank of a rendezvous, as threads over one
    store.
    """
    store, ranks = dist.HashStore(), [rank for rank in range(size) if rank != absent]
    found = together(ranks, lambda rank: action(Rendezvous(rank, size, store, seconds)))
    return [found.get(rank, "") for rank in range(size)]


def test_rank_0_judges_the_values_of_all_and_leaves_last() -> None:
    left: list[int] = []

    def action(rendezvous: Rendezvous) -> str:
        time.sleep(0.3 * (rendezvous.rank == 1))
        verdict = rendezvous.decided_by_rank_0("t", str(rendezvous.rank), ",".join)
        left.append(rendezvous.rank)
        return verdict

    assert at_once(3, action) == ["0,1,2"] * 3 and sorted(left) == [0, 1, 2]
    assert Rendezvous(0, 1, None, 0.0).decided_by_rank_0("t", "a", ",".join) == "a"


@pytest.mark.slow
def test_a_rank_that_gives_no_value_is_named() -> None:
    first, _, third = at_once(
        3, lambda rendezvous: rendezvous.decided_by_rank_0("t", "a", ",".join), 0.2, absent=1
    )
    assert (first, third) == tuple(
        f"refused: no message about the t from rank {rank} within 0.2 s" for rank in (1, 0)
    )


def _life(store: dist.Store, delays: Sequence[float], present: Sequence[int]) -> dict[int, Any]:
    """Return the result of each present rank of three, started after its delay."""

    def join(rank: int) -> dist.Store:
        time.sleep(delays[rank])
        return fresh_store(store, rank, 3, 0.2 if len(present) < 3 else 20.0)

    return together(present, join)


@pytest.mark.slow
@pytest.mark.parametrize("delays", [(0.3, 0.0, 0.1), (0.0, 0.3, 0.0)], ids=str)
def test_each_life_of_a_run_has_a_part_of_the_store_of_its_own(
    monkeypatch: pytest.MonkeyPatch, delays: tuple[float, ...]
) -> None:
    """Late ranks, an incomplete start, and complete starts."""
    monkeypatch.setattr("megacp.training.start.launch._READING_SECONDS", 0.1)
    store = dist.HashStore()
    for life in range(2):
        parts = _life(store, delays, (0, 1, 2))
        parts[0].set("who", f"life {life}")
        assert [parts[rank].get("who") for rank in range(3)] == [f"life {life}".encode()] * 3
        for present in ((0, 1), (1, 2)):
            broken = _life(store, (0.0, 0.0, 0.0), present)
            assert all("waited 0.2 s for the 3 ranks" in str(text) for text in broken.values())
    missing = _life(dist.HashStore(), (0.0, 0.0, 0.0), (0, 1))
    assert all("no message from rank 2; start every rank" in str(text) for text in missing.values())


def test_devices_and_threads_are_shared_by_the_ranks_of_a_machine(
    environment: pytest.MonkeyPatch,
) -> None:
    for gpus, ranks, launcher, expected in (
        (4, 4, "torchrun", "cuda"),
        (4, 5, "torchrun", "LOCAL_WORLD_SIZE"),  # not one CPU rank next to idle GPUs
        (1, 8, "torchrun", "LOCAL_WORLD_SIZE"),
        (1, 8, "srun", "cuda"),  # --gpus-per-task=1
        (2, 8, "srun", "LOCAL_WORLD_SIZE"),
        (0, 8, "srun", "cpu"),
    ):
        environment.setattr(launch, "set_defaults", lambda values: None)
        environment.setattr(torch.cuda, "is_available", lambda count=gpus: count > 0)
        environment.setattr(torch.cuda, "device_count", lambda count=gpus: count)
        environment.setenv("RANK", "0")
        environment.delenv("LOCAL_RANK", raising=False)
        if launcher == "torchrun":
            environment.setenv("LOCAL_RANK", "0")
        if expected in ("cuda", "cpu"):
            assert device_type(World(0, ranks, 0, ranks)) == expected
        else:
            with pytest.raises(ValueError, match=expected):
                device_type(World(0, ranks, 0, ranks))
    environment.delenv("RANK")
    environment.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    try:
        assert pick_device(World(0, 4096, 0, 4096)).type == "cpu"
        assert torch.get_num_threads() == 1
        assert (
            join(rendezvous(World(), 1.0), GridShape()).world.size == 1
            and not dist.is_initialized()
        )
        stop()
    finally:
        torch.set_num_threads(threads)


def grown_by_collectives(rank: int, world_size: int) -> float:
    """Return the MiB that remain after a hundred all-gathers with new 8 MiB outputs."""
    axis, x = grid(dp=world_size).dp, torch.zeros(1 << 20)
    sizes = []
    for _ in range(2):
        for _ in range(50):
            all_gather(x, axis)
        sizes.append(
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )
    return sizes[1] - sizes[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_rank_does_not_grow_with_the_number_of_collectives() -> None:
    assert max(run_ranks(grown_by_collectives, 2)) < 20  # 60 to 180 with glibc's own threshold


def _reported(rank: int, world_size: int, silent: int) -> tuple[str, float]:
    """Return a rank's error and the seconds until it; rank 1 fails, the other ranks are in a
    collective with it.
    """
    run_store().delete_key(f"megacp_failure/{rank}")  # other tests of this pool have used it
    world = grid(dp=world_size).world
    barrier(world)
    begun = time.monotonic()
    if rank == silent:
        time.sleep(3.0)  # the store may end together with its rank
        return "", 0.0
    error = ValueError("bad input") if rank == 1 else RuntimeError("connection closed by peer")
    text = report_failure(error, "step 1", world, 1.0)
    seconds = time.monotonic() - begun
    time.sleep(1.0)
    return text, seconds


def test_ranks_that_were_hit_tell_the_reason_of_the_first_at_once() -> None:
    found = run_ranks(_reported, 3, -1)
    assert all("rank 1 failed in step 1: ValueError: bad input" in text for text, _ in found)
    assert max(seconds for _, seconds in found) < 2.5


def test_a_rank_that_says_nothing_is_named() -> None:
    (first, _), _, (third, _) = run_ranks(_reported, 3, 1)
    for text in (first, third):
        assert "no message from rank 1 in step 1: stopped, dead, or still computing" in text


def test_what_the_loss_of_a_rank_has_caused_is_told_from_an_own_mistake() -> None:
    """If a rank is lost, reading or writing a checkpoint fails on the other ranks with a specific
    error.
    """
    lost = ValueError("a rank was lost")
    lost.__cause__ = RuntimeError("connection closed by peer")
    full = SaveError("No space left on device")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert was_hit(lost) and was_hit(lost.__cause__)
    assert not was_hit(full) and not was_hit(ValueError("bad input"))


def _joins(rank: int, world_size: int, port: int) -> str:
    """Return a rank's error for a process group that rank 1 does not create."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, wait_for_workers=False)
    if rank == 1:
        return ""
    met = Rendezvous(rank, world_size, store, 5.0)
    late = dist.DistStoreError("wait timeout after 50ms, keys: /0//cpu//0/1")
    with (
        mock.patch.object(dist, "is_initialized", lambda: False),
        mock.patch.object(dist, "init_process_group", mock.Mock(side_effect=late)),
        pytest.raises(dist.DistStoreError) as raised,
    ):
        join(met, GridShape(dp=world_size))
    return raised.value.__notes__[0]


def test_a_rank_that_does_not_come_to_make_the_process_group_is_named() -> None:
    told, _ = run_ranks(_joins, 2, free_port())
    assert told == "rank 1 did not join the process group: stopped, dead, or still computing"


def _of_a_frozen_store(rank: int, world_size: int) -> str:
    with mock.patch.object(launch, "run_store", lambda: time.sleep(30)):
        return report_failure(ValueError("bad input"), "step 1", grid(dp=world_size).world, 0.1)


def test_a_store_that_does_not_answer_is_left_behind() -> None:
    for text in run_ranks(_of_a_frozen_store, 2):
        assert "ValueError: bad input\nthe run's store does not answer" in text


def test_many_ranks_are_counted_and_not_listed() -> None:
    assert named([3]) == "rank 3"
    assert named(list(range(20))).endswith("13, 14, 15, and 4 more")
