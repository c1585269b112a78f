"""Counts of a plan: what the kernel computes on one rank, and which rows of K/V travel, under each transport.

Key property: counts are read off the tables and exchanges that a training step makes of the same plan. Rejected:
formulas of the mask (document lengths squared), which know no layout and no branches.
"""

from __future__ import annotations

from collections.abc import Sequence

from megacp.core.context_parallel.all_gather import table_of_others
from megacp.core.context_parallel.auto.predict import Candidate, KernelWork, RankWork, StageWork
from megacp.core.context_parallel.kv_exchange import exchange_stages, needed_rows
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.ops.blocks import BLOCK, block_cover
from megacp.core.ops.calls import KernelCall, Widths, table_calls
from megacp.core.ops.kernel import Kernel, TileKernel
from megacp.core.ops.mask import TileTable


def exchanged_rows(plan: AttentionPlan) -> tuple[int, int]:
    """K/V rows that kv_exchange makes this rank send and receive in one layer's forward, in however many stages."""
    needed = needed_rows(plan)
    sent = sum(int(seen[plan.local].sum()) for rank, seen in enumerate(needed) if rank != plan.cp_rank)
    mine = needed[plan.cp_rank]
    return sent, int(mine.sum() - mine[plan.local].sum())


def table_work(table: TileTable, widths: Widths, kernel: Kernel) -> KernelWork:
    """The kernel calls and pairs of one pass over `table`.

    A kernel that walks no tiles is taken to compute the blocks of `ops.blocks` in one call.
    """
    if not isinstance(kernel, TileKernel):
        return (
            KernelWork(len(block_cover(table).area) * BLOCK**2, table.queries, 1) if table.num_tiles else KernelWork()
        )
    calls = table_calls(table, widths)
    return KernelWork(sum(_computed(call, kernel) for call in calls), sum(call.queries for call in calls), len(calls))


def _computed(call: KernelCall, kernel: TileKernel) -> int:
    """Pairs that a call computes, allowed or not: of a causal triangle, the squares on the diagonal as a whole."""
    if not call.causal:
        return call.queries * call.num_keys
    return call.queries * (call.queries + min(call.queries, kernel.causal_block or call.queries)) // 2


def rank_work(plan: AttentionPlan, sizes: AttentionSizes, kernel: Kernel, candidates: Sequence[Candidate]) -> RankWork:
    """Counts of the plan's rank for every candidate."""

    def work(table: TileTable, share: AttentionSizes = sizes) -> KernelWork:
        return table_work(table, Widths(*share.widths), kernel)

    exchanges = {candidate.stages for candidate in candidates if candidate.comm_type == "kv_exchange"}
    needed = needed_rows(plan) if exchanges else None
    rings = {}
    for joined in {candidate.joined(plan.cp) for candidate in candidates}:
        if joined is None:
            continue
        shares, tables = sizes.shares(joined, plan.cp_rank % joined), _tables_of_ring(plan, joined)
        rings[joined] = tuple(work(table, share) for share in shares for table in tables)
    stages = {
        count: tuple(
            StageWork(sum(stage.out_splits), sum(stage.in_splits), work(stage.table))
            for stage in exchange_stages(plan, count, needed)
        )
        for count in exchanges
    }
    gathers = any(candidate.comm_type == "all_gather" for candidate in candidates)
    others = work(table_of_others(plan)) if gathers else None
    return RankWork(len(plan.local), work(plan.table(plan.cp_rank)), others, rings, stages)


def _tables_of_ring(plan: AttentionPlan, joined: int) -> list[TileTable]:
    """For groups of `joined` ranks in the order in which keys pass by; one group has the row as it stands."""
    groups = plan if joined == 1 else plan.grouped(joined)
    if groups.cp == 1:
        return [groups.table_of_row]
    return [groups.table((groups.cp_rank - step) % groups.cp) for step in range(groups.cp)]
