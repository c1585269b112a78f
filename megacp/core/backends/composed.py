"""A norm with the product that follows it, and a whole SwiGLU MLP, composed of a backend's separate layers.

Each cheap step is a function of its own: selective recomputation drops the norm's output and the widest activation
without repeating a product or a message.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.core.backends.base import Remember
from megacp.core.ops.pointwise import swiglu


class NormLinear(nn.Module):
    """`x[t/tp, h] -> linear(norm(x))`: see `Backend.norm_column_linear`."""

    def __init__(self, norm: nn.Module | None, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        return self.linear(x if self.norm is None else remember(self.norm, x))


class NormMLP(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`: norm, gate and up in one product, SwiGLU, down; see `Backend.norm_mlp`."""

    def __init__(self, norm: nn.Module | None, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate_up, self.down = norm, gate_up, down

    def forward(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        return self.down(self.wide(x, remember))

    def wide(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        """What the last product multiplies, `[t, f/tp]`."""
        return remember(swiglu, self.gate_up(x if self.norm is None else remember(self.norm, x)))
