"""SwiGLU (Shazeer, 2020) that saves its input alone, and GELU by name.

Key property: gate and up projection stay one tensor from the fused linear to here. Rejected: `silu(gate) * up` by
autograd, which keeps three tensors of the widest size in the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megacp.core.large_blocks import empty
from megacp.core.ops.compiled import fused


def _formula(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _by_passes(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.ops.aten.silu.out(gate, out=empty(gate.shape, gate)).mul_(up)


_swiglu = fused(_formula, _by_passes)


def _backward_formula(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1)


def _backward_by_passes(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The formula written to halves of its result: no other tensor, and no copy of the halves."""
    gate, up = gate_up.chunk(2, -1)
    result = empty(gate_up.shape, gate_up)
    for_gate, for_up = result.chunk(2, -1)
    torch.mul(grad, up, out=for_gate)
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(grad)
    return result


_swiglu_backward = fused(_backward_formula, _backward_by_passes)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _swiglu_backward(*grads, *ctx.saved_tensors)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: `[..., 2f] -> [..., f]`, gate first."""
    return _SwiGLU.apply(gate_up)


GELU: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""GELU (Hendrycks and Gimpel, 2016), exact and by its tanh approximation; torch's saves its input alone."""
