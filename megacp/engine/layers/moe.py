"""A mixture of experts in the place of the MLP: a router, and gated MLPs of which a token passes a
few.

Tensors are those of single experts, so that any number of ep ranks reads what any other wrote.
Experts are shared over ep and never cut over tp, whose ranks hold other tokens under sequence
parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.dense import gated_mlp
from megacp.engine.layers.table import (
    EXPERTS,
    Flops,
    LayerKind,
    Linear,
    Tensor,
    output_std,
    rows_per_rank,
)

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
    """What is added to sigmoids where experts are chosen: no parameter, and float32 in any
    model.
    """
    return Tensor("router.correction", (model.num_experts,), init="zeros", decays=False)


def _of_expert(model: ModelConfig) -> dict[str, Linear]:
    hidden, width = model.hidden_size, model.expert_hidden_size
    into = Linear(hidden, width, model.init_method_std, model.add_mlp_bias, "whole", EXPERTS)
    out = Linear(width, hidden, output_std(model), model.add_mlp_bias, "whole", EXPERTS)
    return {"gate": into, "up": into, "down": out}


def expert_tensors(model: ModelConfig, name: str, experts: range) -> list[tuple[Tensor, ...]]:
    """The matrices `gate`, `up` or `down` of some experts, and then their biases where they have
    any.
    """
    linear = _of_expert(model)[name]
    return list(
        zip(*(linear.tensors(f"experts.{expert}.{name}") for expert in experts), strict=True)
    )


def expert_pairs(model: ModelConfig, name: str, experts: range) -> list[list[Tensor]]:
    """The low-rank matrices A, unless they are another linear's, and B beside it: those of some
    experts.
    """
    size, linear = model.lora_pairs[f"{_ROUTED}.{name}"], _of_expert(model)[name]
    pairs = [list(linear.pair(f"experts.{expert}.{name}", size)) for expert in experts]
    return [list(of_each) for of_each in zip(*pairs, strict=True)]


def shared_gate_tensor(model: ModelConfig) -> Tensor:
    """What a token's share of the shared expert is made of."""
    return Tensor(
        "shared_gate.weight", (1, model.hidden_size), std=model.init_method_std, treated="matrix"
    )


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
    return Flops(
        2.0
        * tokens
        * model.hidden_size
        * (chosen + model.num_experts + model.moe_shared_expert_gate),
        0.0,
    )


def most_load(config: RunConfig) -> float:
    """Rows of a rank's experts over those of an even load, where all ranks choose all that they can
    of it.
    """
    model, ep = config.model, config.parallel.expert_model_parallel_size
    return ep * min(model.moe_router_topk, model.num_experts // ep) / model.moe_router_topk


def planned_load(config: RunConfig) -> float:
    """The same of the load that is planned for; 1 where one rank has all experts."""
    return min(config.parallel.moe_planned_imbalance, most_load(config))


def _slots(config: RunConfig) -> int:
    return rows_per_rank(config) * config.model.moe_router_topk


def expert_rows(config: RunConfig) -> int:
    """Return the rows of a rank's experts under the load that is planned for."""
    return math.ceil(_slots(config) * planned_load(config))


def exchange_bytes(config: RunConfig) -> int:
    """Bytes that a rank sends for a layer in a microbatch, under an even load: counts, rows and
    their weights there, rows back, and in backward the other way.
    """
    full, ep = (
        config.training.recompute_mode.repeats_block,
        config.parallel.expert_model_parallel_size,
    )
    away = _slots(config) * (ep - 1) // ep
    row = config.model.hidden_size * config.training.element_bytes
    weight = config.training.accumulation_bytes
    return 8 * config.model.num_experts // ep * (ep - 1) + away * (
        (4 + full) * row + (2 + full) * weight
    )


def _shared_width(model: ModelConfig) -> int:
    return model.moe_shared_expert_intermediate_size or 0


SHARED = gated_mlp("mlp.shared", _shared_width)
"""The MLP that all tokens pass beside their experts."""
MOE = LayerKind("mlp", lambda model: {}, (), _others, _flops, _of_expert)
