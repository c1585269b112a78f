"""A mixture of experts in place of the MLP: a router chooses a few gated MLPs for each token.

Every expert has separate tensors, so a checkpoint can be read with any ep. Experts are distributed
across ep ranks but never split over tp, because with sequence parallelism each tp rank has
different tokens.
"""

from __future__ import annotations

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
"""Prefix of routed experts' linear kinds, such as `experts.gate`."""


def router_tensor(model: ModelConfig) -> Tensor:
    """Return the router weight `[experts, hidden]`, which scores the experts for each token."""
    shape = (model.num_experts, model.hidden_size)
    return Tensor("router.weight", shape, std=model.init_method_std, treated="matrix")


def router_bias(model: ModelConfig) -> Iterator[Tensor]:
    """Yield the router's bias `[experts]`, if the model has one."""
    if model.moe_router_bias:
        yield Tensor("router.bias", (model.num_experts,), init="zeros", decays=False)


def correction_tensor(model: ModelConfig) -> Tensor:
    """Return the correction `[experts]`, which is added to the sigmoids when experts are chosen.

    It is a float32 buffer in every model, not a parameter.
    """
    return Tensor("router.correction", (model.num_experts,), init="zeros", decays=False)


def _of_expert(model: ModelConfig) -> dict[str, Linear]:
    hidden = model.hidden_size
    width = model.expert_hidden_size
    bias = model.add_mlp_bias
    # "whole": not split over tp
    into = Linear(hidden, width, model.init_method_std, bias, "whole", EXPERTS)
    out = Linear(width, hidden, output_std(model), bias, "whole", EXPERTS)
    return {"gate": into, "up": into, "down": out}


def expert_tensors(model: ModelConfig, name: str, experts: range) -> list[tuple[Tensor, ...]]:
    """Return the weights, and the biases if the model has them, of one linear layer of the experts.

    `name` is `gate`, `up` or `down`. Each tuple contains one tensor per expert: the first tuple the
    weights, the second the biases.
    """
    linear = _of_expert(model)[name]
    # transpose: (weight, bias) of each expert -> (weights of all experts), (biases of all experts)
    of_experts = [linear.tensors(f"experts.{expert}.{name}") for expert in experts]
    return list(zip(*of_experts, strict=True))


def expert_pairs(model: ModelConfig, name: str, experts: range) -> list[list[Tensor]]:
    """Return the LoRA matrices of one linear layer of the experts: a list of all A, then of all B.

    The list of A is omitted if the pairs share the A of another linear layer.
    """
    size = model.lora_pairs[f"{_ROUTED}.{name}"]
    linear = _of_expert(model)[name]
    # transpose: (A, B) of each expert -> (A of all experts), (B of all experts)
    pairs = [list(linear.pair(f"experts.{expert}.{name}", size)) for expert in experts]
    return [list(of_each) for of_each in zip(*pairs, strict=True)]


def shared_gate_tensor(model: ModelConfig) -> Tensor:
    """Return the weight `[1, hidden]` of the shared expert's gate."""
    return Tensor(
        "shared_gate.weight", (1, model.hidden_size), std=model.init_method_std, treated="matrix"
    )


def _others(model: ModelConfig) -> Iterator[Tensor]:
    yield router_tensor(model)
    if model.moe_shared_expert_gate:
        yield shared_gate_tensor(model)
    yield from router_bias(model)
    linears = _of_expert(model)
    for expert in range(model.num_experts):
        for name in ("gate", "up", "down"):
            yield from linears[name].tensors(f"experts.{expert}.{name}")


def _flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Return the FLOPs of the router, the shared expert's gate and the chosen experts."""
    # Each weight has `hidden_size` as one dimension; these are the other dimensions.
    chosen = 3 * model.expert_hidden_size * model.moe_router_topk  # gate, up and down
    scores = model.num_experts + int(model.moe_shared_expert_gate)
    return Flops(2.0 * tokens * model.hidden_size * (chosen + scores), 0.0)


def most_load(config: RunConfig) -> float:
    """Return the largest possible load of a rank's experts, relative to an even load.

    It occurs if every token chooses as many experts of this rank as possible.
    """
    model = config.model
    ep = config.parallel.expert_model_parallel_size
    most_chosen = min(model.moe_router_topk, model.num_experts // ep)
    return ep * most_chosen / model.moe_router_topk


def planned_load(config: RunConfig) -> float:
    """Return the expert load to plan for, relative to an even load; 1 if a rank has all experts."""
    return min(config.parallel.moe_planned_imbalance, most_load(config))


def _slots(config: RunConfig) -> int:
    """Return the number of (token, chosen expert) pairs for a rank's tokens."""
    return rows_per_rank(config) * config.model.moe_router_topk


def expert_rows(config: RunConfig) -> int:
    """Return the number of rows that a rank's experts process under the planned load."""
    return math.ceil(_slots(config) * planned_load(config))


def exchange_bytes(config: RunConfig) -> int:
    """Return the bytes that a rank sends for one layer and microbatch, under an even load.

    The rank sends counts, rows and router weights to the experts, which send rows back. The
    backward pass does the reverse. Full recomputation repeats the exchange to the experts.
    """
    model = config.model
    ep = config.parallel.expert_model_parallel_size
    full = int(config.training.recompute_mode.repeats_block)
    away = _slots(config) * (ep - 1) // ep  # rows for experts on other ranks
    row = model.hidden_size * config.training.element_bytes
    weight = config.training.accumulation_bytes
    counts = 8 * model.num_experts // ep * (ep - 1)  # int64 per expert on other ranks
    # Rows are sent to the experts and back, in both passes. Weights are sent to the experts in the
    # forward pass, and their gradients are sent back in the backward pass.
    return counts + away * ((4 + full) * row + (2 + full) * weight)


def _shared_width(model: ModelConfig) -> int:
    return model.moe_shared_expert_intermediate_size or 0


SHARED = gated_mlp("mlp.shared", _shared_width)
"""The shared expert, an MLP that processes every token."""
# Experts are `others` rather than `linears`, because tp does not split their tensors.
MOE = LayerKind("mlp", lambda model: {}, (), _others, _flops, _of_expert)
