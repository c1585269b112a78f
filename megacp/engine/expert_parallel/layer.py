"""The mixture-of-experts layer: norm, router, experts, and the sum of their outputs.

A shared expert, if the model has one, processes every token.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.attention.ops.pointwise import sigmoid_gate
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.expert_parallel.balance import LayerBalance, with_terms
from megacp.engine.expert_parallel.exchange import (
    to_experts,
    to_tokens,
    weights_to_experts,
)
from megacp.engine.expert_parallel.experts import Experts
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.expert_parallel.router import (
    SCORES,
    choose,
    first_of_equals,
    in_groups,
    logits,
)
from megacp.engine.layers.moe import (
    MOE,
    SHARED,
    router_bias,
    router_tensor,
    shared_gate_tensor,
)
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec, product
from megacp.engine.tensor_parallel.parameters import row_parameter


class MixtureOfExperts(nn.Module):
    """Map `x[t/tp, h]` to `[t/tp, h]`; includes the input norm."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{MOE.name}"
        self.layer = layer
        self.axis = backend.ep
        self.experts = config.num_experts
        self.count = config.moe_router_topk
        norm = NormSpec(f"layers.{layer}.mlp_norm", config.hidden_size, config.norm_epsilon)
        self.norm = backend.norm(norm) if config.has_input_norms else None
        self.score = SCORES[config.moe_router_score_function]
        self.weigh = self.score.weigh[config.moe_router_pre_softmax]
        self.factor = config.moe_router_topk_scaling_factor
        self.groups = config.moe_router_num_groups, config.moe_router_group_topk
        # each ep rank has a contiguous range of experts
        own = self.experts // self.axis.size
        here = range(self.axis.rank * own, (self.axis.rank + 1) * own)
        self.router = row_parameter(prefix, [router_tensor(config)], backend.options)
        biases = [row_parameter(prefix, [bias], backend.options) for bias in router_bias(config)]
        self.router_bias = biases[0] if biases else None  # [E]
        self.matrices = backend.tiled(Experts(prefix, here, config, backend.options))
        self.shared: nn.Module | None = None
        self.shared_gate: nn.Parameter | None = None
        if config.moe_shared_expert_intermediate_size:
            linears = SHARED.linears(config)
            shared = f"{prefix}.shared"
            products = [LinearSpec.of(shared, linears, *names) for names in SHARED.products]
            self.shared = backend.norm_mlp(None, *products)
        if config.moe_shared_expert_gate:
            self.shared_gate = row_parameter(prefix, [shared_gate_tensor(config)], backend.options)
        self.balance = LayerBalance(prefix, config, backend)

    def forward(self, x: torch.Tensor, save: Save, routes: Routes) -> torch.Tensor:
        """Return the layer's output `[t/tp, h]`.

        Collective over the ep ranks: ranks without tokens must also call it.
        """
        normed = x if self.norm is None else save(self.norm, x)
        products = logits(normed, self.router).index_select(0, routes.places)  # [t, E]
        scores = products
        if self.router_bias is not None:
            scores = products + self.router_bias
        route = routes.by_layer.get(self.layer)
        if route is None:  # otherwise this is a recomputation, which must not count tokens again
            chosen = self._choose(products.detach())
            route = routes.make(chosen, routes.places, self.experts, self.axis)
            routes.by_layer[self.layer] = route
            if routes.tokens > 0:
                routes.terms[self.layer] = self.balance.count(scores.detach(), chosen, routes)
        of_all = self._of_all(normed, save)  # launched before the host waits for row counts
        scores = with_terms(scores, routes.terms.get(self.layer))
        weights = self.weigh(scores, route.chosen) * self.factor  # [t, k]
        weights = weights_to_experts(weights, route)  # [R, 1]
        made = self.matrices(to_experts(normed, route), weights, route.groups, save)  # [R, h]
        made = to_tokens(made, route, len(x))
        return made if of_all is None else made + of_all

    @torch.no_grad()
    def _choose(self, products: torch.Tensor) -> torch.Tensor:
        """Return the experts of each token, int64 `[t, k]`, based on the router logits `[t, E]`.

        All operations after the matrix product are elementwise, so equal experts keep equal scores.
        """
        # a matrix product may round equal rows differently, so use the logits of the first of them
        scores = products.index_select(1, first_of_equals(self.router))
        if self.router_bias is not None:
            scores = scores + self.router_bias
        choice = self.score.choice(scores)
        if self.balance.correction is not None:
            choice = choice + self.balance.correction
        if self.groups[0] > 1:
            choice = in_groups(choice, *self.groups)
        return choose(choice, self.count)

    def _of_all(self, normed: torch.Tensor, save: Save) -> torch.Tensor | None:
        """Return the shared expert's output `[t/tp, h]`; None if there is no shared expert."""
        if self.shared is None:
            return None
        made = self.shared(normed, save)
        if self.shared_gate is None:
            return made
        return sigmoid_gate(made, product(normed, self.shared_gate))
