"""The MLP over tiles of tokens: the same gradients, each tile once, no more products and messages than it needs."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.backends.mlp import TiledMLP
from megacp.core.backends.native import NativeBackend
from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.models.block import Block, BlockInputs
from megacp.core.ops.mask import Metadata
from megacp.core.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies
from megacp.core.tensor_parallel import linear
from megacp.core.training.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.reference.training import config_of, step_batches

HIDDEN, FFN = 16, 24


def block_of(tile: int, recompute: str = "none", **values: Any) -> Block:
    """A block with the same weights for any tile."""
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": 2, "dtype": "float64"}
    config = with_values(RunConfig(), {**sizes, "add_mlp_bias": True, "mlp_chunk_tokens": tile, **values})
    block = Block(0, config.model, NativeBackend(grid(), config), recompute)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return block


def run(block: Block, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of the MLP alone or of the block, and the gradients of the input and of all parameters."""
    places, zeros = np.arange(tokens), np.zeros(tokens, np.int32)
    plan = AttentionPlan(places[None], Metadata(zeros, zeros, zeros, places), 0)
    rotary = cos_sin(torch.arange(tokens), inverse_frequencies(HIDDEN // 2, 1e4, RotaryScaling()), torch.float64)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    out = block(x, BlockInputs(plan, rotary, *[torch.arange(tokens)] * 2, 1))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, list(torch.autograd.grad((out * weights).sum(), [x, *block.parameters()]))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tile", [1, 5, 12, 100])
def test_any_tile_gives_the_gradients_of_the_whole_row(tile: int, dropout: float, recompute: str) -> None:
    """Sums in another order: 1e-12."""
    expected_out, expected = run(block_of(0, hidden_dropout=dropout), 12)
    out, found = run(block_of(tile, recompute, hidden_dropout=dropout), 12)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def mlp_of(tile: int, **values: Any) -> torch.nn.Module:
    return block_of(tile, **values).mlp


def test_a_rank_without_tokens_has_one_empty_tile() -> None:
    mlp = mlp_of(4)
    calls: list[int] = []
    mlp.mlp.gate_up.register_forward_hook(lambda module, inputs, out: calls.append(len(out)))
    x = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = mlp(x, None)
    gradients = torch.autograd.grad(out.sum(), [x, *mlp.parameters()])
    assert calls == [0, 0] and out.shape == x.shape
    assert all(not gradient.any() for gradient in gradients)


def test_a_frozen_mlp_passes_the_gradient_of_its_input() -> None:
    found = []
    for tile in (0, 5):
        mlp = mlp_of(tile).requires_grad_(False)
        x = torch.linspace(-1, 1, 12 * HIDDEN, dtype=torch.float64).view(12, HIDDEN).requires_grad_()
        mlp(x, lambda function, *inputs: function(*inputs)).square().sum().backward()
        assert all(parameter.grad is None for parameter in mlp.parameters())
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_without_a_graph_the_tiles_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = products(monkeypatch)
    with torch.no_grad():
        mlp_of(5)(torch.zeros(12, HIDDEN, dtype=torch.float64), None)
    assert calls == {(5, 2 * FFN): 2, (2, 2 * FFN): 1, (5, HIDDEN): 2, (2, HIDDEN): 1}


def products(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Counts products of linears by the shape of their result."""
    counts: Counter[tuple[int, int]] = Counter()
    whole = linear.product

    def counted(*inputs: Any) -> torch.Tensor:
        y = whole(*inputs)
        counts[tuple(y.shape)] += 1
        return y

    monkeypatch.setattr(linear, "product", counted)
    return counts


@pytest.mark.parametrize("recompute, dropout, times", [("none", 0.0, 2), ("full", 0.0, 2), ("full", 0.2, 3)])
def test_a_tile_is_computed_twice_and_its_last_product_once(
    monkeypatch: pytest.MonkeyPatch, recompute: str, dropout: float, times: int
) -> None:
    block = block_of(4, recompute, hidden_dropout=dropout)
    counts = products(monkeypatch)
    run(block, 12)
    assert counts[4, 2 * FFN] == 3 * times
    assert counts[4, HIDDEN] == 3 * (times - 1)


def gradients(rank: int, world: int, shape: dict[str, int], values: dict[str, Any], tile: int) -> list[np.ndarray]:
    """Summed gradients of two microbatches, this rank's slices."""
    config = config_of({"attention_kernel": "flash", **values, "mlp_chunk_tokens": tile}, shape)
    model = ParallelModel(config, grid(**shape))
    batches = step_batches(2, 1)
    model.gradients(batches, 1, sum(batch.weight_sum for batch in batches))
    return [model.parameters.grad_shard(i).numpy().copy() for i in range(len(model.parameters.shards))]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "shape, values",
    [({"dp": 2}, {}), ({"tp": 2}, {"add_mlp_bias": True}), ({"tp": 2}, {"sequence_parallel": False}), ({"pp": 2}, {})],
)
def test_gradients_reach_the_buckets_once_and_whole(shape: dict[str, int], values: dict[str, Any], fused: bool) -> None:
    values = {**values, "ddp_bucket_size": 2000, "gradient_accumulation_fusion": fused}
    plain = run_ranks(gradients, 2, shape, values, 0)
    tiled = run_ranks(gradients, 2, shape, values, 10)
    for expected, found in zip(plain, tiled, strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-14)


def test_weight_gradients_of_halves_are_summed_in_float32() -> None:
    mlp = TiledMLP(_Scale(), 1, contextlib.nullcontext)
    x = torch.full((1024, 1), 1.0, dtype=torch.bfloat16)
    out = mlp(x, None)
    out.backward(torch.ones_like(out))
    assert mlp.mlp.weight.grad.item() == 1024


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, save: Any) -> torch.Tensor:
        return x * self.weight
