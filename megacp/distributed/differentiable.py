"""Collectives that autograd can walk: each one's backward is its dual, by name.

| function | forward | backward | in -> out | gradient expected | |---|---|---|---|---| | `copy_to`
| identity | all-reduce | replicated -> used differently per rank | partial | | `reduce_from` |
all-reduce | identity | partial -> replicated | replicated | | `gather_from` | all-gather |
reduce-scatter | sharded -> used differently per rank | partial | | `gather_uneven` | all-gather |
reduce-scatter | sharded, any sizes -> used differently per rank | partial | | `reduce_scatter_to` |
reduce-scatter | all-gather | partial -> sharded | sharded | | `exchange` | all-to-all | all-to-all
back | sharded a -> sharded b | sharded |

`<f x, v> = <x, f^T v>` summed over ranks. No function scales gradients: a factor hidden in a
collective is where lost or doubled gradients come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacp.distributed import collectives
from megacp.distributed.grid import Axis

Move = Callable[[torch.Tensor, Axis], torch.Tensor]


def _identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def slice_of(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's block of dim 0, without communication: `[size * n, ...] -> [n, ...]`."""
    assert x.shape[0] % axis.size == 0, f"{tuple(x.shape)} does not split over {axis.size} ranks"
    return x.chunk(axis.size)[axis.rank].contiguous()


class _Dual(torch.autograd.Function):
    """Applies `forward` going up and its dual `backward` coming down."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, forward: Move, backward: Move
    ) -> torch.Tensor:
        ctx.axis, ctx.dual = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.dual(grad, ctx.axis), None, None, None


def _dual(x: torch.Tensor, axis: Axis, forward: Move, backward: Move) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, forward, backward)


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Replicated `x`, used differently per rank; its partial gradients are summed."""
    return _dual(x, axis, _identity, collectives.all_reduce)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum of the partial `x` over the axis, replicated."""
    return _dual(x, axis, collectives.all_reduce, _identity)


def gather_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`[n, ...] -> [size * n, ...]`, used differently per rank; partial gradients are
    reduce-scattered.
    """
    return _dual(x, axis, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`[size * n, ...] -> [n, ...]`: this rank's block of the sum of the partial `x`."""
    return _dual(x, axis, collectives.reduce_scatter, collectives.all_gather)


def exchange(
    x: torch.Tensor,
    axis: Axis,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """All-to-all of dim-0 rows with even or uneven splits; the gradient travels the reverse way."""
    return _dual(
        x,
        axis,
        lambda rows, over: collectives.all_to_all(rows, over, in_splits, out_splits),
        lambda rows, over: collectives.all_to_all(rows, over, out_splits, in_splits),
    )


def gather_uneven(x: torch.Tensor, axis: Axis, counts: Sequence[int]) -> torch.Tensor:
    """`[counts[rank], ...] -> [sum(counts), ...]` in axis order, used differently per rank; some
    ranks may have none.

    A rank sends its rows to each other rank, and gets the partial gradients of them back.
    """
    copies = x.repeat(
        axis.size, *[1] * (x.dim() - 1)
    )  # its own gradient is the sum over the copies
    return exchange(copies, axis, [len(x)] * axis.size, counts)
