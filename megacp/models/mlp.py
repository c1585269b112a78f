"""The SwiGLU MLP: gate and up in one column-parallel product, down row-parallel.

Key property: the widest activation is made by one function, so selective recomputation can drop it. Rejected: two
products for gate and up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megacp.backends.base import Backend
from megacp.config.model import ModelConfig
from megacp.models.init import output_std
from megacp.ops.activation import swiglu


class MLP(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`."""

    def __init__(self, prefix: str, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.ffn_hidden_size
        self.gate_up = backend.column_linear(
            prefix, [("gate", width), ("up", width)], hidden, bias=config.add_mlp_bias, std=config.init_method_std
        )
        self.down = backend.row_linear(
            f"{prefix}.down", width, hidden, bias=config.add_mlp_bias, std=output_std(config)
        )

    def forward(self, x: torch.Tensor, remember: Callable[..., torch.Tensor]) -> torch.Tensor:
        """`remember(function, *inputs)` calls the activation and decides how autograd stores its output."""
        return self.down(remember(swiglu, self.gate_up(x)))
