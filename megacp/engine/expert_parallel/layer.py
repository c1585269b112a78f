"""The layer: norm, router, experts over the rows that come to them, and the sum of what they and a
shared one made.
"""

from __future__ import annotations

import torch
from torch import nn

from megacp.attention.ops.pointwise import sigmoid_gate
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.expert_parallel.balance import LayerBalance, with_terms
from megacp.engine.expert_parallel.exchange import to_experts, to_tokens, weights_to_experts
from megacp.engine.expert_parallel.experts import Experts
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.expert_parallel.router import SCORES, choose, first_of_equals, in_groups, logits
from megacp.engine.layers.moe import MOE, SHARED, router_bias, router_tensor, shared_gate_tensor
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec, product
from megacp.engine.tensor_parallel.parameters import row_parameter


class MixtureOfExperts(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`, a norm in front of it included."""

    def __init__(self, layer: int, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        prefix = f"layers.{layer}.{MOE.name}"
        self.layer = layer
        self.axis, self.experts, self.count = backend.ep, config.num_experts, config.moe_router_topk
        norm = NormSpec(f"layers.{layer}.mlp_norm", config.hidden_size, config.norm_epsilon)
        self.norm = backend.norm(norm) if config.has_input_norms else None
        self.score = SCORES[config.moe_router_score_function]
        self.weigh, self.factor = (
            self.score.weigh[config.moe_router_pre_softmax],
            config.moe_router_topk_scaling_factor,
        )
        self.groups = config.moe_router_num_groups, config.moe_router_group_topk
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
            products = (
                LinearSpec.of(f"{prefix}.shared", linears, *names) for names in SHARED.products
            )
            self.shared = backend.norm_mlp(None, *products)
        if config.moe_shared_expert_gate:
            self.shared_gate = row_parameter(prefix, [shared_gate_tensor(config)], backend.options)
        self.balance = LayerBalance(prefix, config, backend)

    def forward(self, x: torch.Tensor, save: Save, routes: Routes) -> torch.Tensor:
        """All ep ranks call it together, those without a token too."""
        normed = x if self.norm is None else save(self.norm, x)
        products = scores = logits(normed, self.router).index_select(0, routes.places)  # [t, E]
        if self.router_bias is not None:
            scores = products + self.router_bias
        if (route := routes.by_layer.get(self.layer)) is None:
            chosen = self._choose(products.detach())
            route = routes.by_layer[self.layer] = routes.make(
                chosen, routes.places, self.experts, self.axis
            )
            if routes.tokens > 0:
                routes.terms[self.layer] = self.balance.count(scores.detach(), chosen, routes)
        of_all = self._of_all(normed, save)  # launched before the host waits for numbers of rows
        scores = with_terms(scores, routes.terms.get(self.layer))
        weights = weights_to_experts(self.weigh(scores, route.chosen) * self.factor, route)
        made = self.matrices(to_experts(normed, route), weights, route.groups, save)  # [R, h]
        made = to_tokens(made, route, len(x))
        return made if of_all is None else made + of_all

    @torch.no_grad()
    def _choose(self, products: torch.Tensor) -> torch.Tensor:
        """Return int64 `[t, k]`, the experts of each token, from the products `[t, E]` of tokens
        and router.

        From the product on everything is done element by element, so experts that are alike stay
        alike.
        """
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
        """What the shared expert makes of every token."""
        if self.shared is None:
            return None
        made = self.shared(normed, save)
        return (
            made
            if self.shared_gate is None
            else sigmoid_gate(made, product(normed, self.shared_gate))
        )
