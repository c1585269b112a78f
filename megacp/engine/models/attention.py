"""Self-attention of the decoder: norm, fused q/k/v projection, optional q/k norms, rotary, core
attention, output.

Heads are cut over tp and tokens over cp; only the backend communicates. Separate projections would
gather the sequence-parallel input three times.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Reach
from megacp.attention.ops.pointwise import sigmoid_gate
from megacp.attention.ops.rotary import rotate
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.attention import ATTENTION, ATTENTION_PROJECTED, query_key_norms, sinks
from megacp.engine.layers.stack import layers_of
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import row_parameter

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos, sin `[t, 1, rotary_dim / 2]` of this rank's tokens."""


def _opened(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return sigmoid_gate(out, gate).flatten(1)


class SelfAttention(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{ATTENTION.name}"
        described, linears = layers_of(config)[layer], ATTENTION.linears(config)
        self.backend, self.rotates = backend, described.rotates
        self.head_dim, self.gated = config.head_dim, config.attention_output_gate
        self.scale, self.reach = config.attention_scale, Reach(described.window)
        epsilon = config.norm_epsilon
        self.qkv = backend.norm_column_linear(
            NormSpec(f"{prefix}_norm", config.hidden_size, epsilon)
            if config.has_input_norms
            else None,
            LinearSpec.of(prefix, linears, *ATTENTION_PROJECTED),
        )
        self.widths = [linears[name].outputs // backend.tp.size for name in ATTENTION_PROJECTED]
        self.output = backend.row_linear(LinearSpec.of(prefix, linears, "output"))
        own = [row_parameter(prefix, [tensor], backend.options) for tensor in sinks(config)]
        self.sinks = own[0] if own else None  # [heads/tp]
        self.norms, self.column_norms = nn.ModuleList(), nn.ModuleList()
        for tensor in query_key_norms(config):
            norm = NormSpec(
                f"{prefix}.{tensor.name.removesuffix('.weight')}", tensor.shape[0], epsilon
            )
            if tensor.cut == "whole":  # one weight for every head
                self.norms.append(backend.norm(norm, over_heads=True))
            else:
                self.column_norms.append(backend.column_norm(norm))

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save
    ) -> torch.Tensor:
        """Attend under the plan."""
        q, k, v = self.qkv(x, save).split(self.widths, -1)
        if self.gated:  # each head's queries stand before its gate
            q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        if self.column_norms:
            q, k = self.column_norms[0](q.flatten(1)), self.column_norms[1](k)
        q, k, v = (
            part.view(len(part), -1, self.head_dim) for part in (q, k, v)
        )  # [t, heads/tp * d] -> [.., d]
        if self.norms:
            q, k = (
                self.norms[0](q),
                self.norms[1](k),
            )  # their backward keeps the fused product, and v with it
        elif not self.column_norms:
            v = v.contiguous()  # a view would keep the whole fused product alive for backward
        q, k = (rotate(part, *rotary) if self.rotates else part.contiguous() for part in (q, k))
        out = self.backend.attention(
            q, k, v, plan.within(self.reach), self.scale, self.sinks, save.results
        )
        # [t, heads/tp, d] -> [t, heads/tp * d]
        return self.output(save(_opened, out, gate) if self.gated else out.flatten(1))
