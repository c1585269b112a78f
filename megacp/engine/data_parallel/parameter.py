"""Specs of local parameters: their names, shapes and offsets in the global model.

The spec is attached to the parameter. Initialisation, gradient reduction, the optimizer,
checkpoints and converters all use it, so their code does not depend on how a layer is sharded.
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
    """A box of one global tensor, stored in rows `[start, start + shape[0])` of a parameter."""

    name: str
    """Global name with the global layer index, for example `layers.3.attention.q.weight`."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of this box in the global tensor, per dimension."""
    shape: tuple[int, ...]
    """Shape of this box. Padded vocabulary rows are not part of any box."""
    start: int = 0
    """First row (dim 0) of this box in the local parameter."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of this box in `local`, a tensor with the parameter's shape."""
        return local[self.start : self.start + self.shape[0]]


@dataclass(frozen=True)
class ParameterSpec:
    """How a local parameter is initialised, reduced, updated, counted and saved."""

    pieces: tuple[TensorSlice, ...]
    init: str = "normal"
    """Distribution of the initial values.

    One of `normal` and `uniform` (mean 0, standard deviation `std`), `zeros`, `ones`, `log_rate`
    (log of a rate between 0.01 and 16), and `step` (softplus maps the value to a step between 0.001
    and 0.1)."""
    std: float = 0.02
    treated: Treated = "matrix"
    """Role of the parameter, which determines its update rule (`Tensor.treated`)."""
    weight_decay: bool = True
    """Whether weight decay applies; False for norm weights and biases."""
    reduced_over: str = DATA
    """Name of the axis over which gradients are summed (`Tensor.reduced_over`)."""
    partial_over: tuple[str, ...] = ()
    """Other axes over which the gradient must be summed: `tp`, `embedding`."""
    counted: bool = True
    """Whether this rank's copy counts in the global gradient norm; exactly one copy does."""
    lr_multiplier: float = 1.0
    """Factor applied to the scheduled learning rate."""
    fused_gradient: bool = False
    """Whether the layer adds its gradient to the parameter's `main_grad`, a view of a bucket.

    The layer then calls the parameter's `gradient_added`.
    """

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        pieces: Iterable[TensorSlice],
        partial_over: tuple[str, ...] = (),
        counted: bool = True,
    ) -> ParameterSpec:
        """Return a spec for `pieces` with all properties of `tensor` except its name and shape."""
        # learning rate and fused gradients depend on the layer, so the tensor does not specify them
        return cls(
            tuple(pieces),
            init=tensor.init,
            std=tensor.std,
            treated=tensor.treated,
            weight_decay=tensor.decays,
            reduced_over=tensor.reduced_over,
            partial_over=partial_over,
            counted=counted,
        )

    @property
    def rule(self) -> str:
        """Name of the parameter's update rule."""
        return STEPPED_BY[self.treated]


Attached = TypeVar("Attached", bound=torch.Tensor)


def attach(parameter: Attached, spec: ParameterSpec) -> Attached:
    """Attach a spec to a parameter, or to another saved tensor, and return the tensor."""
    # the parameter may have more rows than its pieces, because of padding
    rows = sum(piece.shape[0] for piece in spec.pieces)
    assert rows <= parameter.shape[0], (
        f"{[p.name for p in spec.pieces]} need {rows} rows, but the parameter has shape "
        f"{tuple(parameter.shape)}"
    )
    parameter.megacp_spec = spec  # type: ignore[attr-defined]  # our own attribute
    return parameter


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """Return the spec of a parameter; every parameter of a megacp model has one."""
    # the spec is an attribute of the tensor, so it is available wherever the parameter is used
    spec = getattr(parameter, "megacp_spec", None)
    assert spec is not None, f"a parameter of shape {tuple(parameter.shape)} has no ParameterSpec"
    return spec
