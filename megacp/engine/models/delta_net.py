"""Gated DeltaNet (Yang et al., 2025; Qwen3-Next, Qwen3.5), a recurrent mixer instead of attention.

One projection computes q, k, v, the output gate z, and two rates for each value head: b for the
write strength and a for the decay of the state. A short convolution processes q, k and v. tp splits
the heads, and each key head stays with its value heads. cp splits the tokens, and ranks pass the
state on.
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
    """Gated DeltaNet with its input norm: `x[t/tp, h] -> [t/tp, h]`."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{GATED_DELTA.name}"
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.states = backend.states(convolved_delta_rule)
        linears = GATED_DELTA.linears(config)
        norm = NormSpec(f"layers.{layer}.attention_norm", config.hidden_size, config.norm_epsilon)
        self.project = backend.norm_column_linear(
            norm if config.has_input_norms else None,
            LinearSpec.of(prefix, linears, *DELTA_PROJECTED),
        )
        self.widths = [linears[name].outputs // backend.tp.size for name in DELTA_PROJECTED]
        # in the order of the description, which ends with the norm; the backend builds the norm
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
        """Run the recurrence along the plan's documents and branches; ignore `rotary`."""
        # the convolution expects q, k and v as one tensor of channels
        widths = [sum(self.widths[:3]), *self.widths[3:]]
        channels, z, b, a = self.project(x, save).split(widths, -1)
        convolved = self.states.convolve(channels, self.convolution.squeeze(1), plan)
        # q and k: [t, key heads/tp * d]; v: [t, value heads/tp * d]
        q, k, v = convolved.split(self.widths[:3], -1)
        # decays are close to 1, so their logarithms are fp32 or wider: [t, value heads/tp]
        wide = accumulation_dtype(x.dtype)
        log_decay = -self.log_rate.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        # [t, heads/tp * d] -> [t, heads/tp, d]
        q = q.unflatten(-1, (-1, self.key_dim))
        k = k.unflatten(-1, (-1, self.key_dim))
        v = v.unflatten(-1, (-1, self.value_dim))
        z = z.unflatten(-1, (-1, self.value_dim))
        out = self.states.move(plan, q, k, v, log_decay, b.sigmoid())
        return self.output(save(self._gated, out, z))

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the gated norm to each head: `[t, heads/tp, d] -> [t, heads/tp * d]`."""
        return self.norm(out, z).flatten(1)
