"""A mixture of experts in the place of the MLP: a router, and gated MLPs of which a token passes a few.

Tensors are those of single experts, so that any number of ep ranks reads what any other wrote. Experts are shared over
ep and never cut over tp, whose ranks hold other tokens under sequence parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.dense import gated_mlp
from megacp.engine.layers.table import EXPERTS, Flops, LayerKind, Linear, Share, Tensor, output_std

_ROUTED = "experts"
"""The part of kinds of linears (`experts.gate`) that all routed experts of a layer share."""


def router_tensor(model: ModelConfig) -> Tensor:
    """A score of each expert, of a token."""
    shape = (model.num_experts, model.hidden_size)
    return Tensor("router.weight", shape, std=model.init_method_std, treated="matrix")


def router_bias(model: ModelConfig) -> Iterator[Tensor]:
    """What is added to the scores, where there is such a thing."""
    if model.moe_router_bias:
        yield Tensor("router.bias", (model.num_experts,), init="zeros", decays=False)


def correction_tensor(model: ModelConfig) -> Tensor:
    """What is added to sigmoids where experts are chosen: no parameter, and float32 in any model."""
    return Tensor("router.correction", (model.num_experts,), init="zeros", decays=False)


def _of_expert(model: ModelConfig) -> dict[str, Linear]:
    hidden, width = model.hidden_size, model.expert_hidden_size
    into = Linear(hidden, width, model.init_method_std, model.add_mlp_bias, "whole", EXPERTS)
    out = Linear(width, hidden, output_std(model), model.add_mlp_bias, "whole", EXPERTS)
    return {"gate": into, "up": into, "down": out}


def expert_tensors(model: ModelConfig, name: str, experts: range) -> list[tuple[Tensor, ...]]:
    """The matrices `gate`, `up` or `down` of some experts, and then their biases where they have any."""
    linear = _of_expert(model)[name]
    return list(zip(*(linear.tensors(f"experts.{expert}.{name}") for expert in experts), strict=True))


def expert_pairs(model: ModelConfig, name: str, experts: range) -> list[list[Tensor]]:
    """The low-rank matrices A, unless they are another linear's, and B beside it: those of some experts."""
    size, linear = model.lora_pairs[f"{_ROUTED}.{name}"], _of_expert(model)[name]
    pairs = [list(linear.pair(f"experts.{expert}.{name}", size)) for expert in experts]
    return [list(of_each) for of_each in zip(*pairs, strict=True)]


def shared_gate_tensor(model: ModelConfig) -> Tensor:
    """What a token's share of the shared expert is made of."""
    return Tensor("shared_gate.weight", (1, model.hidden_size), std=model.init_method_std, treated="matrix")


def _others(model: ModelConfig) -> Iterator[Tensor]:
    yield router_tensor(model)
    if model.moe_shared_expert_gate:
        yield shared_gate_tensor(model)
    yield from router_bias(model)
    for expert in range(model.num_experts):
        for name in ("gate", "up", "down"):
            yield from itertools.chain(*expert_tensors(model, name, range(expert, expert + 1)))


def _flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """The scores of all experts and of the gate, and the three products of the chosen ones."""
    chosen = 3 * model.expert_hidden_size * model.moe_router_topk
    return Flops(2.0 * tokens * model.hidden_size * (chosen + model.num_experts + model.moe_shared_expert_gate), 0.0)


def most_load(config: RunConfig) -> float:
    """Rows of a rank's experts over those of an even load, where all ranks choose all that they can of it."""
    model, ep = config.model, config.parallel.expert_model_parallel_size
    return ep * min(model.moe_router_topk, model.num_experts // ep) / model.moe_router_topk


def planned_load(config: RunConfig) -> float:
    """The same of the load that is planned for; 1 where one rank has all experts."""
    return min(config.parallel.moe_planned_imbalance, most_load(config))


def _slots(share: Share) -> int:
    return share.rows * share.model.moe_router_topk


def expert_rows(share: Share) -> int:
    """Rows of a rank's experts under the load that is planned for."""
    return math.ceil(_slots(share) * planned_load(share.config))


def _kept(share: Share) -> tuple[int, int]:
    """A row and its gate and up, and what both make times the row's weight; that weight, the scores or their
    softmax, both where there are terms of balance, what becomes of the chosen ones, and the sums of their sigmoids.
    Frozen experts need no row again, nor what is made of it, but for low-rank pairs. What a gate opens, and that gate.
    Tiles need the row alone.
    """
    rows, model = expert_rows(share), share.model
    first, last = share.reads_again(_ROUTED, ("gate", "up")), share.reads_again(_ROUTED, ("down",))
    columns = (2 + (share.cheap and last)) * model.expert_hidden_size + model.hidden_size * first
    columns += sum(share.pair_ranks(_ROUTED, [*_of_expert(model)]))
    if share.tiled:
        columns = model.hidden_size
    opened = (share.residual + share.rows) * model.moe_shared_expert_gate
    training, softmax = share.config.training, model.moe_router_score_function == "softmax"
    of_all = softmax and model.moe_router_pre_softmax
    tables = 1 + (of_all and training.moe_aux_loss_coeff + training.moe_z_loss_coeff > 0)
    sums = share.rows * (not softmax and not model.moe_router_pre_softmax)
    shares = share.rows * model.num_experts * tables + _slots(share) * (not of_all)
    return rows * columns + opened, rows + shares + sums


def _held(share: Share) -> int:
    """The route, in indices of 8 bytes: experts of slots and their order, both ways; on several ranks that of rows; and
    rows that come from each rank for each expert.
    """
    arrived = 2 * expert_rows(share) * (share.config.parallel.expert_model_parallel_size > 1)
    return 8 * (3 * _slots(share) + arrived + share.rows + share.model.num_experts)


def _work(share: Share) -> int:
    """Rows, their gradients on both sides of the exchange, and what selective recomputation makes of them again.

    A tile has its own of what is not kept, with gradients, beside sums of the gradients of weights, wide and once more
    in the model's dtype.
    """
    config, model = share.config, share.model
    again = model.expert_hidden_size * (not share.cheap and not share.tiled and share.reads_again(_ROUTED, ("down",)))
    work = (3 * model.hidden_size + again) * expert_rows(share) * share.size
    if share.tiled:
        ranks, ep = share.tp if config.parallel.sequence_parallel else 1, config.parallel.expert_model_parallel_size
        tile = min(config.training.mlp_chunk_tokens // ranks, expert_rows(share))
        weights = 3 * model.hidden_size * model.expert_hidden_size * model.num_experts // ep
        work += (model.hidden_size + 6 * model.expert_hidden_size) * tile * share.size
        work += weights * (share.wide_size + share.size) * ("text" not in config.frozen_parts)
    return work


def exchange_bytes(config: RunConfig) -> int:
    """Bytes that a rank sends for a layer in a microbatch, under an even load: counts, rows and their weights there,
    rows back, and in backward the other way.
    """
    full, ep = config.training.recompute_granularity == "full", config.parallel.expert_model_parallel_size
    share = Share(config)
    away = _slots(share) * (ep - 1) // ep
    row, weight = config.model.hidden_size * share.size, share.wide_size
    return 8 * config.model.num_experts // ep * (ep - 1) + away * ((4 + full) * row + (2 + full) * weight)


def _shared_width(model: ModelConfig) -> int:
    return model.moe_shared_expert_intermediate_size or 0


SHARED = gated_mlp("mlp.shared", _shared_width)
"""The MLP that all tokens pass beside their experts."""
MOE = LayerKind("mlp", lambda model: {}, (), _kept, _work, _others, _flops, _held, _of_expert)
