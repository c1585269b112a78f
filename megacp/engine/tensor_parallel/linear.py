"""Column- and row-parallel linears (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et
al., 2022).

Column: `y[t, f/tp] = x W^T`, with `dx[t, h] = dy W` partial over tp. Row: `y[t, h] = x[t, f/tp]
W^T` partial over tp.

A column-parallel linear saves its sharded input and gathers it again in backward, unless its weight
is frozen. The reduce-scatter of the input gradient runs under the weight gradient's matrix product.
Several global tensors (q, k, v or gate, up) share one local weight and one product. Each is cut by
its own heads or rows, so checkpoints never see the fusion.
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
    """One product `y = x W^T` that holds some global tensors; sizes are global."""

    prefix: str
    linears: Mapping[str, Linear]
    """With the same inputs, by the ends of their names. A row-parallel linear has one."""

    @classmethod
    def of(cls, prefix: str, linears: Mapping[str, Linear], *names: str) -> LinearSpec:
        """The product of those of a layer's linears that are named."""
        return cls(prefix, {name: linears[name] for name in names})

    @property
    def first(self) -> Linear:
        """One for what all have alike."""
        return next(iter(self.linears.values()))

    @property
    def out_features(self) -> int:
        """Rows of all tensors."""
        return sum(linear.outputs for linear in self.linears.values())


def _in_bucket(weight: torch.Tensor) -> bool:
    return getattr(weight, "main_grad", None) is not None


def _take_gradient(product: WeightProduct, sink: WeightGradients | None) -> torch.Tensor | None:
    """`dy^T x` for autograd, or None where the gradient goes to the weight's part of a bucket."""
    if sink is None or not _in_bucket(product.weight):
        return large_product(
            product.grad.flatten(0, -2).t(), product.x.flatten(0, -2)
        )  # [f, t] x [t, h] -> [f, h]
    sink.take(product)
    return None


