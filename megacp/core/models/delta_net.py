"""Gated DeltaNet in the place of self-attention (Yang et al., 2025; Qwen3-Next, Qwen3.5): a state instead of keys.

One projection gives q, k, v, a gate z of the output, and for each value head the rate beta at which a token writes and
what the decay of the state is made of. q, k and v pass a short convolution. Heads are cut over tp, a key head with the
value heads it serves; tokens over cp, where the state goes from rank to rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megacp.core.backends.mlp import Save
from megacp.core.backends.native import NativeBackend, NormSpec
from megacp.core.config.model import ModelConfig
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice
from megacp.core.models.attention import Angles
from megacp.core.models.init import output_std
from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.tensor_parallel.linear import LinearSpec


class GatedDeltaNet(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix, tp = f"layers.{layer}.linear_attention", backend.tp
        self.backend, self.key_dim, self.value_dim = backend, config.linear_key_head_dim, config.linear_value_head_dim
        hidden, heads, taps = config.hidden_size, config.linear_num_value_heads, config.linear_conv_kernel_dim
        sizes = config.linear_sizes(layer)
        tensors = tuple((name, sizes[name][1]) for name in ("q", "k", "v", "z", "b", "a"))
        norm = NormSpec(f"layers.{layer}.attention_norm", hidden, config.norm_epsilon)
        self.project = backend.norm_column_linear(
            norm if config.norm_position != "after" else None,
            LinearSpec(prefix, tensors, hidden, False, config.init_method_std),
        )
        self.widths = [rows // tp.size for _, rows in tensors]
        pieces, start = list[TensorSlice](), 0
        for (name, rows), local in zip(tensors[:3], self.widths, strict=False):
            place, whole = (tp.rank * local, 0, 0), (rows, 1, taps)  # as torch's Conv1d has it
            pieces.append(TensorSlice(f"{prefix}.convolution_{name}.weight", whole, place, (local, 1, taps), start))
            start += local
        convolution = ParameterSpec(tuple(pieces), "uniform", (3 * taps) ** -0.5, treated="vector")
        self.convolution = backend.options.parameter(convolution)
        here = (tp.rank * self.widths[-1],), (self.widths[-1],)
        bias, rate = (TensorSlice(f"{prefix}.{name}", (heads,), *here) for name in ("dt_bias", "A_log"))
        self.dt_bias = backend.options.parameter(ParameterSpec((bias,), "ones", treated="vector", weight_decay=False))
        decay = ParameterSpec((rate,), "log_rate", 1.0, treated="vector", weight_decay=False)
        self.log_rate = backend.options.parameter(decay)
        norm = NormSpec(f"{prefix}.norm", self.value_dim, config.norm_epsilon, gated=True)
        self.norm = backend.norm(norm, over_heads=True)
        width = config.linear_heads_width
        self.output = backend.row_linear(LinearSpec(prefix, (("output", hidden),), width, False, output_std(config)))

    def forward(self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save) -> torch.Tensor:
        """Move states along the paths of the plan; positions have no part in it."""
        channels, z, b, a = self.project(x, save).split([sum(self.widths[:3]), *self.widths[3:]], -1)
        convolved = self.backend.convolution(channels, self.convolution.squeeze(1), plan)
        q, k, v = convolved.split(self.widths[:3], -1)
        wide = accumulation_dtype(x.dtype)
        log_decay = -self.log_rate.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        q, k, v, z = (
            part.unflatten(-1, (-1, width))  # [t, heads/tp * d] -> [t, heads/tp, d]
            for part, width in ((q, self.key_dim), (k, self.key_dim), (v, self.value_dim), (z, self.value_dim))
        )
        out = self.backend.delta_rule(plan, q, k, v, log_decay, b.sigmoid())
        return self.output(save(self._gated, out, z))

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.norm(out, z).flatten(1)
