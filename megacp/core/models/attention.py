"""Self-attention of the decoder: norm, fused q/k/v projection, optional q/k norms, rotary, core attention, output.

Heads are cut over tp and tokens over cp; only the backend communicates. Separate projections would gather the
sequence-parallel input three times.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.core.backends.mlp import Save
from megacp.core.backends.native import NativeBackend, NormSpec
from megacp.core.config.model import ModelConfig
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.models.init import output_std
from megacp.core.ops.mask import Reach
from megacp.core.ops.pointwise import sigmoid_gate
from megacp.core.ops.rotary import rotate
from megacp.core.tensor_parallel.linear import LinearSpec

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos, sin `[t, 1, rotary_dim / 2]` of this rank's tokens."""


def _opened(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return sigmoid_gate(out, gate).flatten(1)


class SelfAttention(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.attention"
        self.backend, self.rotates = backend, config.rotates(layer)
        self.head_dim = config.head_dim
        self.scale, self.reach = config.attention_scale, Reach(*config.reach(layer))
        heads, groups = config.num_attention_heads * self.head_dim, config.query_groups * self.head_dim
        hidden, epsilon = config.hidden_size, config.norm_epsilon
        self.gated = config.attention_output_gate
        tensors = (("q", heads * (1 + self.gated)), ("k", groups), ("v", groups))
        self.qkv = backend.norm_column_linear(
            NormSpec(f"{prefix}_norm", hidden, epsilon) if config.norm_position != "after" else None,
            LinearSpec(prefix, tensors, hidden, config.add_qkv_bias, config.init_method_std),
        )
        self.widths = [rows // backend.tp.size for _, rows in tensors]
        self.output = backend.row_linear(
            LinearSpec(prefix, (("output", hidden),), heads, config.add_attention_output_bias, output_std(config))
        )
        self.norms, self.column_norms = nn.ModuleList(), nn.ModuleList()
        for name, columns in (("q_norm", heads), ("k_norm", groups)) if config.qk_layernorm != "off" else ():
            if config.qk_layernorm == "head":
                self.norms.append(backend.norm(NormSpec(f"{prefix}.{name}", self.head_dim, epsilon), over_heads=True))
            else:
                self.column_norms.append(backend.column_norm(NormSpec(f"{prefix}.{name}", columns, epsilon)))

    def forward(self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save) -> torch.Tensor:
        """Attend under the plan."""
        q, k, v = self.qkv(x, save).split(self.widths, -1)
        if self.gated:  # each head's queries stand before its gate
            q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        if self.column_norms:
            q, k = self.column_norms[0](q.flatten(1)), self.column_norms[1](k)
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in (q, k, v))  # [t, heads/tp * d] -> [.., d]
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)  # their backward keeps the fused product, and v with it
        elif not self.column_norms:
            v = v.contiguous()  # a view would keep the whole fused product alive for backward
        q, k = (rotate(part, *rotary) if self.rotates else part.contiguous() for part in (q, k))
        out = self.backend.attention(q, k, v, plan.within(self.reach), self.scale)
        # [t, heads/tp, d] -> [t, heads/tp * d]
        return self.output(save(_opened, out, gate) if self.gated else out.flatten(1))
