"""`--gradient-accumulation-fusion`: weight gradients that linears add to the buckets themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.backends import apex
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.tensor_parallel.linear import product
from megacp.core.tensor_parallel.weight_gradients import WeightGradients, add_weight_gradient
from megacp.core.training.step import ParallelModel
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


def gradients(rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], fused: bool) -> list[np.ndarray]:
    """Summed gradients of two microbatches, this rank's slices."""
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    sizes = {names[key]: size for key, size in shape.items() if key in names}
    config = with_values(RunConfig(), {**SIZES, **sizes, **settings, "gradient_accumulation_fusion": fused})
    model = ParallelModel(config, grid(**shape))
    rules = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed")
    batches = [mock_batch([i], rules) for i in (0, 1)]
    model.gradients(batches, 1, sum(batch.weight_sum for batch in batches))
    return [model.parameters.grad_shard(i).numpy().copy() for i in range(len(model.parameters.shards))]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"dp": 2}, {"pp": 2}])
def test_fused_gradients_are_those_of_autograd(shape: dict[str, int], recompute: str) -> None:
    """float64, with the same products: only the order of two sums differs."""
    world, settings = int(np.prod([*shape.values()], dtype=int)), {"recompute_granularity": recompute}
    plain = run_ranks(gradients, world, shape, settings, False)
    fused = run_ranks(gradients, world, shape, settings, True)
    for expected, found in zip(plain, fused, strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-15)


def test_a_tied_table_that_is_used_twice_stays_with_autograd() -> None:
    """Its first gradient would otherwise count as its last."""
    (plain,) = run_ranks(gradients, 1, {}, {"untie_embeddings_and_output_weights": False}, False)
    (fused,) = run_ranks(gradients, 1, {}, {"untie_embeddings_and_output_weights": False}, True)
    for a, b in zip(plain, fused, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-15)


def fused_launches(rank: int, world: int) -> list[int]:
    """Buckets under way when `finish` begins, without and with fusion."""
    found = []
    for fused in (False, True):
        config = with_values(RunConfig(), {**SIZES, "gradient_accumulation_fusion": fused})
        model = ParallelModel(config, grid(dp=world))
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


def test_a_weight_outside_of_buckets_gets_its_gradient_from_autograd() -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(6, 3)
    product(x, weight, WeightGradients()).sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(6, 4).t() @ x)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (2, 5, 3)])
def test_a_weight_in_a_bucket_takes_any_number_of_rows(shape: tuple[int, ...]) -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(shape, requires_grad=True)
    weight.main_grad, weight.gradient_added = torch.zeros(4, 3), lambda _: None
    y = product(x, weight, WeightGradients())
    assert torch.equal(y, x @ weight.t())
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


class Kernel:
    """In the place of apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        assert x.is_contiguous() and grad.is_contiguous()
        total.add_((grad.t() @ x).float())


def test_apexes_kernel_gets_its_arguments_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apex, "apex_status", lambda: "nvidia")
    monkeypatch.setattr(apex, "find_spec", lambda name: object())
    monkeypatch.setattr(apex, "import_module", lambda name: Kernel)
    add = apex.weight_gradient_kernel()
    assert add is not None
    total, grad, x = torch.zeros(4, 3), torch.randn(4, 6).t(), torch.randn(6, 3)
    add(total, grad, x)
    torch.testing.assert_close(total, grad.t() @ x)


@pytest.mark.parametrize("status", ["absent", "impostor"])
def test_without_nvidias_apex_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(apex, "apex_status", lambda: status)
    assert apex.weight_gradient_kernel() is None
