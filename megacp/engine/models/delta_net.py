"""Gated DeltaNet in the place of self-attention (Yang et al., 2025; Qwen3-Next, Qwen3.5): a state
instead of keys.

One projection gives q, k, v, a gate z of the output, and for each value head the rate beta at which
a token writes and what the decay of the state is made of. q, k and v pass a short convolution.
Heads are cut over tp, a key head with the value heads it serves; tokens over cp, where the state
goes from rank to rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.recurrence import convolved_delta_rule
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.gated_delta import DELTA_PROJECTED, GATED_DELTA
from megacp.engine.models.attention import Angles
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import row_parameter


class GatedDeltaNet(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{GATED_DELTA.name}"
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.states = backend.states(convolved_delta_rule)
        linears = GATED_DELTA.linears(config)
        norm = NormSpec(f"layers.{layer}.attention_norm", config.hidden_size, config.norm_epsilon)
        self.project = backend.norm_column_linear(
            norm if config.has_input_norms else None,
            LinearSpec.of(prefix, linears, *DELTA_PROJECTED),
        )
        self.widths = [linears[name].outputs // backend.tp.size for name in DELTA_PROJECTED]
        *convolutions, bias, rate, _ = GATED_DELTA.others(config)
        self.convolution = row_parameter(prefix, convolutions, backend.options)
        self.dt_bias = row_parameter(prefix, [bias], backend.options)
        self.log_rate = row_parameter(prefix, [rate], backend.options)
        norm = NormSpec(f"{prefix}.norm", self.value_dim, config.norm_epsilon, gated=True)
        self.norm = backend.norm(norm, over_heads=True)
        self.output = backend.row_linear(LinearSpec.of(prefix, linears, "output"))

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save
    ) -> torch.Tensor:
        """Move states along the paths of the plan; positions have no part in it."""
        channels, z, b, a = self.project(x, save).split(
            [sum(self.widths[:3]), *self.widths[3:]], -1
        )
        convolved = self.states.convolve(channels, self.convolution.squeeze(1), plan)
        q, k, v = convolved.split(self.widths[:3], -1)
        wide = accumulation_dtype(x.dtype)
        log_decay = -self.log_rate.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        q, k, v, z = (
            part.unflatten(-1, (-1, width))  # [t, heads/tp * d] -> [t, heads/tp, d]
            for part, width in (
                (q, self.key_dim),
                (k, self.key_dim),
                (v, self.value_dim),
                (z, self.value_dim),
            )
        )
        out = self.states.move(plan, q, k, v, log_decay, b.sigmoid())
        return self.output(save(self._gated, out, z))

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.norm(out, z).flatten(1)
