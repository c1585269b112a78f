"""Assembly of global tensors from sharded tensors and parameters, for comparison with one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import nn

from megacp.engine.data_parallel.parameter import spec_of

Pieces = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], np.ndarray]]
"""Mapping from (global name, offsets) to (global shape, values)."""


def pieces_of(module: nn.Module, values: Mapping[nn.Parameter, torch.Tensor]) -> Pieces:
    """Return this rank's part of each global tensor, from values shaped like its local parameters."""
    return {
        (piece.name, piece.offsets): (
            piece.global_shape,
            piece.of(values[parameter]).detach().clone().numpy(),
        )
        for parameter in module.parameters()
        for piece in spec_of(parameter).pieces
    }


def assemble(parts: Iterable[Pieces]) -> dict[str, np.ndarray]:
    """Return global tensors by name.

    NaN marks elements that a rank does not have. Every element must be on some rank, and with the
    same bits on all ranks that have it (replicated weights, the two copies of a tied embedding).
    """
    whole: dict[str, np.ndarray] = {}
    for pieces in parts:
        for (name, offsets), (shape, values) in pieces.items():
            tensor = whole.setdefault(name, np.full(shape, np.nan, values.dtype))
            box = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))]
            held = ~np.isnan(values)
            twice = held & ~np.isnan(box)
            assert np.array_equal(box[twice], values[twice]), f"ranks hold different bits of {name}"
            box[held] = values[held]
    for name, tensor in whole.items():
        assert not np.isnan(tensor).any(), f"no rank holds some part of {name}"
    return whole


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of the global tensors into a module.

    Rows that belong to no piece get a value that would show in a result.
    """
    with torch.no_grad():
        for parameter in (*module.parameters(), *module.buffers()):
            parameter.fill_(1e3)
            for piece in spec_of(parameter).pieces:
                box = tuple(
                    slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True)
                )
                piece.of(parameter).copy_(tensors[piece.name][box])
