"""Self-attention of the decoder: norm, fused q/k/v projection, optional per-head norms, rotary, core attention, output.

Heads are cut over tp and tokens over cp; only the backend communicates. Separate projections would gather the
sequence-parallel input three times.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.backends.base import Backend, NormSpec, Remember
from megacp.config.model import ModelConfig
from megacp.context_parallel.plan import AttentionPlan
from megacp.models.init import output_std
from megacp.ops.rotary import rotate
from megacp.tensor_parallel.linear import LinearSpec


class SelfAttention(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, the norm in front of it included."""

    def __init__(self, prefix: str, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        heads, groups = config.num_attention_heads * self.head_dim, config.query_groups * self.head_dim
        hidden, epsilon = config.hidden_size, config.norm_epsilon
        tensors = (("q", heads), ("k", groups), ("v", groups))
        self.qkv = backend.norm_column_linear(
            NormSpec(f"{prefix}_norm", hidden, epsilon),
            LinearSpec(prefix, tensors, hidden, config.add_qkv_bias, config.init_method_std),
        )
        self.widths = [heads // backend.tp.size, groups // backend.tp.size, groups // backend.tp.size]
        self.output = backend.row_linear(
            LinearSpec(prefix, (("output", hidden),), heads, config.add_attention_output_bias, output_std(config))
        )
        norms = ("q_norm", "k_norm") if config.qk_layernorm else ()
        self.norms = nn.ModuleList(
            backend.norm(NormSpec(f"{prefix}.{name}", self.head_dim, epsilon), over_heads=True) for name in norms
        )

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, rotary: tuple[torch.Tensor, torch.Tensor], remember: Remember
    ) -> torch.Tensor:
        """Attend under the plan; `rotary` is cos, sin `[t, 1, head_dim / 2]` of this rank's tokens."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x, remember).split(self.widths, -1)
        )  # [t, heads/tp * d] -> [t, heads/tp, d]
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)  # their backward keeps the fused product, and v with it
        else:
            v = v.contiguous()  # a view would keep the whole fused product alive for backward
        out = self.backend.attention(rotate(q, *rotary), rotate(k, *rotary), v, plan, self.scale)
        return self.output(out.flatten(1))  # [t, heads/tp, d] -> [t, heads/tp * d]
