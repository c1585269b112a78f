"""All-gather attention (Llama 3, 2024): every rank gathers all K/V and attends with its own
queries.

Each rank attends to its own keys while the other keys are in flight. Gathered keys are sorted into
the row's order, so that adjacent tiles join and a document needs few kernel calls. The backward
pass gathers the keys again and reduce-scatters their gradients.
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
    """Return the tokens of other ranks, in the row's order: indices `[T - t]` into the row."""
    mine = np.zeros(len(plan.metadata), bool)
    mine[plan.local] = True
    return plan.order[~mine[plan.order]]


@once
def _table_of_others(plan: AttentionPlan) -> TileTable:
    """Return the tiles between this rank's queries and the keys of other ranks."""
    return plan.tiles(plan.local, _others(plan))


@once
def _places_of_others(plan: AttentionPlan, device: torch.device) -> torch.Tensor:
    """Return the places of `_others` in the gathered tensor, `[T - t]`."""
    place = np.argsort(plan.indices.reshape(-1))  # [T], place of each token after the gather
    return to_device(place[_others(plan)], device)


class AllGatherAttention(KeysToQueries):
    """Transport `all_gather`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """Return the tiles for this rank's keys, and for the keys of all other ranks."""
        return [plan.table(plan.cp_rank), _table_of_others(plan)]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """Yield this rank's own block, then the keys of all other ranks; see `KVBlocks`."""
        # [t, groups, d] twice -> [T, 2, groups, d], in rank order
        gathered = start_all_gather(torch.stack([k, v], 1), self.axis)
        own, others = self.tables(plan)
        mine = yield k, v, own
        places = _places_of_others(plan, k.device)
        # not kept in variables, so that the gathered keys are freed before the reduce-scatter
        theirs = yield *(x.index_select(0, places) for x in gathered.take().unbind(1)), others
        if mine is None or theirs is None:
            return None
        # gradients of all keys in rank order, this rank's own keys included
        row = empty((len(plan.metadata), *theirs.shape[1:]), theirs)
        row[places] = theirs
        first = plan.cp_rank * len(mine)
        row[first : first + len(mine)] = mine
        return reduce_scatter(row, self.axis)  # [T, 2, groups, d] -> [t, 2, groups, d]
