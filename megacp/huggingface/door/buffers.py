"""Buffers of a sequence, cut in place for one rank and put back: a tensor stays the same object, its data changes.

Key property: the full data is set aside without a copy and comes back bit for bit, also after an exception. Views of
one storage can be cut together, because nothing is written into it. Rejected: `resize_` and `copy_`, which clone every
buffer and overwrite its views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megacp.core.ops.to_device import to_device


@dataclass(frozen=True)
class SequenceBuffers:
    """Tensors with a sequence dim each, the values that padding gets, and the tensors that stay cut."""

    tensors: Sequence[torch.Tensor]
    dims: Sequence[int]
    pad_values: Sequence[float] | None = None
    no_restore: Collection[torch.Tensor] = ()

    def problems(self) -> list[str]:
        """Why they cannot be cut together; an empty list when they can."""
        counts = [("buffer_seq_dims", len(self.dims))]
        if self.pad_values is not None:
            counts.append(("pad_values", len(self.pad_values)))
        found = [f"{len(self.tensors)} buffers but {n} {name}" for name, n in counts if n != len(self.tensors)]
        if not self.tensors:
            found.append("buffers is empty: they give the sequence length, and the model's inputs must be among them")
        pairs = list(zip(self.tensors, self.dims, strict=False))
        for number, (x, dim) in enumerate(pairs):
            found += _buffer_problems(number, x, dim)
            found += [f"buffer {number} is buffer {i} again" for i in range(number) if self.tensors[i] is x]
        others = sum(not any(x is y for y in self.tensors) for x in self.no_restore)
        if others:
            found.append(f"{others} of {len(self.no_restore)} no_restore_buffers are not among the buffers")
        if not found and len({x.shape[dim] for x, dim in pairs}) > 1:
            lengths = ", ".join(f"{x.shape[dim]} along dim {dim} of buffer {i}" for i, (x, dim) in enumerate(pairs))
            found.append(f"buffers differ in length: {lengths}")
        return found

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.tensors[0].shape[self.dims[0]]

    def row_problems(self, rows: int) -> list[str]:
        """Why these buffers cannot be cut differently in each of `rows` batch rows."""
        return [
            f"buffer {number} {tuple(x.shape)} must have the {rows} batch rows in dim 0 and its sequence in a later "
            f"dim, as this layout deals each row of documents differently: expand it, or choose zigzag or contiguous"
            for number, (x, dim) in enumerate(zip(self.tensors, self.dims, strict=True))
            if dim % x.dim() == 0 or x.shape[0] != rows
        ]

    @contextlib.contextmanager
    def cut(self, places: np.ndarray) -> Iterator[None]:
        """In the block the tensors hold the tokens `places[1 or rows, s]`; places past the end are padding."""
        pads = self.pad_values or [0] * len(self.tensors)
        with torch.no_grad():
            whole = [x.data for x in self.tensors]
            parts = [part_of(x, dim % x.dim(), places, pad) for x, dim, pad in zip(whole, self.dims, pads, strict=True)]
        kept = [any(x is y for y in self.no_restore) for x in self.tensors]
        before = [None if keep else x for x, keep in zip(whole, kept, strict=True)]
        del whole
        for x, part in zip(self.tensors, parts, strict=True):
            x.data = part
        del parts
        try:
            yield
        finally:
            for x, full in zip(self.tensors, before, strict=True):
                if full is not None:
                    x.data = full


def _buffer_problems(number: int, x: torch.Tensor, dim: int) -> list[str]:
    if not isinstance(x, torch.Tensor):
        return [f"buffer {number} is no tensor but {type(x).__name__}"]
    if not -x.dim() <= dim < x.dim():
        return [f"buffer {number} {tuple(x.shape)} has no dim {dim}"]
    found = [f"buffer {number} has no token along dim {dim}"] if x.shape[dim] == 0 else []
    if x.requires_grad:
        found.append(f"buffer {number} requires grad, and its gradient would have another shape: cut it in the model")
    return found


def part_of(x: torch.Tensor, dim: int, places: np.ndarray, pad: float) -> torch.Tensor:
    """A copy of the tokens of `x` at `places[1 or B, s]` along `dim >= 0`, `pad` past its end, for autograd too."""
    if len(places) > 1:  # x [B, ..., S, ...], every row with its own places
        return torch.stack([part_of(row, dim - 1, own[None], pad) for row, own in zip(x, places, strict=True)])
    length = x.shape[dim]
    index = to_device(np.minimum(places[0], length - 1), x.device)  # padding reads the last token, overwritten below
    part = x.index_select(dim, index)
    outside = np.flatnonzero(places[0] >= length)
    return part.index_fill_(dim, to_device(outside, x.device), pad) if len(outside) else part
