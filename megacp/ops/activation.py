"""SwiGLU (Shazeer, 2020) that saves only its input, and GELU by name.

Key property: the gate and the up projection stay one tensor from the fused linear to here. Rejected: `silu(gate) * up`
by autograd, which keeps three tensors of the widest size in the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = gate_up.new_empty(gate_up.shape)
        d_gate, d_up = out.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        torch.mul(grad, F.silu(gate), out=d_up)
        return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: `[..., 2f] -> [..., f]`, gate first."""
    return _SwiGLU.apply(gate_up)


GELU: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""GELU (Hendrycks and Gimpel, 2016), exact and by its tanh approximation; torch's own saves its input alone."""
