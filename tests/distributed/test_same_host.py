"""Messages from memory to memory have gloo's results in any order of waits, and name a lost rank."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import socket
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megacp.distributed import same_host
from megacp.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    gather_into,
    gather_objects,
    irecv,
    isend,
    reduce_scatter,
    start_all_to_all,
    start_shift,
)
from megacp.distributed.grid import Axis, build_grid, split_axis
from megacp.distributed.same_host import connect_host
from megacp.distributed.shape import GridShape
from megacp.training.start.launch import report_failure
from tests.ranks import RankError, grid, run_ranks

SIZES = (1, 7, 1024, 1025, 3000, 70_001)
"""Elements of a block, below and above 4,096 bytes."""


def world_of(world_size: int) -> Axis:
    axis = grid(dp=world_size).world
    assert axis.local is not None, "ranks of one machine did not find each other"
    return axis


def everything(axis: Axis) -> list[torch.Tensor]:
    """Return a result of each collective and message for each size and some dtypes; some splits are
    empty.
    """
    found = []
    for seed, n in enumerate(SIZES):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(100 * seed + axis.rank)
            x = torch.randint(-8, 8, (axis.size * n,), generator=generator).to(
                dtype
            )  # sums are exact in any order
            out = x.new_empty(axis.size * axis.size * n)
            sends = [(axis.rank + 2 * other) % 3 * n for other in range(axis.size)]
            arrives = [(other + 2 * axis.rank) % 3 * n for other in range(axis.size)]
            split = torch.randn(sum(sends), 2, generator=generator).to(dtype)
            found += [
                all_gather(x, axis),
                gather_into(out, x, axis).wait(),
                reduce_scatter(x, axis),
            ]
            found += [all_reduce(x, axis), all_reduce(x, axis, "max"), start_shift(x, axis).wait()]
            found.append(start_all_to_all(split, axis, sends, arrives).wait())
    return found


def _both_ways(rank: int, world_size: int) -> bool:
    axis = world_of(world_size)
    pairs = zip(everything(axis), everything(dataclasses.replace(axis, local=None)), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.slow
def test_every_call_brings_the_bits_that_gloo_brings(world_size: int) -> None:
    assert run_ranks(_both_ways, world_size) == [True] * world_size


def gather(value: object) -> list[object]:
    """Gather objects of all ranks over gloo, as `connect_host` needs it."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _sends_first(rank: int, world_size: int) -> bool:
    """Both ranks wait for their sends before they receive; messages arrive on two axes in reverse
    order.
    """
    one, two = grid(dp=2).world, grid(dp=2).dp
    buffers = [torch.empty(200_000), torch.empty(100_000)]
    received = [irecv(x, axis, 1 - rank) for x, axis in zip(buffers, (one, two), strict=True)]
    sent = [
        isend(torch.full((len(x),), float(rank)), axis, 1 - rank)
        for x, axis in zip(buffers, (one, two), strict=True)
    ]
    for handle in (*sent, *reversed(received)):
        handle.wait()
    return all(bool((x == 1 - rank).all()) for x in buffers)


def test_two_ranks_that_wait_for_what_they_send_do_not_stop_each_other() -> None:
    assert run_ranks(_sends_first, 2) == [True, True]


def _sends_and_goes_elsewhere(rank: int, world_size: int) -> bool:
    axis, count = grid(dp=2).world, 3000
    if rank == 0:
        for handle in [isend(torch.tensor([float(i)]), axis, 1) for i in range(count)]:
            handle.wait()
        barrier(axis)  # gloo's barrier, which does not process messages
        return True
    time.sleep(0.5)
    right = [irecv(torch.empty(1), axis, 0).wait().item() for _ in range(count)] == list(
        range(count)
    )
    barrier(axis)
    return right


def test_what_a_rank_has_waited_for_is_on_its_way_when_it_goes_elsewhere() -> None:
    assert run_ranks(_sends_and_goes_elsewhere, 2, timeout=20) == [True, True]


def _of_parts(rank: int, world_size: int) -> list[float]:
    inner, outer = split_axis(grid(cp=4).cp, 2)
    assert (
        inner.local is not None
        and outer.local is not None
        and inner.local.number != outer.local.number
    )
    x = torch.full((5000,), float(rank))
    return [start_shift(x, axis).wait()[0].item() for axis in (inner, outer)]


def test_parts_of_an_axis_have_messages_of_their_own() -> None:
    assert run_ranks(_of_parts, 4) == [[1, 2], [0, 3], [3, 0], [2, 1]]


def _refused(rank: int, world_size: int) -> list[str]:
    """Return the errors for a message of a wrong size on rank 1, and for a late rank on rank 0."""
    quick = build_grid(GridShape(dp=2), rank, timeout=datetime.timedelta(seconds=0.5)).world
    said = []
    for start in (
        lambda: isend(torch.zeros(3), quick, 1),
        lambda: start_shift(torch.zeros(2000), quick),
    ):
        try:
            if rank == 0:
                start().wait()
            elif not said:
                irecv(torch.zeros(4), quick, 0).wait()
        except RuntimeError as error:
            said.append(str(error))
    gather_objects(said, grid(dp=2).world)
    return said


