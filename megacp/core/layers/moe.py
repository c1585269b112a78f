"""A mixture of experts in the place of the MLP: a router, and gated MLPs of which a token passes a few.

Tensors are those of single experts, so that any number of ep ranks reads what any other wrote. Experts are shared over
ep and never cut over tp, whose ranks hold other tokens under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.model import ModelConfig
from megacp.core.layers.table import EXPERTS, Flops, LayerKind, Share, Tensor, output_std


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


def expert_tensors(model: ModelConfig, name: str, experts: range) -> Iterator[Tensor]:
    """The matrix `gate`, `up` or `down` of some experts."""
    hidden, width, std = model.hidden_size, model.expert_hidden_size, model.init_method_std
    shape = (width, hidden)
    if name == "down":
        shape, std = (hidden, width), output_std(model)
    for expert in experts:
        yield Tensor(f"experts.{expert}.{name}.weight", shape, std=std, treated="matrix", reduced_over=EXPERTS)


def _others(model: ModelConfig) -> Iterator[Tensor]:
    yield router_tensor(model)
    yield from router_bias(model)
    for expert in range(model.num_experts):
        for name in ("gate", "up", "down"):
            yield from expert_tensors(model, name, range(expert, expert + 1))


def _flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """The scores of all experts, and the three products of the chosen ones."""
    chosen = 3 * model.expert_hidden_size * model.moe_router_topk
    return Flops(2.0 * tokens * model.hidden_size * (chosen + model.num_experts), 0.0)


def _rows(share: Share) -> int:
    """Rows of the experts of a rank, where all have the same."""
    return share.rows * share.model.moe_router_topk


def _kept(share: Share) -> tuple[int, int]:
    """A row and its gate and up, and what both make times the row's weight; that weight, the scores or their
    softmax, both where there are terms of balance, what becomes of the chosen ones, and the sums of their sigmoids.
    Frozen experts need no row again, nor what is made of it.
    """
    rows, model = _rows(share), share.model
    trained = "text" not in share.config.frozen_parts
    columns = (2 + (share.cheap and trained)) * model.expert_hidden_size + model.hidden_size * trained
    training, softmax = share.config.training, model.moe_router_score_function == "softmax"
    of_all = softmax and model.moe_router_pre_softmax
    tables = 1 + (of_all and training.moe_aux_loss_coeff + training.moe_z_loss_coeff > 0)
    sums = share.rows * (not softmax and not model.moe_router_pre_softmax)
    shares = share.rows * model.num_experts * tables + rows * (not of_all)
    return rows * columns, rows + shares + sums


def _held(share: Share) -> int:
    """The route, in indices of 8 bytes: experts of slots and their order, both ways; on several ranks that of rows; and
    rows that come from each rank for each expert.
    """
    indices = (3 + 2 * (share.config.parallel.expert_model_parallel_size > 1)) * _rows(share)
    return 8 * (indices + share.rows + share.model.num_experts)


def _work(share: Share) -> int:
    """Rows, and their gradients on both sides of the exchange."""
    return 3 * _rows(share) * share.model.hidden_size * share.size


MOE = LayerKind("mlp", lambda model: {}, (), _kept, _work, _others, _flops, _held)
