"""Mamba-2 in the place of self-attention (Dao and Gu, 2024; hybrids such as Nemotron-H): states
with one decay a head.

One projection gives a gate z, x, B and C, which pass a short convolution, and a step dt for each
head. Heads are cut over tp, a group of B and C with the heads that it serves; tokens over cp, where
states go from rank to rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.recurrence import state_space_dual
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.mamba2 import CONVOLVED, MAMBA2, MAMBA_PROJECTED
from megacp.engine.models.attention import Angles
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import row_parameter


class Mamba2(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{MAMBA2.name}"
        linears = MAMBA2.linears(config)
        self.states = backend.states(state_space_dual)
        self.state_size, self.head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.groups, self.epsilon = (
            config.linear_num_key_heads // backend.tp.size,
            config.norm_epsilon,
        )
        norm = NormSpec(f"layers.{layer}.attention_norm", config.hidden_size, config.norm_epsilon)
        self.project = backend.norm_column_linear(
            norm if config.has_input_norms else None,
            LinearSpec.of(prefix, linears, *MAMBA_PROJECTED),
        )
        self.widths = [linears[name].outputs // backend.tp.size for name in MAMBA_PROJECTED]
        others = list(MAMBA2.others(config))
        parts = len(CONVOLVED)
        self.convolution = row_parameter(prefix, others[:parts], backend.options)
        self.convolution_bias = row_parameter(prefix, others[parts : 2 * parts], backend.options)
        self.dt_bias, self.log_rate, self.skip, self.norm_weight = (
            row_parameter(prefix, [tensor], backend.options) for tensor in others[2 * parts :]
        )
        self.output = backend.row_linear(LinearSpec.of(prefix, linears, "output"))

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save
    ) -> torch.Tensor:
        """Move states along the paths of the plan; positions have no part in it."""
        z, channels, dt = self.project(x, save).split(
            [self.widths[0], sum(self.widths[1:4]), self.widths[4]], -1
        )
        convolved = (
            self.states.convolve(channels, self.convolution.squeeze(1), plan)
            + self.convolution_bias
        )
        x, b, c = F.silu(convolved).split(self.widths[1:4], -1)
        x = x.unflatten(-1, (-1, self.head_dim))  # [t, heads/tp, V]
        b, c = (part.unflatten(-1, (-1, self.state_size)) for part in (b, c))  # [t, groups/tp, K]
        wide = accumulation_dtype(x.dtype)
        step = F.softplus(dt.to(wide) + self.dt_bias.to(wide))  # [t, heads/tp]
        log_decay = -self.log_rate.to(wide).exp() * step
        read = self.states.move(plan, c, b, (x * step.unsqueeze(-1)).to(x.dtype), log_decay)
        return self.output(save(self._gated, read + x * self.skip.unsqueeze(-1), z))

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the heads of each group, of what the gate lets pass."""
        wide = accumulation_dtype(out.dtype)
        gated = (out.flatten(1) * F.silu(z)).unflatten(-1, (self.groups, -1)).to(wide)
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.epsilon)
        return self.norm_weight * normed.flatten(1).to(out.dtype)
