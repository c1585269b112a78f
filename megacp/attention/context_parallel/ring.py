"""Ring attention (Liu et al., 2023): K/V travel around the cp axis, each rank attends to what
passes by.

The next K/V is under way while the present one is used. Backward sends K/V round again. The first
rank that they come to starts their gradient, which follows one step behind them. What a rank adds
to its own never leaves home, so gradients take n - 1 steps too. Where no rank sees anything of what
would still come by, as in windows of a contiguous row, the ring stops, and gradients go home at
once. Grouped K/V heads are never expanded on the wire.
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
    """Blocks of keys that a rank is shown, its own the first, until no rank sees anything of the
    rest.
    """
    needed = needed_rows(plan)
    ranks = range(plan.cp)
    # in step s rank r is shown the keys of rank r - s; indices below 0 count from the last rank
    seen = [step for step in ranks if any(needed[r][plan.indices[r - step]].any() for r in ranks)]
    return 1 + max(seen, default=0)


class RingAttention(KeysToQueries):
    """Transport `p2p`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        return [
            plan.table((self.axis.rank - step) % self.axis.size) for step in range(_steps(plan))
        ]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        tables = self.tables(plan)
        last = len(tables) - 1
        kv = torch.stack([k, v], 1)  # [t, groups, d] twice -> [t, 2, groups, d]
        home: torch.Tensor | None = None  # of this rank's K/V, by its own queries
        gradient: Pending | None = (
            None  # of the K/V block at hand, as summed by the ranks it came by before
        )
        for step in range(last + 1):
            shift = start_shift(kv, self.axis) if step < last else None
            dkv = yield kv[:, 0], kv[:, 1], tables[step]
            # gradients of own keys stay here; those of another rank's move on with what this rank
            # adds
            if step == 0:
                home = dkv
            elif dkv is not None:
                if gradient:
                    dkv += gradient.wait()
                gradient = start_shift(dkv, self.axis, 1 if step < last else self.axis.size - last)
            kv = shift.wait() if shift else kv
        if home is not None and gradient:
            home += gradient.wait()  # of this rank's K/V, by the queries of all others
        return home
