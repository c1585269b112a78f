"""The experts of a rank over their rows: two products, and an activation between them.

A product is one kernel for bf16 on CUDA, which reads on the device where the rows of each expert end, else a loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megacp.core.backends.mlp import Activation
from megacp.core.expert_parallel.route import Groups
from megacp.core.large_blocks import empty
from megacp.core.ops.pointwise import FromInputs


def _one_kernel(x: torch.Tensor, width: int) -> bool:
    """Whether torch's grouped product takes these rows, times matrices of another `width`: bf16 on CUDA, rows of whole
    16 bytes.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and x.shape[1] % 8 == width % 8 == 0


def _rows(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`x[R, a]` by expert times `matrices[n, a, b]`: `[R, b]`."""
    if _one_kernel(x, matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=groups.ends)
    y = empty((len(x), matrices.shape[2]), x)
    for out, rows, matrix in zip(y.split(groups.counts), x.split(groups.counts), matrices, strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def _weights(grad: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grad[R, b]` and `x[R, a]` by expert to the gradients `[n b, a]`: zeros of an expert without rows, for whose
    gradient its bucket waits.
    """
    if _one_kernel(x, grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=groups.ends).flatten(0, 1)
    d_weight = empty((groups.experts * grad.shape[1], x.shape[1]), x)
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
