"""A norm with the product that follows it, and a whole SwiGLU MLP, composed of a backend's separate layers.

Key property: each cheap step is a function of its own, so selective recomputation can drop the norm's output and the
widest activation without repeating a product or a message. Rejected: two products for gate and up, and one autograd
function for all steps, which only a kernel that really fuses them repays.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.backends.base import Remember
from megacp.ops.activation import swiglu


def gate_and_up(ffn_size: int) -> list[tuple[str, int]]:
    """The global tensors of an MLP's first product, in the order of SwiGLU's halves."""
    return [("gate", ffn_size), ("up", ffn_size)]


class NormLinear(nn.Module):
    """`x[t/tp, h] -> linear(norm(x))`."""

    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        """See `Backend.norm_column_linear`."""
        return self.linear(remember(self.norm, x))


class NormMLP(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`: norm, gate and up in one product, SwiGLU, down."""

    def __init__(self, norm: nn.Module, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate_up, self.down = norm, gate_up, down

    def forward(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        """See `Backend.norm_mlp`."""
        return self.down(remember(swiglu, self.gate_up(remember(self.norm, x))))
