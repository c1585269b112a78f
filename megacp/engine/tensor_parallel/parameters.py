"""Parameters of tensor-parallel layers: their global names, shards and initial values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.parameter import (
    ParameterSpec,
    TensorSlice,
    attach,
)
from megacp.engine.layers.table import EXPERTS, Tensor
from megacp.engine.tensor_parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class LinearOptions:
    """Options that all layers of a tower (or of the decoder) share."""

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    """Whether the tower is trained. Parameters of a frozen tower have no gradients."""
    lr_multiplier: float = 1.0
    """Factor applied to the scheduled learning rate."""
    weight_gradients: WeightGradients | None = None
    """Receiver that adds linear layers' weight gradients to buckets; None if autograd does."""

    def parameter(self, spec: ParameterSpec, rows: int | None = None) -> nn.Parameter:
        """Return an uninitialised parameter for the pieces of `spec`.

        `rows` is the number of rows including padding, which comes after the pieces.
        """
        # pieces are stacked by rows and have equal sizes in all other dimensions
        rows = rows or sum(piece.shape[0] for piece in spec.pieces)
        shape = (rows, *spec.pieces[0].shape[1:])
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.attach(nn.Parameter(values, requires_grad=self.trained), spec)

    def attach(self, parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
        """Attach `spec` with the tower's learning rate to a parameter; return the parameter."""
        return attach(parameter, replace(spec, lr_multiplier=self.lr_multiplier))


def _slices(tensors: Sequence[Tensor], tp: Axis) -> Iterator[TensorSlice]:
    """Yield this rank's slice of each tensor, stacked by rows in one local parameter."""
    start = 0  # first row of the next piece
    for tensor in tensors:
        offsets = [0] * len(tensor.shape)
        shape = list(tensor.shape)
        if tensor.cut != "whole":
            dim = ("rows", "columns").index(tensor.cut)
            assert shape[dim] % tp.size == 0, (
                f"{tensor.name}: tp {tp.size} must divide its {shape[dim]} {tensor.cut}"
            )
            # tp ranks have equal, contiguous parts
            shape[dim] //= tp.size
            offsets[dim] = tp.rank * shape[dim]
        yield TensorSlice(tensor.name, tensor.shape, tuple(offsets), tuple(shape), start)
        start += shape[0]


def parameter_spec(
    tensors: Sequence[Tensor],
    options: LinearOptions,
    *,
    partial_over_tp: bool | None = None,
) -> ParameterSpec:
    """Return the spec of a parameter with this rank's slices of `tensors`.

    The tensors may differ only in name and rows. The gradient of an unsharded tensor must be summed
    over tp if tp ranks have different tokens (sequence parallelism, the default rule) or different
    heads (`partial_over_tp=True`). Only tp rank 0 counts this tensor in the gradient norm. Experts
    are reduced over all ranks that have the same experts, including tp ranks, and each of these
    ranks counts its shard.
    """
    first = tensors[0]
    tp = options.tp
    partial = options.sequence_parallel if partial_over_tp is None else partial_over_tp
    # each rank has the complete gradient of its shard
    if first.cut != "whole" or first.reduced_over == EXPERTS:
        return ParameterSpec.of(first, _slices(tensors, tp))
    # replicated tensors: sum the gradient over tp if needed, and count one copy in the norm
    over = ("tp",) if partial and tp.size > 1 else ()
    return ParameterSpec.of(first, _slices(tensors, tp), over, counted=tp.rank == 0)


def row_parameter(prefix: str, tensors: Sequence[Tensor], options: LinearOptions) -> nn.Parameter:
    """Return an uninitialised parameter for `tensors`, whose names get the prefix `prefix.`."""
    named = [replace(tensor, name=f"{prefix}.{tensor.name}") for tensor in tensors]
    return options.parameter(parameter_spec(named, options))
