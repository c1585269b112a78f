"""Self-attention of the decoder, from the input norm to the output projection.

tp splits the heads and cp the tokens; only the backend communicates. The q/k/v projection is fused,
because separate projections would gather the sequence-parallel input three times.
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
"""cos and sin of this rank's tokens, each `[t, 1, rotary_dim / 2]`."""


def _opened(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply `out[t, heads, d]` by the sigmoid of its gate; return `[t, heads * d]`."""
    return sigmoid_gate(out, gate).flatten(1)


class SelfAttention(nn.Module):
    """Self-attention with its input norm: `x[t/tp, h] -> [t/tp, h]`."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{ATTENTION.name}"
        described = layers_of(config)[layer]
        linears = ATTENTION.linears(config)
        self.backend = backend
        self.rotates = described.rotates
        self.head_dim = config.head_dim
        self.gated = config.attention_output_gate
        self.scale = config.attention_scale
        self.reach = Reach(described.window)
        epsilon = config.norm_epsilon
        input_norm = None
        if config.has_input_norms:
            input_norm = NormSpec(f"{prefix}_norm", config.hidden_size, epsilon)
        self.qkv = backend.norm_column_linear(
            input_norm, LinearSpec.of(prefix, linears, *ATTENTION_PROJECTED)
        )
        # widths of q (with its gate), k and v in the fused output of this tp rank
        self.widths = [linears[name].outputs // backend.tp.size for name in ATTENTION_PROJECTED]
        self.output = backend.row_linear(LinearSpec.of(prefix, linears, "output"))
        own = [row_parameter(prefix, [tensor], backend.options) for tensor in sinks(config)]
        self.sinks = own[0] if own else None  # [heads/tp]
        # norms of q and k: within each head, or over the heads of all tp ranks
        self.norms = nn.ModuleList()
        self.column_norms = nn.ModuleList()
        for tensor in query_key_norms(config):
            name = f"{prefix}.{tensor.name.removesuffix('.weight')}"
            norm = NormSpec(name, tensor.shape[0], epsilon)
            if tensor.cut == "whole":  # the heads share one weight
                self.norms.append(backend.norm(norm, over_heads=True))
            else:
                self.column_norms.append(backend.column_norm(norm))

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, rotary: Angles, save: Save
    ) -> torch.Tensor:
        """Return the attention output of this rank's tokens, `[t/tp, h]`, under the plan's mask."""
        q, k, v = self.qkv(x, save).split(self.widths, -1)
        if self.gated:
            # each head's query precedes its gate: [t, heads/tp * 2 d] -> 2 x [t, heads/tp, d]
            q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        if self.column_norms:
            parts = (q.flatten(1), k)
            q, k = (norm(part) for norm, part in zip(self.column_norms, parts, strict=True))
        # [t, heads/tp * d] -> [t, heads/tp, d]
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in (q, k, v))
        if self.norms:
            # v may stay a view, because these norms save the whole fused product anyway
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        elif not self.column_norms:
            # a view would keep the whole fused product alive until the backward pass
            v = v.contiguous()
        if self.rotates:
            q, k = (rotate(part, *rotary) for part in (q, k))
        else:
            q, k = (part.contiguous() for part in (q, k))
        reach = plan.within(self.reach)  # the plan for a layer with this window
        out = self.backend.attention(q, k, v, reach, self.scale, self.sinks, save.results)
        # [t, heads/tp, d] -> [t, heads/tp * d]
        if self.gated:
            return self.output(save(_opened, out, gate))
        return self.output(out.flatten(1))
