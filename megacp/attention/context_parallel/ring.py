"""Ring attention (Liu et al., 2023): K/V blocks are passed around the cp axis to all queries.

The next block is in flight while the current block is used. The backward pass sends the blocks
around the ring again. The first rank that receives a block starts its gradient, which follows the
block one step later. The gradient from a rank's own queries is never sent, so gradients also take
n - 1 steps. If no rank needs any key of the remaining blocks, as with windows in a contiguous
layout, the ring stops early and gradients return to their owners in one step. Grouped K/V heads are
never expanded for a message.
"""

from __future__ import annotations

import torch

from megacp.attention.context_parallel.kv_exchange import needed_rows
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import KeysToQueries, KVBlocks
from megacp.attention.ops.mask import TileTable
from megacp.attention.ops.once import once
from megacp.distributed.collectives import Pending, start_shift


@once
def _steps(plan: AttentionPlan) -> int:
    """Return the number of ring steps, including the rank's own block.

    Later blocks contain no key that any rank needs.
    """
    needed = needed_rows(plan)
    ranks = range(plan.cp)
    steps = 1
    for step in ranks:
        # in step s, rank r has the keys of rank r - s; negative indices count from the last rank
        if any(needed[rank][plan.indices[rank - step]].any() for rank in ranks):
            steps = 1 + step
    return steps


class RingAttention(KeysToQueries):
    """Transport `p2p`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """Return the tiles of each ring step."""
        size = self.axis.size
        return [plan.table((self.axis.rank - step) % size) for step in range(_steps(plan))]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """Yield this rank's block, then the blocks of the previous ranks; see `KVBlocks`."""
        tables = self.tables(plan)
        last = len(tables) - 1
        kv = torch.stack([k, v], 1)  # [t, groups, d] twice -> [t, 2, groups, d]
        # gradient of this rank's K/V from its own queries
        home: torch.Tensor | None = None
        # gradient of the current block, summed over the ranks that have already used it
        gradient: Pending | None = None
        for step in range(last + 1):
            shift = start_shift(kv, self.axis) if step < last else None
            dkv = yield kv[:, 0], kv[:, 1], tables[step]
            # the own block's gradient stays here; gradients of other blocks move on after this
            # rank's contribution is added
            if step == 0:
                home = dkv
            elif dkv is not None:
                if gradient:
                    dkv += gradient.wait()
                # after the last step, the gradient returns to the owner of the block
                distance = 1 if step < last else self.axis.size - last
                gradient = start_shift(dkv, self.axis, distance)
            if shift:
                kv = shift.wait()
        if home is not None and gradient:
            home += gradient.wait()  # from the queries of all other ranks
        return home
