"""Parameters of tensor-parallel layers: their global names, shards and initial values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice, attach
from megacp.engine.layers.table import EXPERTS, Tensor
from megacp.engine.tensor_parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class LinearOptions:
    """What all layers of a tower share: the tp axis, sequence parallelism, parameter dtype and
    device, and training.
    """

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    """False for a frozen tower: its parameters take part only in the forward pass."""
    lr_multiplier: float = 1.0
    weight_gradients: WeightGradients | None = None
    """Takes the weight gradients of linears to the buckets; None leaves that to autograd."""

    def parameter(self, spec: ParameterSpec, rows: int | None = None) -> nn.Parameter:
        """An uninitialised parameter that holds the pieces of a spec; `rows` counts padding behind
        them too.
        """
        shape = (rows or sum(piece.shape[0] for piece in spec.pieces), *spec.pieces[0].shape[1:])
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.attach(nn.Parameter(values, requires_grad=self.trained), spec)

    def attach(self, parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
        """Give a parameter its spec, with the learning rate of the tower, and return it."""
        return attach(parameter, replace(spec, lr_multiplier=self.lr_multiplier))


def _slices(tensors: Sequence[Tensor], tp: Axis) -> Iterator[TensorSlice]:
    """This rank's part of each, one below the other."""
    start = 0
    for tensor in tensors:
        offsets, shape = [0] * len(tensor.shape), list(tensor.shape)
        if tensor.cut != "whole":
            dim = ("rows", "columns").index(tensor.cut)
            assert shape[dim] % tp.size == 0, (
                f"{tensor.name}: {shape[dim]} {tensor.cut} over tp {tp.size}"
            )
            shape[dim] //= tp.size
            offsets[dim] = tp.rank * shape[dim]
        yield TensorSlice(tensor.name, tensor.shape, tuple(offsets), tuple(shape), start)
        start += shape[0]


def parameter_spec(
    tensors: Sequence[Tensor], options: LinearOptions, *, partial_over_tp: bool | None = None
) -> ParameterSpec:
    """Spec of a parameter with this rank's part of some tensors that are described alike, but for
    name and rows.

    The gradient of whole ones is partial over tp when each tp rank sees other tokens (sequence
    parallelism, the default rule) or other heads (`partial_over_tp=True`). Only tp rank 0 counts
    them in the norm. Ranks that hold the same experts sum and count a slice each, those of tp among
    them.
    """
    first, tp = tensors[0], options.tp
    partial = options.sequence_parallel if partial_over_tp is None else partial_over_tp
    if first.cut != "whole" or first.reduced_over == EXPERTS:
        return ParameterSpec.of(first, _slices(tensors, tp))
    over = ("tp",) if partial and tp.size > 1 else ()
    return ParameterSpec.of(first, _slices(tensors, tp), over, counted=tp.rank == 0)


def row_parameter(prefix: str, tensors: Sequence[Tensor], options: LinearOptions) -> nn.Parameter:
    """A parameter of tensors whose names lack a prefix."""
    named = [replace(tensor, name=f"{prefix}.{tensor.name}") for tensor in tensors]
    return options.parameter(parameter_spec(named, options))