class _Linear(torch.autograd.Function):
    """`x[..., h], W[f, h] -> y[..., f]`, in memory that is used again; `sink` as in `product`.

    "gather": `x[t/tp, h]` sharded -> `y[t, f]`; "scatter": `x[t, f/tp], W[h, f/tp] -> y[t/tp, h]`,
    the sum over tp.
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
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None, weight
        )  # a frozen weight asks for no input
        ctx.weight, ctx.axis, ctx.way, ctx.sink = weight, axis, way, sink
        y = large_product(
            collectives.all_gather(x, axis) if way == "gather" else x, weight.t()
        )  # [t, h] x [h, f]
        return collectives.reduce_scatter(y, axis) if way == "scatter" else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        trained, sink, gathers = ctx.needs_input_grad[1], ctx.sink, ctx.way == "gather"
        if ctx.way == "scatter":
            grad = collectives.all_gather(grad, ctx.axis)  # [t/tp, h] -> [t, h]
        waits = sink is not None and sink.deferred and _in_bucket(ctx.weight)
        # under the next product
        arriving = (
            collectives.start_all_gather(x, ctx.axis) if gathers and trained and not waits else None
        )
        dx = (
            large_product(grad, weight) if ctx.needs_input_grad[0] else None
        )  # [t, f] x [f, h] -> [t, h]
        # of a gathered x it is partial over tp; the sum is under way under the product of the
        # weight gradient
        leaving = (
            collectives.start_reduce_scatter(dx, ctx.axis) if gathers and dx is not None else None
        )
        d_weight = None
        if trained:
            x = x if arriving is None else arriving.wait()
            axis = ctx.axis if gathers and waits else None
            d_weight = _take_gradient(WeightProduct(ctx.weight, grad, x, axis), sink)
        return dx if leaving is None else leaving.wait(), d_weight, None, None, None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    sink: WeightGradients | None = None,
    axis: Axis = _ALONE,
    way: Way = "",
) -> torch.Tensor:
    """`x W^T` of this rank, or with `way` over an axis; `sink` takes the weight gradient once the
    weight is in a bucket.
    """
    return _Linear.apply(x, weight, axis, way if axis.size > 1 else "", sink)


def column_product(x: torch.Tensor, weight: torch.Tensor, options: LinearOptions) -> torch.Tensor:
    """`y[t, f/tp]` from `x[t/tp, h]` (sequence parallel) or `x[t, h]` (replicated)."""
    if options.sequence_parallel:
        return product(x, weight, options.weight_gradients, options.tp, "gather")
    return product(copy_to(x, options.tp), weight, options.weight_gradients)


def linear_specs(linear: LinearSpec, options: LinearOptions) -> tuple[ParameterSpec, ...]:
    """Specs of the weight and, where it has one, of the bias of a product."""
    each = [part.tensors(f"{linear.prefix}.{name}") for name, part in linear.linears.items()]
    weight, *bias = (parameter_spec(tensors, options) for tensors in zip(*each, strict=True))
    return replace(weight, fused_gradient=options.weight_gradients is not None), *bias


class ParallelLinear(nn.Module):
    """The parameters of a linear that is cut over tp."""

    def __init__(self, linear: LinearSpec, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        weight, *bias = linear_specs(linear, options)
        self.weight = options.parameter(weight)
        self.bias = options.parameter(bias[0]) if bias else None


class ColumnParallelLinear(ParallelLinear):
    """`x[t/tp, h] -> y[t, f/tp]`: the rows of every tensor of `linear` are cut over tp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` under sequence parallelism, else `x[t, h]`, to `y[t, sum of local rows]`."""
        y = column_product(x, self.weight, self.options)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(ParallelLinear):
    """`x[t, f/tp] -> y[t/tp, h]`: the columns of one tensor are cut over tp; the bias is added
    once, after the sum.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t, f/tp]` to `y[t/tp, h]` under sequence parallelism, else `y[t, h]`."""
        options = self.options
        if options.sequence_parallel:
            y = product(x, self.weight, options.weight_gradients, options.tp, "scatter")
        else:
            y = reduce_from(product(x, self.weight, options.weight_gradients), options.tp)  # [t, h]
        return y if self.bias is None else y + self.bias

    def gradients(
        self, x: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor | None]]:
        """`dx[t, f/tp]`, and those of trained parameters (None: added to its bucket), without a
        forward.

        `grad` is that of the result: neither the product nor its reduction is needed to walk back
        through them.
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
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, axis: Axis
    ) -> torch.Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = collectives.all_reduce(
            wide.square().sum(-1, keepdim=True), axis
        )  # [t, 1], of all columns
        scale = torch.rsqrt(squares / (x.shape[-1] * axis.size) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.axis = axis
        return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, wide = x.to(scale.dtype) * scale, grads[0].to(scale.dtype)
        d_weight = (wide * normed).sum(0)  # [t, f/tp] -> [f/tp]
        wide = wide * weight.to(scale.dtype)
        coupled = collectives.all_reduce(
            (wide * normed).sum(-1, keepdim=True), ctx.axis
        )  # [t, 1], of all columns
        mean = coupled / (x.shape[-1] * ctx.axis.size)
        dx = wide.addcmul_(normed, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None, None


class ColumnNorm(nn.Module):
    """RMSNorm over columns of which each tp rank has its part: `x[t, size/tp]` to the same
    shape.
    """

    def __init__(self, weight: Tensor, epsilon: float, options: LinearOptions) -> None:
        super().__init__()
        self.epsilon, self.tp, self.zero_centered = epsilon, options.tp, weight.init == "zeros"
        self.weight = options.parameter(parameter_spec([weight], options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of each token; every tp rank holds the same tokens."""
        weight = (
            self.weight.to(accumulation_dtype(x.dtype)) + 1 if self.zero_centered else self.weight
        )
        return _ColumnNorm.apply(x, weight, self.epsilon, self.tp)