def test_a_message_of_another_size_and_a_rank_that_is_late_are_told() -> None:
    late, other = run_ranks(_refused, 2)
    assert late == ["timed out after 0.5 s of waiting for messages from rank 1 on this machine"]
    assert other[0] == "rank 0 sent 12 bytes, but 16 bytes were expected"


def _dies(rank: int, world_size: int) -> None:
    axis = grid(dp=2).world
    if rank == 1:
        time.sleep(0.3)
        os._exit(7)
    all_gather(torch.zeros(2000), axis)


def test_a_rank_that_is_gone_ends_the_wait_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="connection closed by rank 1 on this machine|exit code 7"):
        run_ranks(_dies, 2)
    assert time.monotonic() - start < 30


def _ends_while_it_is_read(rank: int, world_size: int) -> None:
    """Rank 1 announces a tensor and ends; rank 0 reads it after that process has lost its memory."""
    axis = grid(dp=2).world
    assert axis.local is not None
    if rank == 1:
        isend(torch.zeros(2000), axis, 0)
        os._exit(7)
    while axis.local.host.ended() != [1]:
        time.sleep(0.01)
    try:
        irecv(torch.empty(2000), axis, 1).wait()
    except RuntimeError as error:
        raise RuntimeError(report_failure(error, "step 3", axis, 0.1)) from None


def test_a_rank_that_ends_while_its_memory_is_read_is_named() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(_ends_while_it_is_read, 2)
    told = "rank 0 failed in step 3: RuntimeError: rank 1 on this machine ended while its memory was being read"
    assert told in str(raised.value) and "\nrank 1 of this machine ended\n" in str(raised.value)
    assert "No such process" not in str(raised.value)


def _not_readable(rank: int, world_size: int) -> str:
    """Return rank 0's error for memory that it may not read."""
    axis = grid(dp=2).world
    x = torch.zeros(2000)
    if rank == 1:
        sent = isend(x, axis, 0)
        barrier(axis)
        del sent
        return ""
    refusal = PermissionError(errno.EPERM, "Operation not permitted")
    try:
        with mock.patch.object(same_host, "_copy_from", mock.Mock(side_effect=refusal)):
            irecv(x, axis, 1).wait()
        return "read"
    except RuntimeError as error:
        return str(error)
    finally:
        barrier(axis)


def test_the_owner_of_a_memory_that_cannot_be_read_is_named() -> None:
    told, _ = run_ranks(_not_readable, 2)
    assert told == "the memory of rank 1 on this machine cannot be read: Operation not permitted"


def is_answered(process: int) -> bool:
    """Return whether the socket of a rank is open; its threads keep it briefly after the process
    has ended.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
        contextlib.suppress(ConnectionRefusedError),
    ):
        caller.connect(f"\0megacp {process}")
        return True
    return False


def _ends_before_it_is_connected(rank: int, world_size: int, lost: int) -> None:
    """End one rank before it connects to the other ranks; all ranks can read each other."""
    gathered = list[Any]()

    def gather_and_end(value: object) -> list[object]:
        values = gather(value)
        gathered.append(values)
        if len(gathered) == 2 and rank == lost:
            os._exit(7)
        if len(gathered) == 2:
            _machine, process, _probe = gathered[0][lost]
            while is_answered(process):
                time.sleep(0.01)
        return values

    connect_host(rank, gather_and_end)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_ends_before_it_is_connected_is_named(lost: int) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match=f"RuntimeError: rank {lost} on this machine ended (before|while)"
    ):
        run_ranks(_ends_before_it_is_connected, 2, lost)
    assert time.monotonic() - start < 30


def _one_cannot_read(rank: int, world_size: int, blind: int) -> bool:
    with mock.patch.object(same_host, "_is_read", lambda process, probe: rank != blind):
        return connect_host(rank, gather) is None


@pytest.mark.parametrize("blind", [0, 2])
def test_where_one_rank_cannot_read_another_all_use_gloo(blind: int) -> None:
    assert run_ranks(_one_cannot_read, 3, blind) == [True] * 3


def _elsewhere(rank: int, world_size: int) -> list[bool]:
    """Ranks 0 and 1 are on one machine, ranks 2 and 3 on another."""
    with mock.patch.object(same_host, "_machine", lambda: f"machine {rank // 2}"):
        found = connect_host(rank, gather)
    assert found is not None
    pairs, minute = [(0, 1), (2, 3), (0, 2), (0, 1, 2, 3)], datetime.timedelta(minutes=1)
    return [found.channel("a", ranks, minute) is not None for ranks in pairs if rank in ranks]


def test_only_ranks_of_one_machine_read_each_other() -> None:
    assert run_ranks(_elsewhere, 4) == [
        [True, False, False],
        [True, False],
        [True, False, False],
        [True, False],
    ]
