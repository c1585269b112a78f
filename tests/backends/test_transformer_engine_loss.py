"""Transformer Engine's loss over chunks of tokens, its Triton kernels replaced by their arithmetic, beside ours.

Its function, its order of arguments and what it saves are real. float64, so a difference is a mistake.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacp.core.backends.native import NativeBackend
from megacp.core.backends.transformer_engine import TransformerEngineBackend
from megacp.core.config.run import RunConfig, with_values
from megacp.core.tensor_parallel.chunked_loss import Target
from megacp.core.tensor_parallel.embedding import TableSpec
from tests.backends.engine_layers import emulated_layers
from tests.backends.engine_stub import needs_engine
from tests.ranks import grid, run_ranks
from tests.reference.sharding import fill

pytestmark = needs_engine

TOKENS, WIDTH, VOCAB = 12, 16, 32


def forward(
    x: Tensor, target: Tensor, smoothing: float, reduce: bool, group: Any, ignored: int, overwrite: bool
) -> Any:
    """What its kernels say: the loss, a copy of the input, highest value and sum of exponentials of each row."""
    assert smoothing == 0.0 and not reduce and not overwrite and 0 not in x.shape and x.is_contiguous()
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    parts = [torch.empty_like(x) for _ in range(size)]
    if size == 1:
        parts = [x]
    else:
        dist.all_gather(parts, x.detach(), group=group)
    rows = torch.cat(parts, -1)[0]  # [t, vocabulary]
    lse, kept = torch.logsumexp(rows, -1), target[0] != ignored
    loss = (lse - rows.gather(1, target[0].clamp(0)[:, None])[:, 0]).where(kept, 0.0)
    return loss[None], x.detach().clone(), lse[:, None], target, None, rank, size


def backward(saved: Tensor, stats: Tensor, target: Tensor, count: None, grad: Tensor, *rest: Any) -> Tensor:
    """The gradient in the saved input's place; ignored rows have none."""
    (_, _, rank, _, ignored), width = rest, saved.shape[-1]
    softmax = torch.exp(saved[0] - stats)
    local = target[0] - rank * width
    here = (local >= 0) & (local < width)
    softmax[here, local[here]] -= 1.0
    softmax = softmax * grad[0][:, None]  # [1, t] -> [t, 1]
    return saved.copy_(softmax.masked_fill((target[0] == ignored)[:, None], 0.0))


def losses_and_gradients(rank: int, world: int, parallel: bool) -> float:
    """Largest difference of loss and gradients from ours, over sizes of chunks."""
    here, worst = grid(tp=world), 0.0
    settings = {"dtype": "float64", "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8, "hidden_size": WIDTH}
    settings |= {"num_attention_heads": 4, "tensor_model_parallel_size": world, "sequence_parallel": parallel}
    config = with_values(RunConfig(), {**settings, "cross_entropy_fusion_impl": "te"})
    g = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, WIDTH, generator=g, dtype=torch.float64) for n in (VOCAB, TOKENS))
    labels, weights = torch.randint(0, VOCAB, (TOKENS,), generator=g), torch.rand(TOKENS, generator=g)
    labels[:3], weights[:2] = torch.tensor([VOCAB, VOCAB + 3, VOCAB - 1]), 0.0  # image tokens, and the last row
    part = x.chunk(world)[rank] if parallel and world > 1 else x
    with emulated_layers(), pytest.MonkeyPatch.context() as patch:
        module = sys.modules["transformer_engine.pytorch.cross_entropy"]
        patch.setattr(module, "_validate_inputs", lambda *args: None)  # it wants halves on CUDA
        patch.setattr(module.triton_cross_entropy, "cross_entropy_forward", forward)
        patch.setattr(module.triton_cross_entropy, "cross_entropy_backward", backward)
        for chunk in (0, 1, 5, 100):
            found = []
            for backend in (NativeBackend(here, config), TransformerEngineBackend(here, config)):
                table = backend.vocabulary(TableSpec("head.weight", VOCAB, WIDTH, 0.02))
                fill(table, {"head.weight": weight})
                leaf = part.clone().requires_grad_()
                loss = table.loss(leaf, Target(labels, weights, 3.0), backend.cross_entropy, chunk)
                (2.0 * loss).backward()
                with torch.no_grad():
                    again = table.loss(leaf, Target(labels, weights, 3.0), backend.cross_entropy, chunk)
                found.append((loss.detach(), again, leaf.grad, table.weight.grad))
            worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel"), [(1, False), (2, False), (2, True)])
def test_its_loss_over_chunks_is_ours(world: int, parallel: bool) -> None:
    """Would catch a gradient that misses the weights, and an image's id that its kernel reads."""
    assert max(run_ranks(losses_and_gradients, world, parallel)) < 1e-12
