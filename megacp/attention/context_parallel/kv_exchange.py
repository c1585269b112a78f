"""K/V exchange: one uneven all-to-all with only the K/V rows that some rank needs.

The plan determines, for each pair of ranks, which keys of one rank the other needs. A document
whose tokens are on few ranks costs the other ranks no communication. Each rank attends to its own
keys while the other keys are in flight. K/V gradients return in the reverse exchange and are added
in rank order.
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
    """The contents of the all-to-all, from the perspective of one rank."""

    send: np.ndarray
    """int64 `[sum of out]`: local row numbers that this rank sends, sorted by destination."""
    out_splits: tuple[int, ...]
    """Number of rows sent to each rank; 0 for this rank."""
    in_splits: tuple[int, ...]
    """Number of rows received from each rank."""
    order: np.ndarray
    """int64 `[sum of in]`: indices that sort received rows into the row's order."""
    table: TileTable
    """Tiles between this rank's queries and the received keys in that order."""

    @once
    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `send` and `order` on the device."""
        return to_device(self.send, device), to_device(self.order, device)


def needed_rows(plan: AttentionPlan) -> list[np.ndarray]:
    """Return, for each rank, which tokens of the row its queries attend to.

    The result is a list of bool `[T]`, equal on all ranks.
    """
    row = plan.metadata.take(plan.order)
    needed = []
    for tokens in plan.indices:
        seen = np.zeros(len(row), bool)
        # the table has keys in `plan.order`, `seen` has them in natural order
        seen[plan.order] = tile_table(plan.metadata.take(tokens), row, plan.reach).needed_keys
        needed.append(seen)
    return needed


@once
def exchange_of(plan: AttentionPlan) -> Exchange | None:
    """Return this rank's exchange, or None if no rank needs keys of another rank.

    All ranks agree on whether the result is None.
    """
    needed = needed_rows(plan)
    mine = plan.cp_rank
    crosses = False
    for source, tokens in enumerate(plan.indices):
        readers = (needed[rank] for rank in range(plan.cp) if rank != source)
        if any(seen[tokens].any() for seen in readers):
            crosses = True
            break
    if not crosses:
        return None

    sent = []  # for each rank, local row numbers
    received = []  # for each rank, tokens of the row
    for rank, tokens in enumerate(plan.indices):
        if rank == mine:
            sent.append(np.zeros(0, np.int64))
            received.append(np.zeros(0, np.int64))
        else:
            sent.append(np.flatnonzero(needed[rank][plan.local]))
            received.append(tokens[needed[mine][tokens]])
    keys = np.concatenate(received)
    position = np.argsort(plan.order)  # [T], place of each token in `plan.order`
    order = np.argsort(position[keys])
    return Exchange(
        send=np.concatenate(sent),
        out_splits=tuple(map(len, sent)),
        in_splits=tuple(map(len, received)),
        order=order,
        table=plan.tiles(plan.local, keys[order]),
    )


class KVExchange(KeysToQueries):
    """Transport `kv_exchange`."""

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """Return the tiles for the rank's own keys, and for received keys if there are any."""
        own = plan.table(plan.cp_rank)
        exchange = exchange_of(plan)
        return [own, exchange.table] if exchange else [own]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """Yield this rank's own block, then all received keys as one block; see `KVBlocks`."""
        exchange = exchange_of(plan)
        if exchange is None:
            return (yield k, v, plan.table(plan.cp_rank))
        send, order = exchange.on(k.device)
        kv = torch.stack([k, v], 1)  # [t, groups, d] twice -> [t, 2, groups, d]
        out_splits = exchange.out_splits
        in_splits = exchange.in_splits
        coming = start_all_to_all(kv.index_select(0, send), self.axis, out_splits, in_splits)
        dkv = yield k, v, plan.table(plan.cp_rank)  # own keys, while the other keys are in flight
        # not kept in variables, so that the received keys are freed before the reverse exchange
        theirs = yield *(x.index_select(0, order) for x in coming.take().unbind(1)), exchange.table
        if dkv is None or theirs is None:
            return None
        leaving = empty(theirs.shape, theirs)
        leaving[order] = theirs  # back to the order of arrival
        # the reverse exchange: gradients of received rows go back to the ranks that sent them
        arrived = start_all_to_all(leaving, self.axis, in_splits, out_splits).take()
        # add rank by rank: a row may have been sent to several ranks, but only once to each
        for rows, values in zip(send.split(out_splits), arrived.split(out_splits), strict=True):
            dkv.index_add_(0, rows, values)
        return dkv
