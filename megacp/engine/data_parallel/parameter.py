"""What a local parameter is in the global model: names, shapes and offsets, attached to the
parameter itself.

Initialisation, gradient reduction, the optimizer, checkpoints and converters all read this one
value. None of them needs to know how a layer is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from megacp.engine.config.training import STEPPED_BY, Treated
from megacp.engine.layers.table import DATA, Tensor


@dataclass(frozen=True)
class TensorSlice:
    """A box of one global tensor, stored in dim-0 rows `[start, start + shape[0])` of a local
    parameter.
    """

    name: str
    """Global name, for example `layers.3.attention.q.weight`; the layer index is global."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where this rank's part begins in the global tensor."""
    shape: tuple[int, ...]
    """Shape of this rank's part: true rows only, padded vocabulary rows are in no piece."""
    start: int = 0
    """First dim-0 row of the local parameter that holds it."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of `local` (shaped like the parameter) that holds this piece."""
        return local[self.start : self.start + self.shape[0]]


@dataclass(frozen=True)
class ParameterSpec:
    """How one local parameter is initialised, reduced, stepped, counted and saved."""

    pieces: tuple[TensorSlice, ...]
    init: str = "normal"
    """`normal` or `uniform` (mean 0, `std`), `zeros` or `ones`, `log_rate` (the log of a rate
    within 0.01 and 16), `step` (what softplus makes a step of within 0.001 and 0.1)."""
    std: float = 0.02
    treated: Treated = "matrix"
    """Rule that steps it, as `Tensor.treated` says; `reduced_over` likewise."""
    weight_decay: bool = True
    """False for norm weights and biases."""
    reduced_over: str = DATA
    partial_over: tuple[str, ...] = ()
    """Further axes over which that sum is partial: `tp`, `embedding`."""
    counted: bool = True
    """Whether this rank counts the parameter in the global gradient norm: copies are counted once.
    """
    lr_multiplier: float = 1.0
    """Learning rate of the parameter over that of the schedule."""
    fused_gradient: bool = False
    """Whether the layer adds its gradient to the parameter's `main_grad`, its part of a bucket, and
    then says so.
    """

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        pieces: Iterable[TensorSlice],
        partial_over: tuple[str, ...] = (),
        counted: bool = True,
    ) -> ParameterSpec:
        """The spec of pieces of tensors that are described as this one, but for name and shape."""
        described = tensor.init, tensor.std, tensor.treated, tensor.decays, tensor.reduced_over
        return cls(tuple(pieces), *described, partial_over, counted)

    @property
    def rule(self) -> str:
        """Name of the rule that steps it."""
        return STEPPED_BY[self.treated]


Attached = TypeVar("Attached", bound=torch.Tensor)


def attach(parameter: Attached, spec: ParameterSpec) -> Attached:
    """Give a parameter, or a tensor that is saved beside them, its spec and return it."""
    rows = sum(piece.shape[0] for piece in spec.pieces)
    assert rows <= parameter.shape[0], (
        f"{[p.name for p in spec.pieces]} hold {rows} rows of {tuple(parameter.shape)}"
    )
    parameter.megacp_spec = spec  # type: ignore[attr-defined]  # ours, on a parameter of torch
    return parameter


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """The spec attached to a parameter; every parameter of a megacp model has one."""
    spec = getattr(parameter, "megacp_spec", None)
    assert spec is not None, f"a parameter of shape {tuple(parameter.shape)} has no ParameterSpec"
    return spec
