"""`--pipeline-schedule zero_bubble` on ranks: weight gradients that wait are those of 1F1B, no bucket goes early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.backends.select import backend_problems, select_backend
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.tensor_parallel.linear import product
from megacp.core.tensor_parallel.weight_gradients import DeferredWeightGradients, WeightProduct
from megacp.core.training.step import ParallelModel
from megacp.verify.parity import MODELS
from tests.ranks import grid, run_ranks
from tests.tensor_parallel.test_fused_gradient import SIZES as TINY

NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "chunks": "num_virtual_stages_per_pipeline_rank",
}
SIZES: dict[str, Any] = {**TINY, "num_layers": 4, "untie_embeddings_and_output_weights": False}
MICROBATCHES = 5


def config_of(shape: dict[str, int], settings: dict[str, Any], asked: str) -> RunConfig:
    sizes = {NAMES[key]: size for key, size in shape.items() if key in NAMES}
    return with_values(RunConfig(), {**SIZES, **sizes, **settings, "pipeline_schedule": asked})


def step(
    rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], asked: str
) -> tuple[float, list[np.ndarray], list[int]]:
    """Loss and summed gradients of microbatches of several lengths, twice the same step, this rank's slices; and the
    buckets that are under way when `finish` begins.
    """
    model = ParallelModel(config_of(shape, settings, asked), grid(**{k: n for k, n in shape.items() if k != "chunks"}))
    dp = shape.get("dp", 1)
    first = (rank // (shape.get("tp", 1) * shape.get("cp", 1))) % dp * MICROBATCHES
    batches = [
        mock_batch([first + i], MockRules(SIZES["vocab_size"], 64 + 32 * (i % 3), mask="mixed"))
        for i in range(MICROBATCHES)
    ]
    finish, parameters, under_way = model.parameters.finish, model.parameters, []

    def counted() -> None:
        under_way.append(len(parameters._pending))  # type: ignore[attr-defined]
        finish()

    parameters.finish = counted  # type: ignore[method-assign]
    for _ in range(2):  # the second step begins with what the first has left
        parameters.zero()
        loss = model.gradients(batches, 1, 100.0)
    return loss, [parameters.grad_shard(i).numpy().copy() for i in range(len(parameters.shards))], under_way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({"pp": 2}, {}),
        ({"pp": 4}, {"recompute_granularity": "selective"}),
        ({"pp": 2, "chunks": 2}, {"recompute_granularity": "full"}),
        ({"pp": 2, "tp": 2}, {}),
        ({"pp": 2, "tp": 2}, {"sequence_parallel": False, "hidden_dropout": 0.1}),
        ({"pp": 2, "cp": 2}, {"cp_comm_type": "a2a"}),
        ({"pp": 2, "dp": 2}, {}),
        ({"pp": 3}, {"activation_offload": 1.0}),
        ({"pp": 2}, {"qk_layernorm": "head", "norm_position": "after"}),
    ],
)
def test_gradients_are_those_of_1f1b(shape: dict[str, int], settings: dict[str, Any]) -> None:
    """float64, with the same products: only the order of two sums differs."""
    world = int(np.prod([n for name, n in shape.items() if name != "chunks"]))
    plain = run_ranks(step, world, shape, settings, "1f1b")
    waiting = run_ranks(step, world, shape, settings, "zero_bubble")
    for (loss, expected, _), (found_loss, found, _) in zip(plain, waiting, strict=True):
        assert found_loss == loss
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-13)


def sinks(rank: int, world: int) -> list[bool]:
    """Whether gradients wait: of the backend, of its vision tower."""
    values = {**MODELS["tiny_vlm"], "pipeline_model_parallel_size": world, "pipeline_schedule": "zero_bubble"}
    backend = select_backend(with_values(RunConfig(), values), grid(pp=world))
    options = (backend.options, backend.tower("vision").options)  # type: ignore[attr-defined]
    return [option.weight_gradients.deferred for option in options]


def test_nothing_waits_where_nobody_is_waited_for() -> None:
    assert run_ranks(sinks, 2) == [[False, False], [True, False]]


def products(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The gradient of a weight over two microbatches, whose inputs tp ranks share: deferred, and by autograd."""
    tp = grid(tp=world).tp
    generator = torch.Generator().manual_seed(rank)
    weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9)))
    inputs = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2)]
    for x in inputs:
        product(x, weight, None, tp, "gather").square().sum().backward()
    expected = weight.grad
    assert expected is not None
    weight.grad, told = None, []
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    weight.gradient_added = lambda weight: told.append(len(told))  # type: ignore[attr-defined]
    later = DeferredWeightGradients()
    for number, x in enumerate(inputs):
        product(x, weight, later, tp, "gather").square().sum().backward()
        assert weight.grad is None
        later.keep((number, 0))
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
    later.add((0, 0), last=False)
    assert not told
    later.add((1, 0), last=True)
    return weight.main_grad.detach(), expected, told  # type: ignore[attr-defined]


def test_an_input_that_tp_ranks_share_is_gathered_when_its_product_comes() -> None:
    for found, expected, told in run_ranks(products, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert told == [0]


def test_a_weight_with_several_products_is_told_once_after_the_last() -> None:
    weight, told = torch.nn.Parameter(torch.zeros(2, 2)), []
    weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    weight.gradient_added = lambda weight: told.append(weight.main_grad.sum().item())  # type: ignore[attr-defined]
    later = DeferredWeightGradients()
    for _ in range(3):
        later.take(WeightProduct(weight, torch.ones(1, 2), torch.ones(1, 2)))
    later.keep((0, 0))
    later.add((0, 0), last=True)
    assert told == [12.0]


def test_transformer_engines_layers_are_refused_by_name() -> None:
    asked = {"transformer_impl": "transformer_engine", "dtype": "bfloat16", "pipeline_model_parallel_size": 2}
    (reason,) = backend_problems(config_of({}, asked, "zero_bubble"), None)
    assert "--pipeline-schedule zero_bubble defers weight gradients, which native layers alone do" in reason
