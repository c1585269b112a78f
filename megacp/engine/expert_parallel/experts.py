"""The experts of a rank over their rows: two products, and an activation between them; low-rank
pairs beside them.

A product is one kernel for bf16 on CUDA, which reads on the device where the rows of each expert
end, else a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.ops.device import STAND_IN
from megacp.attention.ops.pointwise import ACTIVATIONS, FromInputs
from megacp.distributed.large_blocks import empty
from megacp.engine.backends.mlp import Activation
from megacp.engine.config.model import ModelConfig
from megacp.engine.expert_parallel.route import Groups
from megacp.engine.layers.moe import expert_pairs, expert_tensors
from megacp.engine.layers.table import Tensor, lora_kind
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.lora import places_of_inputs
from megacp.engine.tensor_parallel.parameters import LinearOptions, row_parameter


def _one_kernel(x: torch.Tensor, width: int) -> bool:
    """Whether torch's grouped product takes these rows, times matrices of another `width`: bf16 on
    CUDA, rows of whole 16 bytes.
    """
    return (
        x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and x.shape[1] % 8 == width % 8 == 0
    )


def _rows(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`x[R, a]` by expert times `matrices[n, a, b]`: `[R, b]`."""
    if _one_kernel(x, matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=groups.ends)
    y = empty((len(x), matrices.shape[2]), x)
    if x.device.type == STAND_IN:  # nobody knows how many rows each expert has
        return y
    for out, rows, matrix in zip(
        y.split(groups.counts), x.split(groups.counts), matrices, strict=True
    ):
        torch.mm(rows, matrix, out=out)
    return y


def _weights(grad: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grad[R, b]` and `x[R, a]` by expert to the gradients `[n b, a]`: zeros of an expert without
    rows, for whose gradient its bucket waits.
    """
    if _one_kernel(x, grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=groups.ends).flatten(0, 1)
    d_weight = empty((groups.experts * grad.shape[1], x.shape[1]), x)
    if x.device.type == STAND_IN:
        return d_weight
    parts = d_weight.chunk(groups.experts), grad.split(groups.counts), x.split(groups.counts)
    for out, given, rows in zip(*parts, strict=True):
        torch.mm(given.t(), rows, out=out)
    return d_weight


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.groups = groups
        return _rows(x, weight.unflatten(0, (groups.experts, -1)).transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), groups = ctx.saved_tensors, ctx.groups
        grad, dx = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            dx = _rows(grad, weight.unflatten(0, (groups.experts, -1)), groups)
        return dx, None if x is None else _weights(grad, x, groups), None


def matrices_product(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`x[R, in]`, by expert, times the matrices `[n out, in]` of n experts: `[R, out]`."""
    return _Product.apply(x, weight, groups)


class _Biased(torch.autograd.Function):
    """`rows[R, out]` and the bias of each one's expert, of `[n out]`, times the weight of the row
    `[R, 1]`, if any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        bias: torch.Tensor,
        weights: torch.Tensor | None,
        groups: Groups,
    ) -> torch.Tensor:
        ctx.save_for_backward(bias, weights)
        ctx.groups = groups
        each = groups.spread(bias, len(rows))
        return rows + (each if weights is None else (each * weights).to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (bias, weights), groups, grad = ctx.saved_tensors, ctx.groups, grads[0].contiguous()
        d_bias = d_weights = None
        if weights is not None:
            each = groups.spread(bias, len(grad))
            d_weights = (grad.to(weights.dtype) * each).sum(-1, keepdim=True)
        if ctx.needs_input_grad[
            1
        ]:  # sums over the rows of an expert, as a product with columns of ones
            weighed = grad if weights is None else (grad * weights).to(grad.dtype)
            d_bias = _weights(weighed, weighed.new_ones(len(weighed), 8), groups)[:, 0].contiguous()
        return grad, d_bias, d_weights, None


def _activate(activation: Activation, gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    active = activation(gate_up)
    return (active.to(weights.dtype) * weights).to(active.dtype)


def _gradients(
    activation: Activation, grad: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = grad.to(weights.dtype)
    with torch.enable_grad():
        given = gate_up.detach().requires_grad_()
        active = activation(given)
    (d_given,) = torch.autograd.grad(active, given, (wide * weights).to(grad.dtype))
    return d_given, (wide * active.detach()).sum(-1, keepdim=True)


def activated(gate_up: torch.Tensor, weights: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate_up)[R, I]` times the weight of each row `[R, 1]`; saves the two."""
    return FromInputs.apply(
        partial(_activate, activation), partial(_gradients, activation), gate_up, weights
    )


class ExpertLinear(nn.Module):
    """`x[R, in]` by expert to `[R, out]`: the named matrices of each expert, and the low-rank pairs
    of those that have one. A pair has the names, and the axis of its sums, of the expert beside
    which it stands.
    """

    def __init__(
        self,
        prefix: str,
        names: Sequence[str],
        experts: range,
        config: ModelConfig,
        options: LinearOptions,
    ) -> None:
        super().__init__()
        tensors = [expert_tensors(config, name, experts) for name in names]
        # those of each expert in turn: [n out, in] and [n out]
        kinds = (list(chain(*zip(*of_kind, strict=True))) for of_kind in zip(*tensors, strict=True))
        self.weight, *bias = (row_parameter(prefix, of_kind, options) for of_kind in kinds)
        self.bias = bias[0] if bias else None
        self.widths = [weights[0].shape[0] for weights, *_ in tensors]
        self.sizes = [config.lora_pairs.get(lora_kind(f"experts.{name}")) for name in names]
        self.places, self.ranks = places_of_inputs(names, self.sizes)
        if self.ranks:
            trained = replace(options, trained=True)
            downs, ups = list[list[Tensor]](), list[list[Tensor]]()
            for name, size in zip(names, self.sizes, strict=True):
                if size is not None:
                    *a, b = expert_pairs(config, name, experts)
                    downs += a
                    ups.append(b)
            down = list(chain(*zip(*downs, strict=True)))
            self.low = row_parameter(
                prefix, down, trained
            )  # A of all pairs of an expert in turn, [n ranks, in]
            self.high = nn.ParameterList(
                row_parameter(prefix, b, trained) for b in ups
            )  # B of each, [n out, r]

    def forward(
        self, x: torch.Tensor, groups: Groups, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`weights[R, 1]`: what biases are to be multiplied by, as x has been."""
        y = matrices_product(x, self.weight, groups)
        y = y if self.bias is None else _Biased.apply(y, self.bias, weights, groups)
        if not self.ranks:
            return y
        inputs, ups = matrices_product(x, self.low, groups).split(self.ranks, -1), iter(self.high)
        parts = []
        for part, size, place in zip(
            y.split(self.widths, -1), self.sizes, self.places, strict=True
        ):
            if size is not None:
                part = torch.add(
                    part, matrices_product(inputs[place], next(ups), groups), alpha=size.scale
                )
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class Experts(nn.Module):
    """`x[R, h]` by expert, and the weight of each row `[R, 1]`, to what they make of it, `[R,
    h]`.
    """

    def __init__(
        self, prefix: str, experts: range, config: ModelConfig, options: LinearOptions
    ) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(prefix, ("gate", "up"), experts, config, options)
        self.down = ExpertLinear(prefix, ("down",), experts, config, options)
        self.activation = ACTIVATIONS[config.mlp_activation]

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, groups: Groups, save: Save
    ) -> torch.Tensor:
        gate_up = self.gate_up(x, groups)  # [R, 2I]
        return self.down(
            save(partial(activated, activation=self.activation), gate_up, weights), groups, weights
        )
