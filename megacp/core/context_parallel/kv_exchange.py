"""K/V exchange: one uneven all-to-all of just the rows that some rank needs.

The plan knows for each pair of ranks which keys are seen across it. Documents that live on few ranks
cost the others no byte, and a rank attends to its own keys while the others' are under way. With several stages the
rows of the next ranks travel while those of the last are used. Gradients of K/V go back by the reverse of the same plan
and are added in rank order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.transport import KeysToQueries, KVBlocks
from megacp.core.distributed.collectives import start_all_to_all
from megacp.core.distributed.grid import Axis
from megacp.core.large_blocks import empty
from megacp.core.ops.kernel import Kernel
from megacp.core.ops.mask import TileTable, tile_table


@dataclass(frozen=True)
class Stage:
    """What moves in one all-to-all, as one rank sees it."""

    send: np.ndarray
    """int64 `[sum of out]`: local numbers of the rows this rank sends, destination after destination."""
    out_splits: tuple[int, ...]
    """Rows sent to each rank; 0 to itself."""
    in_splits: tuple[int, ...]
    """Rows that arrive from each rank."""
    order: np.ndarray
    """int64 `[sum of in]`: puts rows as they arrive into the row's order."""
    table: TileTable
    """Tiles between this rank's queries and the arrived keys in that order."""


def needed_rows(plan: AttentionPlan) -> list[np.ndarray]:
    """For each rank, bool `[T]` over the row's tokens: keys that some query of this rank sees; equal on all ranks."""
    row = plan.metadata.take(plan.order)
    needed = []
    for tokens in plan.indices:
        seen = np.zeros(len(row), bool)
        # tiles are made with keys in `plan.order`; `seen` is in the row's own
        seen[plan.order] = tile_table(plan.metadata.take(tokens), row).needed_keys
        needed.append(seen)
    return needed


def exchange_stages(plan: AttentionPlan, stages: int, needed: list[np.ndarray] | None = None) -> list[Stage]:
    """The exchange in at most `stages` all-to-alls: stage i moves rows between ranks a similar way apart.

    A stage in which no rank sends anything is left out, on all ranks alike. `needed`: the plan's `needed_rows`, if
    they are known; `[cp, T]` of them is more than a plan should keep.
    """
    needed = needed_rows(plan) if needed is None else needed
    cp, mine = plan.cp, plan.cp_rank
    position = np.argsort(plan.order)  # [T]: where each token stands in that order, its inverse
    found = []
    for number in range(stages):
        distances = [d for d in range(1, cp) if (d - 1) * stages // (cp - 1) == number]
        if not any(needed[r][plan.indices[(r - d) % cp]].any() for r in range(cp) for d in distances):
            continue
        # a rank sends to those d places ahead of it and hears from those d places behind, in a circle
        targets, sources = ({(mine + way * d) % cp for d in distances} for way in (1, -1))
        nothing = np.zeros(0, np.int64)
        sent = [np.flatnonzero(needed[r][plan.local]) if r in targets else nothing for r in range(cp)]
        came = [
            plan.indices[r][needed[mine][plan.indices[r]]] if r in sources else nothing for r in range(cp)
        ]  # as indices into the row
        keys = np.concatenate(came)
        order = np.argsort(position[keys])
        table = tile_table(plan.metadata.take(plan.local), plan.metadata.take(keys[order]))
        counts = (tuple(map(len, sent)), tuple(map(len, came)))
        found.append(Stage(np.concatenate(sent), *counts, order, table))
    return found


class KVExchange(KeysToQueries):
    """Transport `kv_exchange`."""

    name = "kv_exchange"

    def __init__(self, axis: Axis, kernel: Kernel, stages: int = 1) -> None:
        self.axis = axis
        self.kernel = kernel
        self.stages = min(stages, max(1, axis.size - 1))

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """See `KeysToQueries.tables`."""
        return [plan.table(plan.cp_rank), *(stage.table for stage in self._stages(plan))]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """See `KeysToQueries.kv_blocks`."""
        stages = self._stages(plan)
        send, order = (self._indices(plan, stages, name, k.device) for name in ("send", "order"))
        kv = torch.stack([k, v], 1)  # [t, groups, d] twice -> [t, 2, groups, d]
        messages = (  # each is posted when it is asked for
            start_all_to_all(kv.index_select(0, rows), self.axis, stage.out_splits, stage.in_splits)
            for rows, stage in zip(send, stages, strict=True)
        )
        following = next(messages, None)
        dkv = yield k, v, plan.table(plan.cp_rank)
        returning = []
        for rows, stage in zip(order, stages, strict=True):
            coming, following = following, next(messages, None)
            assert coming is not None
            theirs = yield *(x.index_select(0, rows) for x in coming.take().unbind(1)), stage.table
            if theirs is not None:
                leaving = empty(theirs.shape, theirs)
                leaving[rows] = theirs  # back to the order of arrival
                returning.append(start_all_to_all(leaving, self.axis, stage.in_splits, stage.out_splits))
                del theirs, leaving  # no longer needed here while the next stage is computed
        if dkv is None:
            return None
        for arrived, rows, stage in zip(returning, send, stages, strict=True):
            for index, values in zip(*(x.split(stage.out_splits) for x in (rows, arrived.take())), strict=True):
                dkv.index_add_(0, index, values)  # rank by rank: a row goes to a rank at most once, and to several
        return dkv

    def _stages(self, plan: AttentionPlan) -> list[Stage]:
        return plan.part(f"exchange in {self.stages}", lambda: exchange_stages(plan, self.stages))

    def _indices(self, plan: AttentionPlan, stages: list[Stage], name: str, device: torch.device) -> list[torch.Tensor]:
        """`send` or `order` of every stage on the device."""
        return [
            plan.on_device(f"{name} {number} of {self.stages}", device, functools.partial(getattr, stage, name))
            for number, stage in enumerate(stages)
        ]
