"""Every collective and message on real ranks equals its definition over the inputs of all ranks."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megacp.distributed import collectives
from megacp.distributed import differentiable as d
from megacp.distributed.grid import Axis, single_axis
from tests.ranks import grid, run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32)
# Lengths on both sides of the sizes at which gloo's rings replace a single round of messages.
SIZES = (1, 7, 8_000)


def inputs(
    world_size: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """Return the inputs of all ranks; every rank draws the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator) * 100).to(dtype) for _ in range(world_size)]


def world(world_size: int) -> Axis:
    return grid(dp=world_size).world


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order; bf16 is accumulated in fp32 and rounded once."""
    wide = torch.float32 if parts[0].dtype == torch.bfloat16 else parts[0].dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = result + part.to(wide)
    return result.to(parts[0].dtype)


def assert_sum(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare exactly, except for fp32 and fp64 sums: gloo's ring may add in another order, which
    changes a few units in the last place.
    """
    assert found.dtype == expected.dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 5e-6}.get(found.dtype, 0.0)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=100 * tolerance)


def check_reductions(rank: int, world_size: int) -> None:
    axis = world(world_size)
    for dtype in DTYPES:
        for n in SIZES:
            parts = inputs(world_size, (n, 3), dtype)
            mine = parts[rank]
            before = mine.clone()
            summed = collectives.all_reduce(mine, axis)
            assert_sum(summed, total(parts))
            assert summed._base is None, "torch warns of a sharded module that returns a view"
            stacked = torch.stack(parts)
            assert torch.equal(collectives.all_reduce(mine, axis, "max"), stacked.amax(0))
            assert torch.equal(collectives.all_reduce(mine, axis, "min"), stacked.amin(0))
            parts = inputs(world_size, (world_size * n, 3), dtype, seed=1)
            block = slice(rank * n, (rank + 1) * n)
            assert_sum(collectives.reduce_scatter(parts[rank], axis), total(parts)[block])
            assert torch.equal(mine, before), "an input was changed in place"
    assert torch.equal(
        collectives.all_reduce(torch.tensor(rank), axis), torch.tensor(sum(range(world_size)))
    )


