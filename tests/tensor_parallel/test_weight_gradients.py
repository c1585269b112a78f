"""Where weight gradients go: into the buckets (`--gradient-accumulation-fusion`), or there later (zero bubble)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.backends import apex
from megacp.core.backends.select import backend_problems, select_backend
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.tensor_parallel.linear import product
from megacp.core.tensor_parallel.weight_gradients import (
    DeferredWeightGradients,
    WeightGradients,
    WeightProduct,
    add_weight_gradient,
)
from megacp.core.training.step import ParallelModel
from megacp.verify.parity import MODELS
from tests.ranks import grid, run_ranks

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 64,
    "seq_length": 64,
    "add_qkv_bias": True,
    "add_mlp_bias": True,
    "dtype": "float64",
    "ddp_bucket_size": 2000,
}
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "chunks": "num_virtual_stages_per_pipeline_rank",
}
MICROBATCHES = 5


def config_of(shape: dict[str, int], settings: dict[str, Any]) -> RunConfig:
    sizes = {NAMES[key]: size for key, size in shape.items() if key in NAMES}
    return with_values(RunConfig(), {**SIZES, **sizes, **settings})


def gradients(rank: int, world: int, shape: dict[str, int], settings: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    """Loss and summed gradients of microbatches of several lengths, twice the same step, this rank's slices."""
    model = ParallelModel(config_of(shape, settings), grid(**{k: n for k, n in shape.items() if k != "chunks"}))
    first = (rank // (shape.get("tp", 1) * shape.get("cp", 1))) % shape.get("dp", 1) * MICROBATCHES
    batches = [
        mock_batch([first + i], MockRules(SIZES["vocab_size"], 64 + 32 * (i % 3), mask="mixed"))
        for i in range(MICROBATCHES)
    ]
    for _ in range(2):  # the second step begins with what the first has left
        model.parameters.zero()
        loss = model.gradients(batches, 1, 100.0)
    return loss, [model.parameters.grad_shard(i).numpy().copy() for i in range(len(model.parameters.shards))]


def assert_same(shape: dict[str, int], settings: dict[str, Any], change: dict[str, Any]) -> None:
    """float64, with the same products: only the order of two sums differs."""
    world = int(np.prod([n for name, n in shape.items() if name != "chunks"], dtype=int))
    plain, other = (run_ranks(gradients, world, shape, {**settings, **more}) for more in ({}, change))
    for (loss, expected), (found_loss, found) in zip(plain, other, strict=True):
        assert found_loss == loss
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"dp": 2}, {"pp": 2}])
def test_fused_gradients_are_those_of_autograd(shape: dict[str, int], recompute: str) -> None:
    assert_same(shape, {"recompute_granularity": recompute}, {"gradient_accumulation_fusion": True})


def test_a_tied_table_that_is_used_twice_stays_with_autograd() -> None:
    """Its first gradient would otherwise count as its last."""
    assert_same({}, {"untie_embeddings_and_output_weights": False}, {"gradient_accumulation_fusion": True})


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
def test_deferred_gradients_are_those_of_1f1b(shape: dict[str, int], settings: dict[str, Any]) -> None:
    assert_same(shape, {"num_layers": 4, **settings}, {"pipeline_schedule": "zero_bubble"})


def fused_launches(rank: int, world: int) -> list[int]:
    """Buckets under way when `finish` begins, without and with fusion."""
    found = []
    for fused in (False, True):
        model = ParallelModel(config_of({}, {"gradient_accumulation_fusion": fused}), grid(dp=world))
        batch = mock_batch([rank], MockRules(SIZES["vocab_size"], SIZES["seq_length"]))
        finish, pending = model.parameters.finish, model.parameters

        def counted(finish: Any = finish, pending: Any = pending) -> None:
            found.append(len(pending._pending))
            finish()

        model.parameters.finish = counted  # type: ignore[method-assign]
        model.gradients([batch], 1, 1.0)
    return found


def test_buckets_are_reduced_during_backward_as_before() -> None:
    for without, with_fusion in run_ranks(fused_launches, 2):
        assert with_fusion == without > 4


def test_halves_are_added_to_a_float32_total() -> None:
    grad, x = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(6, 3, dtype=torch.bfloat16)
    total = torch.ones(4, 3)
    add_weight_gradient(total, grad, x)
    torch.testing.assert_close(total, 1 + (grad.t() @ x).float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (2, 5, 3)])
def test_a_weight_in_a_bucket_or_not_takes_any_number_of_rows(
    shape: tuple[int, ...],
) -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(shape, requires_grad=True)
    product(x, weight, WeightGradients()).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().flatten(0, -2).sum(0).expand(4, 3))
    weight.main_grad, weight.gradient_added = torch.zeros(4, 3), lambda _: None  # type: ignore[attr-defined]
    y = product(x, weight, WeightGradients())
    assert torch.equal(y, x @ weight.t())
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, weight.grad)  # type: ignore[attr-defined]
    assert x.grad is not None and x.grad.shape == shape


class Kernel:
    """In the place of apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        assert x.is_contiguous() and grad.is_contiguous()
        total.add_((grad.t() @ x).float())


def test_apexes_kernel_gets_its_arguments_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in ("absent", "impostor", "nvidia"):
        monkeypatch.setattr(apex, "apex_status", lambda status=status: status)
        assert apex.weight_gradient_kernel() is None
    monkeypatch.setattr(apex, "find_spec", lambda name: object())
    monkeypatch.setattr(apex, "import_module", lambda name: Kernel)
    add = apex.weight_gradient_kernel()
    assert add is not None
    total, grad, x = torch.zeros(4, 3), torch.randn(4, 6).t(), torch.randn(6, 3)
    add(total, grad, x)
    torch.testing.assert_close(total, grad.t() @ x)


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
    asked = {"transformer_impl": "transformer_engine", "dtype": "bfloat16", "pipeline_schedule": "zero_bubble"}
    (reason,) = backend_problems(config_of({"pp": 2}, asked), None)
    assert "--pipeline-schedule zero_bubble defers weight gradients, which native layers alone do" in reason
