"""The layer: norm, router, rows to their experts, experts, and the sum of what they made of a token."""

from __future__ import annotations

import torch
from torch import nn

from megacp.core.backends.mlp import Save
from megacp.core.backends.native import NativeBackend, NormSpec
from megacp.core.config.model import ModelConfig
from megacp.core.expert_parallel.exchange import to_experts, to_tokens, weights_to_experts
from megacp.core.expert_parallel.experts import Experts
from megacp.core.expert_parallel.route import Route, Routes
from megacp.core.expert_parallel.router import WEIGHTS, choose, logits
from megacp.core.layers.moe import MOE, router_tensor
from megacp.core.tensor_parallel.linear import row_parameter


class MixtureOfExperts(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{MOE.name}"
        self.layer = layer
        self.axis, self.experts, self.count = backend.ep, config.num_experts, config.moe_router_topk
        norm = NormSpec(f"layers.{layer}.mlp_norm", config.hidden_size, config.norm_epsilon)
        self.norm = backend.norm(norm) if config.norm_position != "after" else None
        self.weigh = WEIGHTS[config.moe_router_pre_softmax]
        own = self.experts // self.axis.size
        here = range(self.axis.rank * own, (self.axis.rank + 1) * own)
        self.router = row_parameter(prefix, [router_tensor(config)], backend.options)
        self.matrices = backend.tiled(Experts(prefix, here, config, backend.options))

    def forward(self, x: torch.Tensor, save: Save, routes: Routes) -> torch.Tensor:
        """All ep ranks call it together, those without a token too."""
        normed = x if self.norm is None else save(self.norm, x)
        scores = logits(normed, self.router).index_select(0, routes.places)  # [t, E]
        if (route := routes.by_layer.get(self.layer)) is None:
            chosen = choose(scores.detach(), self.count)
            route = routes.by_layer[self.layer] = Route(chosen, routes.places, self.experts, self.axis)
        weights = weights_to_experts(self.weigh(scores, route.chosen), route)
        made = self.matrices(to_experts(normed, route), weights, route.groups, save)  # [R, h]
        return to_tokens(made, route, len(x))
