"""The experts of a rank over their rows: two products, each a loop over experts, and an activation between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megacp.core.backends.mlp import Activation
from megacp.core.large_blocks import empty
from megacp.core.ops.pointwise import FromInputs


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts = counts
        matrices = weight.chunk(len(counts))
        y = empty((len(x), len(matrices[0])), x)
        for out, rows, matrix in zip(y.split(counts), x.split(counts), matrices, strict=True):
            torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), counts = ctx.saved_tensors, ctx.counts
        matrices, parts = weight.chunk(len(counts)), grads[0].split(counts)
        dx = d_weight = None
        if ctx.needs_input_grad[0]:
            dx = empty((len(grads[0]), weight.shape[1]), grads[0])
            for out, grad, matrix in zip(dx.split(counts), parts, matrices, strict=True):
                torch.mm(grad, matrix, out=out)
        if x is not None:  # an expert without rows has a gradient of zeros: its bucket waits for one
            d_weight = torch.empty_like(weight)
            for out, grad, rows in zip(d_weight.chunk(len(counts)), parts, x.split(counts), strict=True):
                torch.mm(grad.t(), rows, out=out)
        return dx, d_weight, None


def matrices_product(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`x[R, in]`, by expert, times the matrices `[n out, in]` of n experts: `[R, out]`."""
    return _Product.apply(x, weight, counts)


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
    return FromInputs.apply(partial(_activate, activation), partial(_gradients, activation), gate_up, weights)
