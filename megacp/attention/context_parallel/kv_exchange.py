"""K/V exchange: one uneven all-to-all of just the rows that some rank needs.

The plan knows for each pair of ranks which keys are seen across it. Documents that live on few
ranks cost the others no byte, and a rank attends to its own keys while the others' are under way.
Gradients of K/V go back by the reverse of the same plan and are added in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import KeysToQueries, KVBlocks
from megacp.attention.ops.device import to_device
from megacp.attention.ops.mask import TileTable, tile_table
from megacp.attention.ops.once import once
from megacp.distributed.collectives import start_all_to_all
from megacp.distributed.large_blocks import empty


@dataclass(frozen=True)
class Exchange:
    """What moves in the all-to-all, as one rank sees it."""

    send: np.ndarray
    """int64 `[sum of out]`: local numbers of the rows this rank sends, destination after
    destination.
    """
    out_splits: tuple[int, ...]
    """Rows sent to each rank; 0 to itself."""
    in_splits: tuple[int, ...]
    """Rows that arrive from each rank."""
    order: np.ndarray
    """int64 `[sum of in]`: puts rows as they arrive into the row's order."""
    table: TileTable
    """Tiles between this rank's queries and the arrived keys in that order."""

    @once
    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`send` and `order` on the device."""
        return to_device(self.send, device), to_device(self.order, device)


def needed_rows(plan: AttentionPlan) -> list[np.ndarray]:
    """Keys that some query of each rank sees: bool `[T]` over the row's tokens a rank, equal on all
    ranks.
    """
    row = plan.metadata.take(plan.order)
    needed = []
    for tokens in plan.indices:
        seen = np.zeros(len(row), bool)
        # tiles are made with keys in `plan.order`; `seen` is in the row's own
        seen[plan.order] = tile_table(plan.metadata.take(tokens), row, plan.reach).needed_keys
        needed.append(seen)
    return needed


@once
def exchange_of(plan: AttentionPlan) -> Exchange | None:
    """The exchange of this rank; None where no rank needs anything of another, on all ranks
    alike.
    """
    needed = needed_rows(plan)
    ranks = range(plan.cp)
    mine = plan.cp_rank
    if not any(
        needed[r][plan.indices[source]].any() for r in ranks for source in ranks if source != r
    ):
        return None
    position = np.argsort(plan.order)  # [T]: where each token stands in that order, its inverse
    nothing = np.zeros(0, np.int64)
    sent = [nothing if r == mine else np.flatnonzero(needed[r][plan.local]) for r in ranks]
    came = [
        nothing if r == mine else plan.indices[r][needed[mine][plan.indices[r]]] for r in ranks
    ]  # of the row
    keys = np.concatenate(came)
    order = np.argsort(position[keys])
    table = plan.tiles(plan.local, keys[order])
    return Exchange(
        np.concatenate(sent), tuple(map(len, sent)), tuple(map(len, came)), order, table
    )


class KVExchange(KeysToQueries):
    """Transport `kv_exchange`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        exchange = exchange_of(plan)
        return [plan.table(plan.cp_rank), *([exchange.table] if exchange else [])]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        exchange = exchange_of(plan)
        if exchange is None:
            return (yield k, v, plan.table(plan.cp_rank))
        send, order = exchange.on(k.device)
        kv = torch.stack([k, v], 1)  # [t, groups, d] twice -> [t, 2, groups, d]
        out_splits = exchange.out_splits
        in_splits = exchange.in_splits
        coming = start_all_to_all(kv.index_select(0, send), self.axis, out_splits, in_splits)
        dkv = yield k, v, plan.table(plan.cp_rank)  # of own keys, while the others are under way
        theirs = yield *(x.index_select(0, order) for x in coming.take().unbind(1)), exchange.table
        if dkv is None or theirs is None:
            return None
        leaving = empty(theirs.shape, theirs)
        leaving[order] = theirs  # back to the order of arrival
        # the same message the other way: what came goes, what went comes
        arrived = start_all_to_all(leaving, self.axis, in_splits, out_splits).take()
        for rows, values in zip(send.split(out_splits), arrived.split(out_splits), strict=True):
            dkv.index_add_(
                0, rows, values
            )  # rank by rank: a row goes to a rank at most once, and to several
        return dkv
