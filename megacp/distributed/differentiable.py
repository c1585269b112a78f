"""Differentiable collectives; the backward pass of each collective is its dual.

| function            | forward        | backward        | in -> out                      | grad   |
|---------------------|----------------|-----------------|--------------------------------|--------|
| `copy_to`           | identity       | all-reduce      | replicated -> used per rank    | partial|
| `reduce_from`       | all-reduce     | identity        | partial -> replicated          | repl.  |
| `gather_from`       | all-gather     | reduce-scatter  | sharded -> used per rank       | partial|
| `gather_uneven`     | all-gather     | reduce-scatter  | sharded unevenly -> per rank   | partial|
| `reduce_scatter_to` | reduce-scatter | all-gather      | partial -> sharded             | sharded|
| `exchange`          | all-to-all     | all-to-all back | sharded a -> sharded b         | sharded|

The last column is the form in which the backward pass expects the gradient. "Used per rank" means
that every rank uses the tensor differently, so its gradients are partial sums.

Summed over ranks, `<f x, v> = <x, f^T v>`. No function scales gradients, because factors hidden in
collectives are a common cause of lost or doubled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacp.distributed import collectives
from megacp.distributed.grid import Axis

Move = Callable[[torch.Tensor, Axis], torch.Tensor]


def _identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a view of x, because autograd needs a new tensor."""
    return x.view_as(x)


def slice_of(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's block of dim 0, without communication: `[size * n, ...] -> [n, ...]`."""
    assert x.shape[0] % axis.size == 0, f"{tuple(x.shape)} does not split into {axis.size} parts"
    return x.chunk(axis.size)[axis.rank].contiguous()


class _Dual(torch.autograd.Function):
    """Apply `forward`, and its dual `backward` to the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, forward: Move, backward: Move
    ) -> torch.Tensor:
        ctx.axis = axis
        ctx.dual = backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.dual(grad, ctx.axis), None, None, None


def _dual(x: torch.Tensor, axis: Axis, forward: Move, backward: Move) -> torch.Tensor:
    """Apply a pair of duals; an axis of one rank changes nothing."""
    # no autograd node either, so that a single process pays nothing
    return x if axis.size == 1 else _Dual.apply(x, axis, forward, backward)


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return replicated `x` for different use on each rank.

    The backward pass sums the partial gradients.
    """
    return _dual(x, axis, _identity, collectives.all_reduce)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of the partial `x` across the axis, replicated."""
    return _dual(x, axis, collectives.all_reduce, _identity)


def gather_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gather `[n, ...] -> [size * n, ...]` for different use on each rank.

    The backward pass reduce-scatters the partial gradients.
    """
    return _dual(x, axis, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's block of the sum of the partial `x`: `[size * n, ...] -> [n, ...]`."""
    return _dual(x, axis, collectives.reduce_scatter, collectives.all_gather)


def exchange(
    x: torch.Tensor,
    axis: Axis,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange rows of dim 0 all-to-all, evenly or according to splits.

    The backward pass sends the gradients back.
    """
    return _dual(
        x,
        axis,
        lambda rows, over: collectives.all_to_all(rows, over, in_splits, out_splits),
        lambda rows, over: collectives.all_to_all(rows, over, out_splits, in_splits),
    )


def gather_uneven(x: torch.Tensor, axis: Axis, counts: Sequence[int]) -> torch.Tensor:
    """Gather `[counts[rank], ...] -> [sum(counts), ...]` in axis order, for different use per rank.

    Counts may be 0. A rank sends its rows to every other rank. In the backward pass, it receives
    their partial gradients.
    """
    # one copy for each rank; the backward pass sums the gradients of the copies
    copies = x.repeat(axis.size, *[1] * (x.dim() - 1))
    return exchange(copies, axis, [len(x)] * axis.size, counts)
