"""From flat slices of local parameters to boxes of named global tensors: a checkpoint depends on no
grid.

A file speaks only of `(global name, global shape, offsets, values)`. A range of a row-major array
is a few boxes: part of a row, whole rows, part of a row; the same again inside a partial row. So a
ZeRO slice that cuts a matrix anywhere is saved and loaded without being gathered, and any grid
reads what any other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megacp.engine.data_parallel.parameter import ParameterSpec
from megacp.engine.data_parallel.shards import ParameterSlice

MODEL = "model"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class TensorBox:
    """A box of one global tensor; `tensor` is its values (saving) or where they go (loading)."""

    name: str
    """Kind and parameter, for example `model.layers.3.mlp.down.weight` or
    `optimizer.exp_avg.final_norm.weight`.
    """
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """A view of the box's shape, so that reading writes into the parameter or the state."""


def split_range(
    shape: tuple[int, ...], low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offsets, extents) that make up elements `[low, high)` of a row-major array, in that
    order.

    At most `2 * len(shape) - 1` boxes. Their row-major contents, one after the other, are the
    range's.
    """
    if low >= high:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows are [first, last)
    if first > last:  # the range lies inside one row
        return _inside(shape, last, low - last * row, high - last * row)
    boxes = _inside(shape, first - 1, low - (first - 1) * row, row) if low < first * row else []
    if first < last:
        boxes.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return boxes + _inside(shape, last, 0, high - last * row)


def _inside(
    shape: tuple[int, ...], index: int, low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        ((index, *offsets), (1, *extents)) for offsets, extents in split_range(shape[1:], low, high)
    ]


def boxes_of_slice(kind: str, part: ParameterSlice) -> list[TensorBox]:
    """The boxes of global tensors `kind.<name>` that a slice holds; rows in no piece (padding) are
    in no box.
    """
    boxes = []
    row = math.prod(part.shape[1:])
    for piece in part.spec.pieces:
        begin = (
            piece.start * row
        )  # the piece is elements [begin, begin + its size) of the flattened parameter
        low = max(part.start, begin)
        high = min(part.start + part.values.numel(), begin + math.prod(piece.shape))
        place = low - part.start
        for offsets, extents in split_range(piece.shape, low - begin, high - begin):
            values = part.values[place : place + math.prod(extents)].view(extents)
            place += values.numel()
            where = tuple(a + b for a, b in zip(piece.offsets, offsets, strict=True))
            boxes.append(TensorBox(f"{kind}.{piece.name}", piece.global_shape, where, values))
    return boxes


def boxes_to_save(
    model: Iterable[ParameterSlice],
    state: Mapping[str, Iterable[ParameterSlice]],
    counts: Callable[[ParameterSpec], bool],
) -> list[TensorBox]:
    """Boxes this rank writes: give its slices of the parameters and of the optimizer state; copies
    are left out.

    By `ShardedParameters.counts` they hold every element of every global tensor once over all
    ranks.
    """
    kinds = {MODEL: model, **{f"{OPTIMIZER}.{name}": parts for name, parts in state.items()}}
    wanted = ((kind, part) for kind, parts in kinds.items() for part in parts if counts(part.spec))
    return [box for kind, part in wanted for box in boxes_of_slice(kind, part)]


def boxes_to_load(
    model: Iterable[ParameterSlice], state: Mapping[str, Iterable[ParameterSlice]]
) -> list[TensorBox]:
    """Boxes this rank reads: give its whole parameters and its slices of the optimizer state,
    copies included.
    """
    return boxes_to_save(model, state, lambda spec: True)
