"""RMSNorm of an activation whose columns are cut over tp: one sum of squares of all ranks, two small messages a norm.

Forward sums the squares of a token over the ranks, backward the product that couples its columns. Each is one wide
number a token. The weight is cut as the columns are, so its gradient needs no sum over tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacp.core.distributed import collectives
from megacp.core.distributed.grid import Axis
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice
from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.tensor_parallel.linear import LinearOptions


class _ColumnNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, axis: Axis) -> torch.Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = collectives.all_reduce(wide.square().sum(-1, keepdim=True), axis)  # [t, 1], of all columns
        scale = torch.rsqrt(squares / (x.shape[-1] * axis.size) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.axis = axis
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, wide = x.to(scale.dtype) * scale, grads[0].to(scale.dtype)
        d_weight = (wide * normed).sum(0)  # [t, f/tp] -> [f/tp]
        wide = wide * weight.to(scale.dtype)
        coupled = collectives.all_reduce((wide * normed).sum(-1, keepdim=True), ctx.axis)  # [t, 1], of all columns
        mean = coupled / (x.shape[-1] * ctx.axis.size)
        dx = wide.addcmul_(normed, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None, None


class ColumnNorm(nn.Module):
    """RMSNorm over `size` columns of which each tp rank has its part: `x[t, size/tp]` to the same shape."""

    def __init__(self, name: str, size: int, epsilon: float, options: LinearOptions) -> None:
        super().__init__()
        self.epsilon, self.tp = epsilon, options.tp
        local = size // options.tp.size
        piece = TensorSlice(f"{name}.weight", (size,), (options.tp.rank * local,), (local,))
        self.weight = options.parameter(ParameterSpec((piece,), "ones", weight_decay=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of each token; every tp rank holds the same tokens."""
        return _ColumnNorm.apply(x, self.weight, self.epsilon, self.tp)
