"""One decoder block: pre-norm attention and MLP with residuals, dropout and recomputation.

Key property: one body, which only says what it would remember; how much is recomputed is chosen once, outside of it.
Rejected: flags read inside attention and MLP.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from megacp.backends.base import Backend, Remember
from megacp.config.model import ModelConfig
from megacp.context_parallel.plan import AttentionPlan
from megacp.models.attention import SelfAttention
from megacp.models.init import output_std
from megacp.models.recompute import rerun
from megacp.ops.dropout import dropout


@dataclass(frozen=True)
class BlockInputs:
    """What every block of a microbatch shares: the plan, rotary angles, and the names of its dropout bits."""

    plan: AttentionPlan
    rotary: tuple[torch.Tensor, torch.Tensor]
    token_names: torch.Tensor
    """int64 `[t/tp]`: names of the tokens of the residual stream on this rank."""
    key: int


class Block(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`; the layer index is global."""

    def __init__(self, layer: int, config: ModelConfig, backend: Backend, recompute: str) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.layer = layer
        self.dropout = config.hidden_dropout
        self.attention = SelfAttention(f"{prefix}.attention", config, backend)
        self.mlp = backend.norm_mlp(
            f"{prefix}.mlp_norm",
            f"{prefix}.mlp",
            config.hidden_size,
            config.ffn_hidden_size,
            epsilon=config.norm_epsilon,
            bias=config.add_mlp_bias,
            std=config.init_method_std,
            output_std=output_std(config),
        )
        self.precision = backend.precision if recompute == "full" else contextlib.nullcontext
        self.run = rerun(self._body, recompute)

    def forward(self, x: torch.Tensor, inputs: BlockInputs) -> torch.Tensor:
        """Run the block under the recompute granularity it was built with."""
        return self.run(x, inputs)

    def _body(self, x: torch.Tensor, inputs: BlockInputs, remember: Remember) -> torch.Tensor:
        with self.precision():  # the block that is computed again in backward stands in no other context
            attended = self.attention(x, inputs.plan, inputs.rotary, remember)
            x = x + self._drop(attended, inputs, 2 * self.layer)
            return x + self._drop(self.mlp(x, remember), inputs, 2 * self.layer + 1)

    def _drop(self, x: torch.Tensor, inputs: BlockInputs, site: int) -> torch.Tensor:
        return dropout(
            x, inputs.key + site * 0x9E3779B97F4A7C15, inputs.token_names, self.dropout if self.training else 0.0
        )
