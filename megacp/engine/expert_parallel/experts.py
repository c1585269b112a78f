"""A rank's experts: two grouped matrix products with an activation between them, and LoRA pairs.

For bf16 on CUDA, a grouped product is a single kernel, which reads the experts' row ranges on the
device. Otherwise, it is a loop over the experts.
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
    """Return whether `grouped_mm` supports `x[R, a]` and a matrix with the other dimension `width`.

    It requires bf16 on CUDA and rows that are a multiple of 16 bytes.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    return len(x) > 0 and x.shape[1] % 8 == width % 8 == 0


def _rows(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiply `x[R, a]`, sorted by expert, by `matrices[n, a, b]`; return `[R, b]`."""
    if _one_kernel(x, matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=groups.ends)
    y = empty((len(x), matrices.shape[2]), x)
    if x.device.type == STAND_IN:  # row counts have no values on this device
        return y
    inputs = x.split(groups.counts)
    outputs = y.split(groups.counts)
    for out, rows, matrix in zip(outputs, inputs, matrices, strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def _weights(grad: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the weight gradients `[n b, a]` from `grad[R, b]` and `x[R, a]`, sorted by expert.

    The gradient of an expert without rows is 0 rather than missing, because buckets wait for it.
    """
    if _one_kernel(x, grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=groups.ends).flatten(0, 1)
    # [n b, a]; torch.mm below writes every element
    d_weight = empty((groups.experts * grad.shape[1], x.shape[1]), x)
    if x.device.type == STAND_IN:
        return d_weight
    outputs = d_weight.chunk(groups.experts)
    gradients = grad.split(groups.counts)
    inputs = x.split(groups.counts)
    for out, given, rows in zip(outputs, gradients, inputs, strict=True):
        torch.mm(given.t(), rows, out=out)
    return d_weight


class _Product(torch.autograd.Function):
    """Grouped product of `x[R, in]` and `weight[n out, in]`; saves no `x` for frozen weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.groups = groups
        matrices = weight.unflatten(0, (groups.experts, -1))  # [n, out, in]
        return _rows(x, matrices.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups = ctx.groups
        grad = grads[0].contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _rows(grad, weight.unflatten(0, (groups.experts, -1)), groups)
        d_weight = None if x is None else _weights(grad, x, groups)
        return dx, d_weight, None


def matrices_product(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiply `x[R, in]`, sorted by expert, by the matrices `weight[n out, in]` of n experts.

    Return `[R, out]`.
    """
    return _Product.apply(x, weight, groups)


class _Biased(torch.autograd.Function):
    """Add the bias of its expert, from `bias[n out]`, to each row of `rows[R, out]`.

    If `weights[R, 1]` is given, the bias is first multiplied by the weight of the row.
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
        each = groups.spread(bias, len(rows))  # [R, out]
        if weights is not None:
            each = (each * weights).to(rows.dtype)
        return rows + each

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias, weights = ctx.saved_tensors
        groups = ctx.groups
        grad = grads[0].contiguous()
        d_bias = d_weights = None
        if weights is not None:
            each = groups.spread(bias, len(grad))
            d_weights = (grad.to(weights.dtype) * each).sum(-1, keepdim=True)
        if ctx.needs_input_grad[1]:
            weighed = grad if weights is None else (grad * weights).to(grad.dtype)
            # sum each expert's rows by a product with ones; grouped_mm needs 8 columns
            ones = weighed.new_ones(len(weighed), 8)
            d_bias = _weights(weighed, ones, groups)[:, 0].contiguous()
        return grad, d_bias, d_weights, None


def _activate(activation: Activation, gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    active = activation(gate_up)  # [R, I]
    return (active.to(weights.dtype) * weights).to(active.dtype)


def _gradients(
    activation: Activation,
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = grad.to(weights.dtype)
    # apply the activation again, this time recorded by autograd
    with torch.enable_grad():
        given = gate_up.detach().requires_grad_()
        active = activation(given)
    (d_given,) = torch.autograd.grad(active, given, (wide * weights).to(grad.dtype))
    return d_given, (wide * active.detach()).sum(-1, keepdim=True)


def activated(gate_up: torch.Tensor, weights: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate_up)` times `weights`, `[R, I]`; save only these two inputs."""
    forward = partial(_activate, activation)
    backward = partial(_gradients, activation)
    return FromInputs.apply(forward, backward, gate_up, weights)


class ExpertLinear(nn.Module):
    """Multiply `x[R, in]`, sorted by expert, by the named matrices of each expert: `[R, out]`.

    A matrix may have a LoRA pair, which is named after its expert and reduced over the same axis.
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
        # One parameter for the weights [n out, in] and one for the biases [n out]. They have all
        # named matrices of the first expert, then those of the second, and so on.
        parameters = []
        for of_kind in zip(*tensors, strict=True):
            by_expert = list(chain(*zip(*of_kind, strict=True)))
            parameters.append(row_parameter(prefix, by_expert, options))
        self.weight, *bias = parameters
        self.bias = bias[0] if bias else None
        # output columns of each named matrix
        self.widths = [weights[0].shape[0] for weights, *_ in tensors]
        self.sizes = [config.lora_pairs.get(lora_kind(f"experts.{name}")) for name in names]
        self.places, self.ranks = places_of_inputs(names, self.sizes)
        if self.ranks:
            trained = replace(options, trained=True)
            downs: list[list[Tensor]] = []
            ups: list[list[Tensor]] = []
            for name, size in zip(names, self.sizes, strict=True):
                if size is not None:
                    *a, b = expert_pairs(config, name, experts)
                    downs += a
                    ups.append(b)
            # all A matrices of the first expert, then those of the second, and so on: [n ranks, in]
            down = list(chain(*zip(*downs, strict=True)))
            self.low = row_parameter(prefix, down, trained)
            # for each name, the B matrices of all experts: [n out, r]
            self.high = nn.ParameterList(row_parameter(prefix, b, trained) for b in ups)

    def forward(
        self,
        x: torch.Tensor,
        groups: Groups,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[R, out]`; if `x` is already weighted, `weights[R, 1]` also weight the biases."""
        y = matrices_product(x, self.weight, groups)
        if self.bias is not None:
            y = _Biased.apply(y, self.bias, weights, groups)
        if not self.ranks:
            return y
        # one product for the A matrices of all pairs, then one product per B matrix
        inputs = matrices_product(x, self.low, groups).split(self.ranks, -1)
        ups = iter(self.high)
        outputs = y.split(self.widths, -1)
        parts = []
        for part, size, place in zip(outputs, self.sizes, self.places, strict=True):
            if size is not None:
                low = inputs[place]  # [R, r]
                part = torch.add(part, matrices_product(low, next(ups), groups), alpha=size.scale)
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class Experts(nn.Module):
    """Apply each expert's MLP to its rows of `x[R, h]`; return `[R, h]`.

    Every output row is multiplied by its routing weight in `weights[R, 1]`.
    """

    def __init__(
        self,
        prefix: str,
        experts: range,
        config: ModelConfig,
        options: LinearOptions,
    ) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(prefix, ("gate", "up"), experts, config, options)
        self.down = ExpertLinear(prefix, ("down",), experts, config, options)
        self.activation = ACTIVATIONS[config.mlp_activation]

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        groups: Groups,
        save: Save,
    ) -> torch.Tensor:
        gate_up = self.gate_up(x, groups)  # [R, 2I]
        # the product is linear, so weighting the activations is the same as weighting the outputs
        activate = partial(activated, activation=self.activation)
        return self.down(save(activate, gate_up, weights), groups, weights)
