"""The same training step on a GPU. Run `pytest -m gpu` on a machine with a GPU; the tests are
skipped on other machines.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.step.step import ParallelModel
from megacp.training.data.mock import MockRules, mock_batch

SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 101,
    "seq_length": 128,
    "hidden_dropout": 0.1,
}

# warnings of compilers and optional dependencies are not errors
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"
    ),
    pytest.mark.filterwarnings("default"),
]


def train(device: str, **settings: object) -> tuple[list[float], list[np.ndarray]]:
    """Return losses and parameters of two steps on mixed masks."""
    model = ParallelModel(
        with_values(RunConfig(), {**SIZES, **settings}), build_grid(GridShape(), 0, device)
    )
    rules = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed", ragged=True)
    losses = []
    for step in (1, 2):
        batches = [mock_batch([2 * step], rules), mock_batch([2 * step + 1], rules)]
        losses.append(
            model.train(batches, step, sum(batch.weight_sum for batch in batches), 0).loss
        )
    return losses, [
        p.detach().float().cpu().numpy() for chunk in model.chunks for p in chunk.parameters()
    ]


@pytest.mark.parametrize(("recompute", "tile"), [("none", 48), ("selective", 0), ("full", 0)])
def test_a_gpu_trains_like_the_cpu_in_float64(recompute: str, tile: int) -> None:
    """Check an MLP in tiles against an MLP over the whole row."""
    losses, parameters = train(
        "cuda", dtype="float64", recompute_granularity=recompute, mlp_chunk_tokens=tile
    )
    expected_losses, expected = train("cpu", dtype="float64", recompute_granularity=recompute)
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for actual, reference in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(
            actual, reference, rtol=1e-5, atol=1e-7
        )  # compared after rounding to float32


@pytest.mark.parametrize("chunk", [0, 32])
def test_bfloat16_on_a_gpu_stays_near_float64(chunk: int) -> None:
    """Check weight gradients that a matrix product accumulates in float32, of head and linears."""
    fused = {"cross_entropy_chunk_tokens": chunk, "gradient_accumulation_fusion": chunk > 0}
    losses, _ = train("cuda", dtype="bfloat16", **fused)
    expected, _ = train("cpu", dtype="float64")
    assert losses == pytest.approx(expected, rel=2e-2)  # 8 bits of mantissa over two layers


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_on_the_host_change_no_bit(recompute: str) -> None:
    sizes = {"num_layers": 6, "hidden_size": 256, "ffn_hidden_size": 1024, "seq_length": 2048}
    plain = train("cuda", **sizes, recompute_granularity=recompute)
    moved = train("cuda", **sizes, recompute_granularity=recompute, activation_offload=0.9)
    assert moved[0] == plain[0]
    for actual, reference in zip(moved[1], plain[1], strict=True):
        np.testing.assert_array_equal(actual, reference)
