"""Counts of a plan against what kernels and axes are seen to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.core.config.parallel import ParallelConfig
from megacp.core.context_parallel.attention import TRANSPORTS, TransportOptions, core_attention
from megacp.core.context_parallel.auto.counts import rank_work, table_work
from megacp.core.context_parallel.auto.predict import Candidate, KernelWork, RankWork, candidates
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.shard import LocalBatch, shard_batch
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.data.batch import PackedBatch
from megacp.core.ops.calls import Allowed, Widths
from megacp.core.ops.kernel import KV, QKV, Saved, empty_partial, widths_of
from megacp.core.ops.mask import Metadata, tile_table
from megacp.core.ops.tile_kernels import FlashKernel, MathKernel
from tests.ranks import grid, run_ranks
from tests.reference.packs import metadata, random_batch

HEADS, GROUPS, DIM = 6, 2, 256
SQUARES, NARROW = MathKernel(), Widths(64, 64)
WAYS = candidates(ParallelConfig(context_parallel_size=4, cp_comm_type="auto", cp_layout="auto"), HEADS)


def row() -> PackedBatch:
    """Has tiles that are copied into one call where keys are 256 wide, and are calls of their own at 512."""
    return random_batch(np.random.default_rng(1), 320, documents=2, branches=True, images=True)


class CountingKernel(MathKernel):
    """Counts what it is asked for under each table; a causal block costs it the whole square."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[str, list[KernelWork]] = {"attend": [], "attend_backward": []}
        self._now = KernelWork()

    def attend(self, *arguments: Any) -> None:
        self._tables("attend", *arguments)

    def attend_backward(self, *arguments: Any) -> None:
        self._tables("attend_backward", *arguments)

    def _tables(self, name: str, *arguments: Any) -> None:
        self._now = KernelWork()
        getattr(super(), name)(*arguments)
        self.done[name].append(self._now)

    def _count(self, queries: Tensor, keys: Tensor) -> None:
        n, m, now = len(queries), len(keys), self._now
        self._now = KernelWork(now.pairs + n * m, now.rows + n, now.calls + 1)

    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[Tensor, Tensor]:
        self._count(qkv[0], qkv[1])
        return super().forward(qkv, allowed, scale)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        self._count(saved.q, kv[0])
        return super().backward(saved, kv, allowed, scale)


def predicted(work: RankWork, way: Candidate, cp: int) -> list[KernelWork | None]:
    """By table, in the order in which the transport comes to them."""
    if way.comm_type == "all_gather":
        return [work.own, work.others]
    if way.comm_type == "kv_exchange":
        return [work.own, *(stage.work for stage in work.stages[way.stages])]
    return list(work.rings[way.joined(cp) or 0])


def counted(rank: int, world_size: int, ways: list[Candidate]) -> list[tuple[dict, list[KernelWork | None]]]:
    cp, found = grid(cp=world_size).cp, []
    sizes = AttentionSizes(0, HEADS, GROUPS, DIM, 8, 8)
    for way in ways:
        batch: LocalBatch = shard_batch(row(), cp, LAYOUTS[way.layout])
        kernel = CountingKernel()
        transport = TRANSPORTS[way.comm_type](cp, kernel, TransportOptions(way.hierarchy or (), way.stages))
        shapes = [(batch.num_tokens, count, DIM) for count in (HEADS, GROUPS, GROUPS)]
        leaves = [torch.zeros(*shape, requires_grad=True) for shape in shapes]
        out = core_attention(*leaves, transport=transport, plan=batch.plan, scale=1.0)
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        fresh = shard_batch(row(), cp, LAYOUTS[way.layout]).plan
        found.append((kernel.done, predicted(rank_work(fresh, sizes, SQUARES, [way]), way, world_size)))
    return found


@pytest.mark.slow
def test_counted_work_is_what_every_transport_makes_its_kernel_do() -> None:
    """Would catch a table that a transport no longer uses, keys of other ranks in another order, and heads whose keys
    are narrower than was thought, so that more tiles are copied into one call.
    """
    results = run_ranks(counted, 4, WAYS)
    for number, way in enumerate(WAYS):
        for done, expected in (of_rank[number] for of_rank in results):
            assert done == {"attend": expected, "attend_backward": expected}, way
        assert len({repr(of_rank[number][1]) for of_rank in results}) > 1 or way.joined(4) == 4


@pytest.mark.parametrize("width", [16, 2048])
def test_work_is_that_of_the_calls_of_a_table(width: int) -> None:
    """Against what a kernel is asked for; the wider keys are, the fewer rows are joined."""
    for seed in range(20):
        batch = random_batch(np.random.default_rng(seed), 200, documents=5, branches=True, images=True, padding=True)
        order = np.random.default_rng(seed).permutation(200)
        halves = [metadata(batch).take(np.sort(part)) for part in (order[:90], order[90:])]
        table, kernel = tile_table(*halves), CountingKernel()
        q, k = torch.zeros(90, 2, width // 2), torch.zeros(110, 1, width // 2)
        kernel.attend(empty_partial(q), (q, k, k), table, 1.0)
        assert kernel.done["attend"] == [table_work(table, widths_of(q, k), SQUARES)]


def one_document(tokens: int) -> Metadata:
    zeros = np.zeros(tokens, np.int64)
    return Metadata(zeros, zeros, zeros, np.arange(tokens))


@pytest.mark.parametrize(("tokens", "blocks"), [(100, 100**2), (512, 512**2), (1024, 3 * 512**2), (2048, 10 * 512**2)])
def test_the_cpu_kernel_computes_causal_squares_in_blocks_of_512_keys(tokens: int, blocks: int) -> None:
    """Measured on torch 2.13: 512 causal queries take as long as 512 full ones, 1,024 take 0.75 of their square."""
    assert table_work(one_document(tokens).own_table, NARROW, FlashKernel()) == KernelWork(blocks, tokens, 1)


class BlockKernel:
    """A kernel that does not walk tiles."""


def test_a_kernel_of_fixed_blocks_pays_for_whole_blocks_in_one_call() -> None:
    kernel: Any = BlockKernel()
    assert table_work(one_document(300).own_table, NARROW, kernel) == KernelWork(6 * 128**2, 300, 1)
    nothing = tile_table(one_document(4), one_document(4).take(np.arange(0)))
    assert table_work(nothing, NARROW, kernel) == table_work(nothing, NARROW, SQUARES) == KernelWork()
