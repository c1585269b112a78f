"""All-gather attention (Llama 3, 2024): every rank gathers all K/V and attends with its own
queries.

A rank attends to its own keys while the others' are under way. Gathered keys are put into the row's
order, so neighbouring tiles join and a document costs few kernel calls. Backward gathers again and
reduce-scatters the gradients.
"""

from __future__ import annotations

import numpy as np
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import KeysToQueries, KVBlocks
from megacp.attention.ops.device import to_device
from megacp.attention.ops.mask import TileTable
from megacp.attention.ops.once import once
from megacp.distributed.collectives import reduce_scatter, start_all_gather
from megacp.distributed.large_blocks import empty


def _others(plan: AttentionPlan) -> np.ndarray:
    """Indices `[T - t]` into the row of the tokens that other ranks hold, in the row's order."""
    mine = np.zeros(len(plan.metadata), bool)
    mine[plan.local] = True
    return plan.order[~mine[plan.order]]


@once
def _table_of_others(plan: AttentionPlan) -> TileTable:
    return plan.tiles(plan.local, _others(plan))


@once
def _places_of_others(plan: AttentionPlan, device: torch.device) -> torch.Tensor:
    in_rank_order = np.argsort(
        plan.indices.reshape(-1)
    )  # [T]: where a token stands once all are gathered
    return to_device(in_rank_order[_others(plan)], device)


class AllGatherAttention(KeysToQueries):
    """Transport `all_gather`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        return [plan.table(plan.cp_rank), _table_of_others(plan)]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        gathered = start_all_gather(
            torch.stack([k, v], 1), self.axis
        )  # [T, 2, groups, d], in rank order
        own, others = self.tables(plan)
        mine = yield k, v, own
        places = _places_of_others(plan, k.device)
        theirs = yield *(x.index_select(0, places) for x in gathered.take().unbind(1)), others
        if mine is None or theirs is None:
            return None
        row = empty(
            (len(plan.metadata), *theirs.shape[1:]), theirs
        )  # gradients of all keys, in rank order
        row[places] = theirs
        row[plan.cp_rank * len(mine) : (plan.cp_rank + 1) * len(mine)] = mine
        return reduce_scatter(row, self.axis)  # [T, 2, groups, d] -> [t, 2, groups, d]
