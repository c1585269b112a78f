"""Mamba-2 (Dao and Gu, 2024; Nemotron-H), a recurrent mixer instead of attention.

One projection computes the gate z, the inputs x, B and C, and a step size dt for each head. A short
convolution processes x, B and C. Each head has one decay rate. tp splits the heads, and each group
of B and C stays with its heads. cp splits the tokens, and ranks pass states on.
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
    """Mamba-2 with its input norm: `x[t/tp, h] -> [t/tp, h]`."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{MAMBA2.name}"
        linears = MAMBA2.linears(config)
        self.states = backend.states(state_space_dual)
        self.state_size = config.linear_key_head_dim
        self.head_dim = config.linear_value_head_dim
        self.groups = config.linear_num_key_heads // backend.tp.size
        self.epsilon = config.norm_epsilon
        norm = NormSpec(f"layers.{layer}.attention_norm", config.hidden_size, config.norm_epsilon)
        self.project = backend.norm_column_linear(
            norm if config.has_input_norms else None,
            LinearSpec.of(prefix, linears, *MAMBA_PROJECTED),
        )
        self.widths = [linears[name].outputs // backend.tp.size for name in MAMBA_PROJECTED]
        # in the order of the description: convolution weights and biases, then four vectors
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
        """Run the recurrence along the plan's documents and branches; ignore `rotary`."""
        # the convolution expects x, B and C as one tensor of channels
        widths = [self.widths[0], sum(self.widths[1:4]), self.widths[4]]
        z, channels, dt = self.project(x, save).split(widths, -1)
        convolved = self.states.convolve(channels, self.convolution.squeeze(1), plan)
        convolved = convolved + self.convolution_bias
        x, b, c = F.silu(convolved).split(self.widths[1:4], -1)
        x = x.unflatten(-1, (-1, self.head_dim))  # [t, heads/tp, V]
        b, c = (part.unflatten(-1, (-1, self.state_size)) for part in (b, c))  # [t, groups/tp, K]
        wide = accumulation_dtype(x.dtype)
        step = F.softplus(dt.to(wide) + self.dt_bias.to(wide))  # [t, heads/tp]
        log_decay = -self.log_rate.to(wide).exp() * step
        # C reads the state, and B and x write to it, like q, k and v in attention
        read = self.states.move(plan, c, b, (x * step.unsqueeze(-1)).to(x.dtype), log_decay)
        return self.output(save(self._gated, read + x * self.skip.unsqueeze(-1), z))

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Multiply by the SiLU of the gate, then apply RMSNorm over the heads of each group."""
        # in fp32 or wider, like all norms
        wide = accumulation_dtype(out.dtype)
        gated = (out.flatten(1) * F.silu(z)).unflatten(-1, (self.groups, -1)).to(wide)
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.epsilon)
        return self.norm_weight * normed.flatten(1).to(out.dtype)
