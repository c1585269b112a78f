"""Column- and row-parallel linear layers with sequence parallelism.

Sources: Shoeybi et al., 2019, and Korthikanti et al., 2022.

    column  y[t, f/tp] = x W^T, and dx[t, h] = dy W must be summed over tp
    row     y[t, h] = x[t, f/tp] W^T, which must be summed over tp

A column-parallel layer saves its sharded input and gathers it again in the backward pass, unless
its weight is frozen. The reduce-scatter of the input gradient overlaps with the product for the
weight gradient. Several global tensors (q, k, v or gate, up) share one local weight and one
product. Each tensor is sharded separately by heads or rows, so checkpoints do not depend on the
fusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.distributed import collectives
from megacp.distributed.differentiable import copy_to, reduce_from
from megacp.distributed.grid import Axis, single_axis
from megacp.distributed.large_blocks import large_product
from megacp.engine.data_parallel.parameter import ParameterSpec
from megacp.engine.layers.table import Linear, Tensor
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec
from megacp.engine.tensor_parallel.weight_gradients import WeightGradients, WeightProduct

Way = Literal["", "gather", "scatter"]
_ALONE = single_axis("alone")


@dataclass(frozen=True)
class LinearSpec:
    """Description of a matrix product `y = x W^T` for one or several global tensors.

    Sizes are global.
    """

    prefix: str
    linears: Mapping[str, Linear]
    """Linear layers with the same input, by name without the prefix; only one if row-parallel."""

    @classmethod
    def of(cls, prefix: str, linears: Mapping[str, Linear], *names: str) -> LinearSpec:
        """Return the spec of one product for the linear layers called `names`."""
        return cls(prefix, {name: linears[name] for name in names})

    @property
    def first(self) -> Linear:
        """The first linear layer; all have the same inputs and sharding."""
        return next(iter(self.linears.values()))

    @property
    def out_features(self) -> int:
        """Total number of rows in all tensors."""
        return sum(linear.outputs for linear in self.linears.values())


def _in_bucket(weight: torch.Tensor) -> bool:
    return getattr(weight, "main_grad", None) is not None


def _take_gradient(product: WeightProduct, sink: WeightGradients | None) -> torch.Tensor | None:
    """Return `dy^T x` for autograd, or pass the product to `sink` and return None.

    `sink` receives it only if the weight's gradient is in a bucket.
    """
    if sink is None or not _in_bucket(product.weight):
        grad = product.grad.flatten(0, -2)  # [t, f]
        return large_product(grad.t(), product.x.flatten(0, -2))  # [f, t] x [t, h] -> [f, h]
    sink.take(product)
    return None


class _Linear(torch.autograd.Function):
    """Matrix product `x[..., h], W[f, h] -> y[..., f]` in reused memory; `sink` as in `product`.

    * "gather": sharded `x[t/tp, h] -> y[t, f]`.
    * "scatter": `x[t, f/tp], W[h, f/tp] -> y[t/tp, h]`, summed over tp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        axis: Axis,
        way: Way,
        sink: WeightGradients | None,
    ) -> torch.Tensor:
        # a frozen weight has no gradient, so the backward pass does not need the input
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight = weight
        ctx.axis = axis
        ctx.way = way
        ctx.sink = sink
        if way == "gather":
            x = collectives.all_gather(x, axis)  # [t/tp, h] -> [t, h]
        y = large_product(x, weight.t())  # [t, h] x [h, f]
        return collectives.reduce_scatter(y, axis) if way == "scatter" else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        sink = ctx.sink
        gathers = ctx.way == "gather"
        if ctx.way == "scatter":
            grad = collectives.all_gather(grad, ctx.axis)  # [t/tp, h] -> [t, h]
        waits = sink is not None and sink.deferred and _in_bucket(ctx.weight)
        # gather the input for the weight gradient while dx is computed
        arriving = None
        if gathers and trained and not waits:
            arriving = collectives.start_all_gather(x, ctx.axis)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = large_product(grad, weight)  # [t, f] x [f, h] -> [t, h]
        # sum dx of a gathered input over tp while the weight gradient is computed
        leaving = None
        if gathers and dx is not None:
            leaving = collectives.start_reduce_scatter(dx, ctx.axis)
        d_weight = None
        if trained:
            x = x if arriving is None else arriving.wait()
            # a deferred product keeps the sharded input and gathers it later over this axis
            axis = ctx.axis if gathers and waits else None
            d_weight = _take_gradient(WeightProduct(ctx.weight, grad, x, axis), sink)
        if leaving is not None:
            dx = leaving.wait()
        return dx, d_weight, None, None, None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    sink: WeightGradients | None = None,
    axis: Axis = _ALONE,
    way: Way = "",
) -> torch.Tensor:
    """Return `x W^T`: on this rank only, or over `axis` if `way` is "gather" or "scatter".

    `sink` receives the weight gradient if the weight has a gradient bucket.
    """
    return _Linear.apply(x, weight, axis, way if axis.size > 1 else "", sink)


