"""Messages between pairs of ranks: the ring, handles that may be waited for twice, tensors kept alive."""

from __future__ import annotations

import gc

import pytest
import torch

from megacp.core.distributed import collectives
from megacp.core.distributed.collectives import irecv, isend, start_shift
from megacp.core.distributed.grid import Axis
from tests.ranks import grid, run_ranks


def pass_around(rank: int, world_size: int) -> list[list[float]]:
    """`size` shifts bring every tensor home; each rank sees the tensors of the ranks before it, nearest first."""
    axis = grid(cp=world_size).cp
    x = torch.full((3, 2), float(rank), dtype=torch.float64)
    seen = []
    for _ in range(world_size):
        shift = start_shift(x, axis)
        x = shift.wait()
        assert shift.wait() is x, "a second wait must return at once"
        assert (x == x[0, 0]).all()
        seen.append(x[0, 0].item())
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_shift_passes_to_the_next_rank_and_receives_from_the_previous(world_size: int) -> None:
    run_ranks(shift_views_and_overlap, world_size)
    for rank, seen in enumerate(run_ranks(pass_around, world_size)):
        assert seen == [(rank - step) % world_size for step in range(1, world_size + 1)]


def shift_views_and_overlap(rank: int, world_size: int) -> None:
    """Strided input, two shifts under way at once, the sent tensors dropped before the wait."""
    axis = grid(cp=world_size).cp
    first = start_shift(torch.full((2, 50_000), float(rank)).t(), axis)
    second = start_shift(torch.full((7,), 10.0 + rank, dtype=torch.bfloat16), axis)
    gc.collect()
    before = (rank - 1) % world_size
    assert (second.wait() == 10.0 + before).all()
    assert (first.wait() == before).all() and first.wait().shape == (50_000, 2)


def messages_in_order(rank: int, world_size: int) -> list[float]:
    """Rank 0 sends three messages and forgets the tensors; rank 1 has its buffers posted in the same order."""
    axis = grid(pp=world_size).pp
    if rank == 0:
        handles = [isend(torch.full((4, 1000), float(i)).t()[:, :2], axis, 1) for i in range(3)]
        gc.collect()
        for handle in handles + handles:
            assert handle.wait() is handle.wait()
        return []
    handles = [irecv(torch.empty(1000, 2), axis, 0) for _ in range(3)]
    values = [handle.wait() for handle in handles]
    assert all(handle.wait() is value for handle, value in zip(handles, values, strict=True))
    return [value.unique().item() for value in values]


def test_messages_arrive_in_order_and_waits_may_be_repeated() -> None:
    assert run_ranks(messages_in_order, 2) == [[], [0.0, 1.0, 2.0]]


def staged_messages(rank: int, world: int) -> tuple[list[float], list[float], bool]:
    """A ring and single messages that go through the host, as if the tensors lay on a device."""
    axis = grid(cp=world).cp
    x = torch.full((2, 3), float(rank))[:, :2]  # also a view that is not contiguous
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "through_host", lambda x, axis: True)
        shifted = collectives.start_shift(x, axis).wait()
        buffer = torch.empty(2, 2)
        received = collectives.irecv(buffer, axis, (rank - 1) % world)
        sent = collectives.isend(x, axis, (rank + 1) % world)
        message = received.wait()
        sent.wait()
    return shifted.flatten().tolist(), message.flatten().tolist(), message is buffer


def test_messages_through_the_host_arrive_where_they_are_wanted() -> None:
    for rank, (shifted, message, in_place) in enumerate(run_ranks(staged_messages, 3)):
        assert shifted == message == [float((rank - 1) % 3)] * 4
        assert in_place


def test_only_gloo_sends_a_device_tensor_through_the_host() -> None:
    on_device = torch.empty(1, device="meta")
    gloo, nccl = (Axis("cp", 1, 0, (0,), backend=name) for name in ("gloo", "nccl"))
    assert collectives.through_host(on_device, gloo)
    assert not collectives.through_host(on_device, nccl)
    assert not collectives.through_host(torch.empty(1), gloo)
