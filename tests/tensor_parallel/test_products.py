"""`--async-tensor-parallel`: torch's operators for products in pieces, by their own fallback, in a whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._symmetric_memory as torchs

from megacp.core.backends.select import backend_problems
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed import symmetric_memory
from megacp.core.training.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.tensor_parallel.test_fused_gradient import SIZES as TINY

SIZES: dict[str, Any] = {**TINY, "tensor_model_parallel_size": 2}


def model_of(settings: dict[str, Any]) -> ParallelModel:
    pp = settings.get("pipeline_model_parallel_size", 1)
    return ParallelModel(with_values(RunConfig(), {**SIZES, **settings}), grid(tp=2, pp=pp))


def step(rank: int, world: int, settings: dict[str, Any], fused: bool) -> tuple[float, list[np.ndarray], int, int]:
    """Loss, this rank's gradients, the bytes it sent over tp, and calls of torch's operators."""
    made = {"fused_all_gather_matmul": 0, "fused_matmul_reduce_scatter": 0}

    def counted(name: str) -> Any:
        fallback = getattr(torchs, f"_{name}_fallback")

        def run(*args: Any) -> Any:
            made[name] += 1
            return fallback(*args)

        return run

    operators = SimpleNamespace(**{name: counted(name) for name in made})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_operators", lambda: operators)
        model = model_of({**settings, "async_tensor_parallel": fused})
        model.grid.tp.traffic.clear()
        batches = [mock_batch([i], MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed")) for i in (0, 1)]
        loss = model.gradients(batches, 1, 100.0)
    shards = range(len(model.parameters.shards))
    grads = [model.parameters.grad_shard(i).numpy().copy() for i in shards]
    return loss, grads, model.grid.tp.traffic.total, sum(made.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {}),
        (2, {"recompute_granularity": "selective", "gradient_accumulation_fusion": True}),
        (2, {"mlp_chunk_tokens": 16}),
        (2, {"lora_rank": 4, "lora_targets": "all"}),
        (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_products_in_pieces_give_the_model_of_whole_ones(world: int, settings: dict[str, Any]) -> None:
    """Would catch arguments in another order, a sum over the wrong axis, and bytes that nobody counts.

    Torch's fallbacks are the definition of its operators. float64: only the order of sums over two ranks could differ.
    """
    plain = run_ranks(step, world, settings, False)
    pieces = run_ranks(step, world, settings, True)
    for (loss, expected, sent, none), (found_loss, found, found_sent, calls) in zip(plain, pieces, strict=True):
        assert found_loss == pytest.approx(loss, rel=1e-13)
        assert (none, found_sent) == (0, sent)
        # two passes of two microbatches through four linears a layer; behind frozen embeddings two ask for no gradient
        assert calls >= (2 * 2 * 4 * SIZES["num_layers"] - 2) // settings.get("pipeline_model_parallel_size", 1)
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-13)


def test_torch_has_the_operators_with_these_arguments() -> None:
    """Would catch a torch that renames or reorders them."""
    operators = symmetric_memory._operators()
    gathers, scatters = (
        operators.fused_all_gather_matmul.default._schema,
        operators.fused_matmul_reduce_scatter.default._schema,
    )
    assert [a.name for a in gathers.arguments][:4] == ["A", "Bs", "gather_dim", "group_name"]
    assert [a.name for a in scatters.arguments] == ["A", "B", "reduce_op", "scatter_dim", "group_name"]
    assert len(gathers.returns) == 2
    with pytest.raises(NotImplementedError, match="CPU"):
        operators.fused_matmul_reduce_scatter(torch.zeros(2, 2), torch.zeros(2, 2), "sum", 0, "none")


def test_a_cpu_is_refused_before_any_process_group() -> None:
    config = with_values(RunConfig(), {**SIZES, "async_tensor_parallel": True})
    assert backend_problems(config, "cpu") == ["--async-tensor-parallel runs on CUDA, this run is on cpu"]
    assert backend_problems(config, "cuda") == backend_problems(config, None) == []