def column_product(x: torch.Tensor, weight: torch.Tensor, options: LinearOptions) -> torch.Tensor:
    """Return `y[t, f/tp]` for `x[t/tp, h]` (sequence parallel) or `x[t, h]` (replicated)."""
    if options.sequence_parallel:
        return product(x, weight, options.weight_gradients, options.tp, "gather")
    return product(copy_to(x, options.tp), weight, options.weight_gradients)


def linear_specs(linear: LinearSpec, options: LinearOptions) -> tuple[ParameterSpec, ...]:
    """Return the specs of a product's weight and, if there is one, its bias."""
    each = [part.tensors(f"{linear.prefix}.{name}") for name, part in linear.linears.items()]
    weight, *bias = (parameter_spec(tensors, options) for tensors in zip(*each, strict=True))
    return replace(weight, fused_gradient=options.weight_gradients is not None), *bias


class ParallelLinear(nn.Module):
    """Parameters of a linear layer that is sharded over tp."""

    def __init__(self, linear: LinearSpec, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        weight, *bias = linear_specs(linear, options)
        self.weight = options.parameter(weight)
        self.bias = options.parameter(bias[0]) if bias else None


class ColumnParallelLinear(ParallelLinear):
    """Linear layer `x[t/tp, h] -> y[t, f/tp]`; the rows of every tensor are sharded over tp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `y[t, f/tp]` for `x[t/tp, h]` or, without sequence parallelism, `x[t, h]`."""
        y = column_product(x, self.weight, self.options)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(ParallelLinear):
    """Linear layer `x[t, f/tp] -> y[t/tp, h]`; the columns of its tensor are sharded over tp.

    The bias is added once, after the sum over tp.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `y[t/tp, h]` for `x[t, f/tp]`; without sequence parallelism, `y[t, h]`."""
        options = self.options
        if options.sequence_parallel:
            y = product(x, self.weight, options.weight_gradients, options.tp, "scatter")
        else:
            y = reduce_from(product(x, self.weight, options.weight_gradients), options.tp)  # [t, h]
        return y if self.bias is None else y + self.bias

    def gradients(
        self,
        x: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor | None]]:
        """Return `dx[t, f/tp]` and the gradients of trained parameters, without a forward pass.

        `grad` is the gradient of the output. The result is None for a parameter whose gradient has
        been added to its bucket. Neither the output nor its reduction is needed.
        """
        found: dict[nn.Parameter, torch.Tensor | None] = {}
        with torch.no_grad():
            if self.bias is not None and self.bias.requires_grad:
                found[self.bias] = grad.sum(0)
            if self.options.sequence_parallel:
                grad = collectives.all_gather(grad, self.options.tp)  # [t/tp, h] -> [t, h]
            if self.weight.requires_grad:
                product = WeightProduct(self.weight, grad, x)
                found[self.weight] = _take_gradient(product, self.options.weight_gradients)
            return grad @ self.weight, found


class _ColumnNorm(torch.autograd.Function):
    """RMSNorm of `x[t, f/tp]` over the columns of all tp ranks, with `weight[f/tp]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        axis: Axis,
    ) -> torch.Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = wide.square().sum(-1, keepdim=True)  # [t, 1], over the local columns
        squares = collectives.all_reduce(squares, axis)
        scale = torch.rsqrt(squares / (x.shape[-1] * axis.size) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.axis = axis
        return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        wide = grads[0].to(scale.dtype)
        d_weight = (wide * normed).sum(0)  # [t, f/tp] -> [f/tp]
        wide = wide * weight.to(scale.dtype)
        coupled = (wide * normed).sum(-1, keepdim=True)  # [t, 1], over the local columns
        coupled = collectives.all_reduce(coupled, ctx.axis)
        mean = coupled / (x.shape[-1] * ctx.axis.size)
        dx = wide.addcmul_(normed, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None, None


class ColumnNorm(nn.Module):
    """RMSNorm over columns that are sharded over tp, for `x[t, size/tp]`."""

    def __init__(self, weight: Tensor, epsilon: float, options: LinearOptions) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.tp = options.tp
        self.zero_centered = weight.init == "zeros"
        self.weight = options.parameter(parameter_spec([weight], options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`; all tp ranks must have the same tokens."""
        weight: torch.Tensor = self.weight
        if self.zero_centered:
            weight = weight.to(accumulation_dtype(x.dtype)) + 1
        return _ColumnNorm.apply(x, weight, self.epsilon, self.tp)