def as_on_nccl(axis: Axis, patch: pytest.MonkeyPatch) -> Axis:
    """Return an axis that takes the code path of NCCL; a gloo group has no reduce-scatter."""

    def scatter(
        out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> SimpleNamespace:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        out.copy_(whole.tensor_split(axis.size)[axis.rank])
        return SimpleNamespace(wait=lambda: None)

    patch.setattr(collectives, "_reduce_scatter_single", scatter)
    return dataclasses.replace(axis, backend="nccl")


def sums_in_place(rank: int, world_size: int) -> None:
    parts = inputs(world_size, (world_size * 4, 3), torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        axis = as_on_nccl(world(world_size), patch)
        for in_place in (False, True):
            given = parts[rank].clone()
            found = collectives.start_reduce_scatter(given, axis, in_place=in_place).wait()
            assert_sum(found, total(parts)[4 * rank : 4 * rank + 4])
            assert (found.data_ptr() == given[4 * rank].data_ptr()) == in_place
            assert in_place or torch.equal(given, parts[rank])


def test_a_sum_stands_in_its_block_of_the_input_where_that_is_allowed_alone() -> None:
    run_ranks(sums_in_place, 3)


def check_moves(rank: int, world_size: int) -> None:
    axis = world(world_size)
    for dtype in DTYPES:
        for n in (0, *SIZES, 100_000):
            parts = inputs(world_size, (n, 3), dtype)
            assert torch.equal(collectives.all_gather(parts[rank], axis), torch.cat(parts))
            even = inputs(world_size, (world_size * n, 2), dtype, seed=2)
            expected = torch.cat([part[rank * n : (rank + 1) * n] for part in even])
            assert torch.equal(collectives.all_to_all(even[rank], axis), expected)
    objects = collectives.gather_objects({"rank": rank, "text": "x" * rank}, axis)
    assert objects == [{"rank": r, "text": "x" * r} for r in range(world_size)]
    collectives.barrier(axis)


def check_strided_views(rank: int, world_size: int) -> None:
    """gloo reduces strided views incorrectly without an error, and refuses to exchange them."""
    axis = world(world_size)
    for n in (2 * world_size, 20_000):
        wide = inputs(world_size, (n, world_size, 6), torch.float64)
        for view in (
            lambda x: x[..., ::2],
            lambda x: x.transpose(0, 1),
            lambda x: x[::2],
            lambda x: x[:, :, 1],
        ):
            parts = [view(x) for x in wide]
            mine = parts[rank]
            assert not mine.is_contiguous()
            assert_sum(collectives.all_reduce(mine, axis), total(parts))
            other_strides = mine.contiguous() if rank == 0 else mine
            assert_sum(collectives.all_reduce(other_strides, axis), total(parts))
            assert torch.equal(collectives.all_gather(mine, axis), torch.cat(parts))
            rows = mine.shape[0] // world_size
            block = slice(rank * rows, (rank + 1) * rows)
            assert_sum(collectives.reduce_scatter(mine, axis), total(parts)[block])
            assert torch.equal(
                collectives.all_to_all(mine, axis), torch.cat([part[block] for part in parts])
            )


def check_uneven_all_to_all(rank: int, world_size: int) -> None:
    """Random splits with zeros, ranks that send nothing, and rows with several dims."""
    axis = world(world_size)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        splits = torch.randint(0, 4, (world_size, world_size), generator=generator)  # [from, to]
        splits[seed % world_size] = 0
        rows = [
            inputs(1, (int(splits[r].sum()), 2, 3), torch.bfloat16, seed=10 + r)[0]
            for r in range(world_size)
        ]
        expected = torch.cat([rows[r].split(splits[r].tolist())[rank] for r in range(world_size)])
        pending = collectives.start_all_to_all(
            rows[rank], axis, splits[rank].tolist(), splits[:, rank].tolist()
        )
        assert torch.equal(pending.wait(), expected)
        back = collectives.all_to_all(
            pending.wait(), axis, splits[:, rank].tolist(), splits[rank].tolist()
        )
        assert torch.equal(back, rows[rank])


def check_bf16_accumulates_in_fp32(rank: int, world_size: int) -> None:
    """In bf16, 256 + 1 is 256, so a bf16 sum of one 256 and several ones would lose every one."""
    axis = world(world_size)
    for n in (4, 20_000):
        x = torch.full((world_size * n,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        expected = torch.tensor(256.0 + world_size - 1).to(torch.bfloat16)
        assert (collectives.all_reduce(x, axis) == expected).all()
        assert (collectives.reduce_scatter(x, axis) == expected).all()


def check_async(rank: int, world_size: int) -> None:
    """Several operations in flight are awaited twice in another order; inputs are dropped in
    between.
    """
    axis = world(world_size)
    for n in (5, 90_000):
        parts = inputs(world_size, (world_size * n, 3), torch.float32)
        starts = (
            collectives.start_all_gather,
            collectives.start_reduce_scatter,
            collectives.start_all_to_all,
        )
        gathered, summed, exchanged = started = [
            start(parts[rank].clone(), axis) for start in starts
        ]
        block = slice(rank * n, (rank + 1) * n)
        assert torch.equal(exchanged.wait(), torch.cat([part[block] for part in parts]))
        assert_sum(summed.wait(), total(parts)[block])
        assert torch.equal(gathered.wait(), torch.cat(parts))
        assert all(pending.wait() is pending.wait() for pending in started)


def check_traffic(rank: int, world_size: int) -> None:
    """Bytes by the textbook formulas."""
    axis, whole = world(world_size), world_size * 10 * 2 * 8
    axis.traffic.clear()
    x = torch.ones(world_size * 10, 2, dtype=torch.float64)
    for collective in (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all):
        collective(x, axis)
    share = whole * (world_size - 1) // world_size
    assert axis.traffic == {
        "all_gather": whole * (world_size - 1),
        "reduce_scatter": share,
        "all_to_all": share,
    }


CHECKS = (check_reductions, check_moves, check_strided_views, check_uneven_all_to_all)
CHECKS += (check_bf16_accumulates_in_fp32, check_async, check_traffic)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collectives_equal_their_definition(check: object, world_size: int) -> None:
    run_ranks(check, world_size)


def reduced_bits(rank: int, world_size: int) -> list[list[int]]:
    axis, bits = world(world_size), []
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            mine = inputs(world_size, (world_size * n,), dtype)[rank]
            scattered = collectives.all_gather(collectives.reduce_scatter(mine, axis), axis)
            bits += [
                x.view(torch.int16).tolist()
                for x in (collectives.all_reduce(mine, axis), scattered)
            ]
    return bits


@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions_give_the_same_bits_on_every_rank_and_every_run(world_size: int) -> None:
    first, second = run_ranks(reduced_bits, world_size), run_ranks(reduced_bits, world_size)
    assert all(bits == first[0] for bits in first + second)


def test_size_one_is_the_identity_without_a_process_group() -> None:
    axis, x = single_axis("tp"), torch.arange(6.0).view(3, 2)
    moves = (
        collectives.all_reduce,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_to_all,
    )
    assert all(torch.equal(collective(x, axis), x) for collective in moves)
    assert torch.equal(collectives.all_to_all(x, axis, [3], [3]), x)
    assert collectives.gather_objects("a", axis) == ["a"] and axis.traffic.total() == 0
    collectives.barrier(axis)


def pass_around(rank: int, world_size: int) -> list[list[float]]:
    """`size` shifts return every tensor to its rank. Each rank sees the tensors of the ranks before
    it, nearest first.

    Also test a strided input, and two shifts in flight whose inputs are dropped before the wait.
    """
    axis = grid(cp=world_size).cp
    x = torch.full((3, 2), float(rank), dtype=torch.float64)
    seen = []
    for _ in range(world_size):
        shift = collectives.start_shift(x, axis)
        x = shift.wait()
        assert shift.wait() is x, "a second wait must return at once"
        assert (x == x[0, 0]).all()
        seen.append(x[0, 0].item())
    first = collectives.start_shift(torch.full((2, 50_000), float(rank)).t(), axis)
    second = collectives.start_shift(torch.full((7,), 10.0 + rank, dtype=torch.bfloat16), axis)
    gc.collect()
    before = (rank - 1) % world_size
    assert (second.wait() == 10.0 + before).all()
    assert (first.wait() == before).all() and first.wait().shape == (50_000, 2)
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_shift_passes_to_the_next_rank_and_receives_from_the_previous(world_size: int) -> None:
    for rank, seen in enumerate(run_ranks(pass_around, world_size)):
        assert seen == [(rank - step) % world_size for step in range(1, world_size + 1)]


def messages_in_order(rank: int, world_size: int) -> list[float]:
    """Rank 0 sends three messages and drops the tensors; rank 1 has posted its buffers in the same
    order.
    """
    axis = grid(pp=world_size).pp
    if rank == 0:
        handles = [
            collectives.isend(torch.full((4, 1000), float(i)).t()[:, :2], axis, 1) for i in range(3)
        ]
        gc.collect()
        for handle in handles + handles:
            assert handle.wait() is handle.wait()
        return []
    handles = [collectives.irecv(torch.empty(1000, 2), axis, 0) for _ in range(3)]
    values = [handle.wait() for handle in handles]
    assert all(handle.wait() is value for handle, value in zip(handles, values, strict=True))
    return [value.unique().item() for value in values]


def test_messages_arrive_in_order_and_waits_may_be_repeated() -> None:
    assert run_ranks(messages_in_order, 2) == [[], [0.0, 1.0, 2.0]]


def staged_messages(rank: int, world: int) -> tuple[list[float], list[float], bool]:
    """A ring and single messages that go through the host, as if the tensors were on a device."""
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
    gloo, nccl = (Axis("cp", 1, 0, (0,), backend=name) for name in ("gloo", "nccl"))
    cases = (
        (torch.empty(1, device="meta"), gloo),
        (torch.empty(1, device="meta"), nccl),
        (torch.empty(1), gloo),
    )
    assert [collectives.through_host(*case) for case in cases] == [True, False, False]


Function = Callable[[torch.Tensor, Axis], torch.Tensor]

# name -> (function, input is replicated, output is replicated, multiple of the axis size in input
# rows)
TABLE: dict[str, tuple[Function, bool, bool, bool]] = {
    "copy_to": (d.copy_to, True, False, False),
    "reduce_from": (d.reduce_from, False, True, False),
    "gather_from": (d.gather_from, False, False, False),
    "reduce_scatter_to": (d.reduce_scatter_to, False, False, True),
    "exchange": (d.exchange, False, False, True),
}


def draw(axis: Axis, shape: tuple[int, ...], replicated: bool, seed: int) -> torch.Tensor:
    """Return random float64: equal on the ranks of an axis if replicated, different between groups."""
    key = 1000 * seed + 31 * axis.global_ranks[0] + (0 if replicated else 1 + axis.rank)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def sides_of(
    function: Function, axis: Axis, x: torch.Tensor, replicated_out: bool, seed: int
) -> tuple[float, float]:
    """Return this rank's share of `<f x, v>` and `<x, f^T v>`; replicated tensors are counted once."""
    x = x.requires_grad_()
    y = function(x, axis)
    v = draw(axis, tuple(y.shape), replicated_out, seed + 1)
    (pulled,) = torch.autograd.grad(y, x, v)
    return float((y.detach() * v).sum()), float((x.detach() * pulled).sum())


def adjoint_sides(
    rank: int, world_size: int, name: str, shape: dict[str, int], axis_name: str
) -> list[tuple]:
    mine = grid(**shape)
    axis = mine.world if axis_name == "world" else mine.over(*axis_name.split("_"))
    function, replicated_in, replicated_out, divisible = TABLE[name]
    found = []
    for seed, inner in enumerate([(1,), (3,), (2, 5), (4, 1, 3)]):
        rows = (seed + 1) * (axis.size if divisible else 1)
        left, right = sides_of(
            function, axis, draw(axis, (rows, *inner), replicated_in, seed), replicated_out, seed
        )
        found.append(
            (
                left / (axis.size if replicated_out else 1),
                right / (axis.size if replicated_in else 1),
            )
        )
    return found


AXES = [
    ({"tp": 2, "cp": 2}, "tp"),
    ({"tp": 2, "cp": 2}, "cp"),
    ({"cp": 2, "dp": 2}, "cp_dp"),
    ({"dp": 2, "pp": 2}, "dp"),
    ({"dp": 2, "pp": 2}, "pp"),
    ({"tp": 4}, "tp"),
    ({"tp": 2, "cp": 2}, "world"),
]


@pytest.mark.parametrize("name", TABLE)
def test_every_collective_is_the_adjoint_of_its_dual(name: str) -> None:
    for shape, axis_name in AXES:
        for per_shape in zip(*run_ranks(adjoint_sides, 4, name, shape, axis_name), strict=True):
            left, right = (sum(side) for side in zip(*per_shape, strict=True))
            # float64 sums of at most a few hundred products of order 1
            assert abs(left - right) < 1e-11, (name, shape, axis_name, left, right)


def check_uneven_exchange(rank: int, world_size: int) -> tuple[float, float]:
    axis = grid(tp=world_size).tp
    splits = torch.randint(
        0, 4, (world_size, world_size), generator=torch.Generator().manual_seed(3)
    )
    splits[1, 0] = 0
    sent, got = splits[rank].tolist(), splits[:, rank].tolist()
    x = draw(axis, (sum(sent), 2, 3), False, 7)
    return sides_of(lambda rows, over: d.exchange(rows, over, sent, got), axis, x, False, 7)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_uneven_exchange_is_the_adjoint_of_its_way_back(world_size: int) -> None:
    left, right = (
        sum(side) for side in zip(*run_ranks(check_uneven_exchange, world_size), strict=True)
    )
    assert abs(left - right) < 1e-11


def test_an_axis_of_one_rank_adds_nothing_to_the_graph() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    assert all(function(x, single_axis("tp")) is x for function, *_ in TABLE.values())
