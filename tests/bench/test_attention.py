"""What the benchmark compares with is a fair opponent: exact, and as lazy as its description allows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench.attention import DenseRing, kept_bytes
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.ops.mask import allowed
from tests.ranks import grid, run_ranks
from tests.reference import attention as reference
from tests.reference.packs import metadata, random_batch

TOKENS, HEADS, GROUPS, WIDTH = 64, 8, 4, 64


def row(mask: str) -> PackedBatch:
    batch = random_batch(np.random.default_rng(3), TOKENS, documents=3, branches=True, images=True)
    if mask == "causal":
        nothing = np.zeros(TOKENS, np.int32)
        return dataclasses.replace(batch, document=nothing, branch=nothing, span=nothing)
    if mask == "one image":
        nothing = np.zeros(TOKENS, np.int32)
        return dataclasses.replace(batch, document=nothing, branch=nothing, span=nothing + 1)
    return batch


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, heads, WIDTH, generator=g) for heads in (HEADS, GROUPS, GROUPS, HEADS)]


def ring(rank: int, world_size: int, mask: str) -> tuple[list[torch.Tensor], list[int | None], int]:
    axis = grid(cp=world_size).cp
    plan = shard_batch(row(mask), axis, select_layout("contiguous")).plan
    mine = torch.from_numpy(plan.local)
    dense = DenseRing(axis, plan)
    return list(dense.step(*(x[mine] for x in tensors()))), dense.visited, len(dense.masks)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mask", ["causal", "mixed", "one image"])
@pytest.mark.slow
def test_the_ring_of_dense_blocks_equals_dense_attention(mask: str, world_size: int) -> None:
    """A baseline that is wrong may be fast or slow for any reason. fp32, sums of at most 64 terms: 1e-5."""
    results = run_ranks(ring, world_size, mask)
    *leaves, dout = (x.double().requires_grad_() for x in tensors())
    meta = metadata(row(mask))
    out = reference.attention(*leaves, allowed(meta, meta), WIDTH**-0.5)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        found = torch.cat([tensors_[index] for tensors_, _, _ in results]).double()
        assert (found - expected[index]).abs().max() <= 1e-5 * expected[index].abs().max(), name


@pytest.mark.slow
def test_the_ring_of_dense_blocks_computes_and_masks_no_more_than_it_says() -> None:
    """A causal row: earlier ranks' blocks and one masked diagonal. One image: every block, no mask."""
    for rank, (_, visited, masks) in enumerate(run_ranks(ring, 4, "causal")):
        assert sorted(source for source in visited if source is not None) == list(range(rank + 1))
        assert masks == 1
    for _, visited, masks in run_ranks(ring, 4, "one image"):
        assert None not in visited and masks == 0


def test_bytes_kept_for_backward_are_those_of_five_tensors() -> None:
    """q, k, v, out and the log-sum-exp in fp32, no mask, no second copy: on one process, and shared out on two."""
    alone = TOKENS * (2 * HEADS * WIDTH + 2 * GROUPS * WIDTH + HEADS) * 4
    assert kept_bytes(0, 1, row("mixed"), "p2p", "contiguous") == alone
    for transport in ("p2p", "all_gather", "kv_exchange"):
        assert sum(run_ranks(kept_bytes, 2, row("mixed"), transport, "balanced")) == alone, transport
