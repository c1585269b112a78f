"""Conversion of flat parameter slices to boxes of named global tensors, for checkpoints.

A checkpoint consists of entries `(global name, global shape, offsets, values)` and does not depend
on the grid: any grid can read the checkpoint of any other grid. A range of a row-major array
consists of a few boxes: part of a row, whole rows, and part of a row. Partial rows are split in the
same way. A ZeRO slice can therefore begin anywhere in a matrix, and is saved and loaded without a
gather.
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
    """A box of one global tensor, to be saved from or loaded into `tensor`."""

    name: str
    """Kind and parameter name, such as `model.layers.3.mlp.down.weight` or
    `optimizer.exp_avg.final_norm.weight`.
    """
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """A view with the shape of the box. Loading writes through it to the parameter or the state."""


def split_range(
    shape: tuple[int, ...], low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes (offsets, extents) of elements `[low, high)` of a row-major array.

    There are at most `2 * len(shape) - 1` boxes. Concatenating their row-major contents gives the
    contents of the range.
    """
    if low >= high:
        return []
    if not shape:  # a scalar
        return [((), ())]
    row = math.prod(shape[1:])
    # rows [first, last) are completely in the range
    first = -(-low // row)
    last = high // row
    if first > last:  # the range is inside one row
        return _inside(shape, last, low - last * row, high - last * row)
    boxes = []
    if low < first * row:  # the end of the row before the complete rows
        before = first - 1
        boxes += _inside(shape, before, low - before * row, row)
    if first < last:
        offsets = (first, *[0] * (len(shape) - 1))
        boxes.append((offsets, (last - first, *shape[1:])))
    # the beginning of the row after the complete rows; empty if the range ends with one of these
    return boxes + _inside(shape, last, 0, high - last * row)


def _inside(
    shape: tuple[int, ...], index: int, low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes of elements `[low, high)` of row `index`."""
    boxes = split_range(shape[1:], low, high)
    return [((index, *offsets), (1, *extents)) for offsets, extents in boxes]


def boxes_of_slice(kind: str, part: ParameterSlice) -> list[TensorBox]:
    """Return the boxes of global tensors `kind.<name>` that a slice contains.

    Padding, which belongs to no piece, is not part of any box.
    """
    boxes = []
    row = math.prod(part.shape[1:])
    slice_end = part.start + part.values.numel()
    for piece in part.spec.pieces:
        # range of the piece, and of its intersection with the slice, in the flattened parameter
        begin = piece.start * row
        end = begin + math.prod(piece.shape)
        low = max(part.start, begin)
        high = min(slice_end, end)
        place = low - part.start  # in `values`
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
    """Return the boxes that this rank writes, which exclude uncounted copies.

    `model` and `state` are this rank's slices of parameters and of optimizer state. If `counts` is
    `ShardedParameters.counts`, all ranks together write every element of every global tensor once.
    """
    kinds = {MODEL: model}
    for name, parts in state.items():
        kinds[f"{OPTIMIZER}.{name}"] = parts
    boxes = []
    for kind, parts in kinds.items():
        for part in parts:
            if counts(part.spec):
                boxes += boxes_of_slice(kind, part)
    return boxes


def boxes_to_load(
    model: Iterable[ParameterSlice], state: Mapping[str, Iterable[ParameterSlice]]
) -> list[TensorBox]:
    """Return the boxes that this rank reads, which include copies.

    `model` are this rank's complete parameters, and `state` its slices of the optimizer state.
    """
    return boxes_to_save(model, state, lambda spec: True)
