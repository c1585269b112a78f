"""The adjoint identity `<f x, v> = <x, f^T v>`, summed over ranks, for every collective that autograd walks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacp.core.distributed import differentiable as d
from megacp.core.distributed.grid import Axis, single_axis
from tests.ranks import grid, run_ranks

Function = Callable[[torch.Tensor, Axis], torch.Tensor]

# name -> (function, input is replicated, output is replicated, input rows are a multiple of the axis)
TABLE: dict[str, tuple[Function, bool, bool, bool]] = {
    "copy_to": (d.copy_to, True, False, False),
    "reduce_from": (d.reduce_from, False, True, False),
    "gather_from": (d.gather_from, False, False, False),
    "reduce_scatter_to": (d.reduce_scatter_to, False, False, True),
    "exchange": (d.exchange, False, False, True),
}


def draw(axis: Axis, shape: tuple[int, ...], replicated: bool, seed: int) -> torch.Tensor:
    """Random float64; equal on the ranks of the axis when replicated, different on different groups."""
    key = 1000 * seed + 31 * axis.global_ranks[0] + (0 if replicated else 1 + axis.rank)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def sides_of(function: Function, axis: Axis, x: torch.Tensor, replicated_out: bool, seed: int) -> tuple[float, float]:
    """This rank's share of `<f x, v>` and of `<x, f^T v>`: a replicated tensor is one vector, counted once."""
    x = x.requires_grad_()
    y = function(x, axis)
    v = draw(axis, tuple(y.shape), replicated_out, seed + 1)
    (pulled,) = torch.autograd.grad(y, x, v)
    return float((y.detach() * v).sum()), float((x.detach() * pulled).sum())


def adjoint_sides(rank: int, world_size: int, name: str, shape: dict[str, int], axis_name: str) -> list[tuple]:
    mine = grid(**shape)
    axis = mine.world if axis_name == "world" else mine.over(*axis_name.split("_"))
    function, replicated_in, replicated_out, divisible = TABLE[name]
    found = []
    for seed, inner in enumerate([(1,), (3,), (2, 5), (4, 1, 3)]):
        rows = (seed + 1) * (axis.size if divisible else 1)
        left, right = sides_of(function, axis, draw(axis, (rows, *inner), replicated_in, seed), replicated_out, seed)
        found.append((left / (axis.size if replicated_out else 1), right / (axis.size if replicated_in else 1)))
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
    splits = torch.randint(0, 4, (world_size, world_size), generator=torch.Generator().manual_seed(3))
    splits[1, 0] = 0
    sent, got = splits[rank].tolist(), splits[:, rank].tolist()
    x = draw(axis, (sum(sent), 2, 3), False, 7)
    return sides_of(lambda rows, over: d.exchange(rows, over, sent, got), axis, x, False, 7)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_uneven_exchange_is_the_adjoint_of_its_way_back(world_size: int) -> None:
    left, right = (sum(side) for side in zip(*run_ranks(check_uneven_exchange, world_size), strict=True))
    assert abs(left - right) < 1e-11


def test_an_axis_of_one_rank_adds_nothing_to_the_graph() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    assert all(function(x, single_axis("tp")) is x for function, *_ in TABLE.values())
