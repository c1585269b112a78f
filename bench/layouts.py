"""The cost of a layout, counted from plans: balance of attention area, keys that must travel, tiles computed.

The plans are those of training, made by arithmetic on one process for any number of ranks. Only planning is timed: on a
small machine a clock would measure the machine and not the imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bench.exchange_bound import PackRows, least_remote_rows
from bench.report import Seconds, timed
from megacp.core.context_parallel.all_gather import table_of_others
from megacp.core.context_parallel.kv_exchange import exchange_stages, needed_rows
from megacp.core.context_parallel.layout import Layout
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.ops.calls import Allowed, Widths, table_calls
from megacp.core.ops.kernel import KV, QKV, Saved, TileKernel, empty_partial
from megacp.core.ops.mask import Metadata, TileTable, tile_table

HEADS, GROUPS, WIDTH = 8, 4, 64
"""Query heads, K/V heads and elements of a head wherever attention is counted or measured."""
AREA_SLACK = 0.03
"""Largest unevenness of area among the layouts of the lower bound."""
COUNTED = ("p2p", "all_gather", "kv_exchange", "a2a")
"""Transports with counted tiles."""


@dataclass(frozen=True)
class LayoutFigures:
    """One row under one layout and degree."""

    area_max_over_mean: float
    remote_rows: int
    """K/V rows of other ranks that are needed, summed over ranks."""
    remote_share: float
    """Of all rows of other ranks, mean over ranks."""
    ranks_per_document: float
    """Mean over documents."""


@dataclass(frozen=True)
class TileFigures:
    """Calls of the kernel, summed over ranks."""

    used_over_allowed: float
    """Pairs whose result is used, over those that the mask allows: 1 when none is left out or used twice."""
    computed_over_allowed: float
    """Pairs in the blocks of all calls, over the same: masked ones are computed in vain."""
    calls: int
    empty_calls: int
    """Calls without a query or without a key."""
    tiles: int
    """Non-empty tiles; small ones share a call."""


def plans_of(metadata: Metadata, layout: Layout, cp: int) -> list[AttentionPlan]:
    """The plan of every rank for a row that needs no padding."""
    indices = layout.deal(metadata, cp)
    first = AttentionPlan(indices, metadata, 0)
    return [first, *(AttentionPlan(indices, metadata, rank, first.order) for rank in range(1, cp))]


def area_per_rank(plans: list[AttentionPlan]) -> np.ndarray:
    """Allowed pairs of each rank's queries, int64 `[cp]`."""
    cost = plans[0].metadata.own_table.keys_per_query
    return np.array([cost[plan.local].sum() for plan in plans])


def layout_figures(plans: list[AttentionPlan]) -> LayoutFigures:
    """The figures of one layout, by the rows that kv_exchange needs under its plans."""
    metadata, cp = plans[0].metadata, len(plans)
    area = area_per_rank(plans)
    remote = 0
    for plan, needed in zip(plans, needed_rows(plans[0]), strict=True):
        remote += int(needed.sum() - needed[plan.local].sum())
    owner = np.empty(len(metadata), np.int64)
    for plan in plans:
        owner[plan.local] = plan.cp_rank
    real = metadata.document >= 0
    homes = np.unique(np.stack([metadata.document[real], owner[real]]), axis=1).shape[1]
    documents = len(np.unique(metadata.document[real]))
    others = cp * (len(metadata) - len(metadata) // cp)
    return LayoutFigures(float(area.max() / area.mean()), remote, remote / others, homes / max(1, documents))


def remote_rows_bound(metadata: Metadata, cp: int) -> int:
    """No layout of this row within `AREA_SLACK` needs fewer remote rows, summed over ranks (see `exchange_bound`)."""
    prefixes = metadata.take(np.flatnonzero((metadata.branch == 0) & (metadata.document >= 0)))
    prefix_keys = tile_table(metadata, prefixes).keys_per_query
    rows = PackRows(metadata.document, metadata.own_table.keys_per_query, prefix_keys)
    return least_remote_rows(rows, cp, AREA_SLACK)


class CountingKernel(TileKernel):
    """Walks tables as any kernel of tiles does, counts calls and pairs, computes nothing."""

    def __init__(self) -> None:
        self.calls = self.empty_calls = self.used = self.computed = 0

    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TileKernel.forward`."""
        q, k, _ = qkv
        self.calls += 1
        self.empty_calls += len(q) == 0 or len(k) == 0
        self.used += allowed.pairs(len(q), len(k))
        self.computed += allowed.pairs(len(q), len(k)) if allowed.causal else len(q) * len(k)
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """See `TileKernel.backward`."""
        raise NotImplementedError("a forward says which tiles there are")


def tables_of(plan: AttentionPlan, transport: str) -> list[TileTable]:
    """The tables that a rank walks under a transport of `COUNTED`."""
    if transport == "p2p":
        return [plan.table(source) for source in range(plan.cp)]
    if transport == "all_gather":
        return [plan.table(plan.cp_rank), table_of_others(plan)]
    if transport == "kv_exchange":
        return [plan.table(plan.cp_rank), *(stage.table for stage in exchange_stages(plan, 1))]
    if transport == "a2a":
        return [plan.grouped(plan.cp).table_of_row]
    raise ValueError(f"no tables are counted for {transport}; choose {', '.join(COUNTED)}")


def tile_figures(plans: list[AttentionPlan], transport: str) -> TileFigures:
    """The tiles of all ranks. Under a2a each rank walks the whole row, for its share of the heads."""
    kernel, tiles = CountingKernel(), 0
    for plan in plans:
        for table in tables_of(plan, transport):
            q, k = (
                torch.zeros(1, 1, 1).expand(*x) for x in ((table.queries, HEADS, WIDTH), (table.keys, GROUPS, WIDTH))
            )
            kernel.attend(empty_partial(q), (q, k, k), table, 1.0)
            tiles += table.num_tiles
    area = int(plans[0].metadata.own_table.area) * (len(plans) if transport == "a2a" else 1)
    return TileFigures(kernel.used / area, kernel.computed / area, kernel.calls, kernel.empty_calls, tiles)


def planning_seconds(metadata: Metadata, layout: Layout, cp: int) -> Seconds:
    """The planning of the middle rank: the deal, its exchange, and the calls of all its tables."""
    fresh = metadata.take(np.arange(len(metadata)))  # remembers no table

    def plan() -> None:
        found = AttentionPlan(layout.deal(fresh, cp), fresh, cp // 2)
        for table in tables_of(found, "kv_exchange"):
            table_calls(table, Widths(HEADS * WIDTH, GROUPS * WIDTH))

    return timed(plan)[1]
