"""K/V exchange: one uneven all-to-all of just the rows that somebody needs.

Key property: the plan knows for each pair of ranks which keys are seen across it, so documents that live on few ranks
cost no others a byte, and a rank attends to its own keys while the others' are under way. With several stages the rows
of the next ranks travel while those of the last are used. Gradients of K/V go back by the reverse of the same plan and
are added in rank order. Rejected: sub-communicators for documents, which must be created for every pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Kept, Tensors, finished
from megacp.distributed.collectives import Pending, start_all_to_all
from megacp.distributed.grid import Axis
from megacp.ops.kernel import QKV, Kernel, accumulation_dtype, empty_partial
from megacp.ops.mask import TileTable, tile_table


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
        seen[plan.order] = tile_table(plan.metadata.take(tokens), row).needed_keys
        needed.append(seen)
    return needed


def exchange_stages(plan: AttentionPlan, stages: int) -> list[Stage]:
    """The exchange in at most `stages` all-to-alls: stage i moves rows between ranks a similar way apart.

    A stage in which no rank sends anything is left out, on all ranks alike.
    """
    needed = plan.part("needed rows", lambda: needed_rows(plan))
    cp, mine = plan.cp, plan.cp_rank
    position = np.argsort(plan.order)
    found = []
    for number in range(stages):
        distances = [d for d in range(1, cp) if (d - 1) * stages // (cp - 1) == number]
        if not any(needed[r][plan.indices[(r - d) % cp]].any() for r in range(cp) for d in distances):
            continue
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


class KVExchange:
    """Transport `kv_exchange`."""

    name = "kv_exchange"

    def __init__(self, axis: Axis, kernel: Kernel, stages: int = 1) -> None:
        self.axis = axis
        self.kernel = kernel
        self.stages = min(stages, max(1, axis.size - 1))

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        q, k, v = qkv
        stages = self._plan(plan)
        both = torch.cat([k, v], -1)  # [t, groups, d] twice -> [t, groups, 2d]
        partial = empty_partial(q)
        coming = self._start(both, plan, 0)
        self.kernel.attend(partial, qkv, plan.table(plan.cp_rank), scale)
        for number, stage in enumerate(stages):
            following = self._start(both, plan, number + 1)
            keys, values = self._arrived(coming, plan, number)
            self.kernel.attend(partial, (q, keys, values), stage.table, scale)
            coming = following
        return finished(qkv, partial)

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        mine = Kept(*kept)
        saved, wide = mine.with_gradient(dout), accumulation_dtype(mine.q.dtype)
        stages = self._plan(plan)
        both = torch.cat([mine.k, mine.v], -1)
        coming = self._start(both, plan, 0)
        dq = torch.zeros_like(mine.q, dtype=wide)
        dkv = torch.zeros_like(both, dtype=wide)  # [t, groups, 2d]
        self.kernel.attend_backward(saved, (mine.k, mine.v), plan.table(plan.cp_rank), scale, (dq, *_halves(dkv)))
        returning = []
        for number, stage in enumerate(stages):
            following = self._start(both, plan, number + 1)
            keys, values = self._arrived(coming, plan, number)
            theirs = torch.zeros(*keys.shape[:-1], 2 * keys.shape[-1], dtype=wide, device=keys.device)
            self.kernel.attend_backward(saved, (keys, values), stage.table, scale, (dq, *_halves(theirs)))
            leaving = torch.empty_like(theirs)
            leaving[self._order(plan, number, theirs.device)] = theirs  # back to the order of arrival
            returning.append(start_all_to_all(leaving, self.axis, stage.in_splits, stage.out_splits))
            coming = following
        for number, stage in enumerate(stages):
            self._add(dkv, returning[number], stage, plan, number)
        return dq, *_halves(dkv)

    def _plan(self, plan: AttentionPlan) -> list[Stage]:
        return plan.part(f"exchange in {self.stages}", lambda: exchange_stages(plan, self.stages))

    def _send_rows(self, plan: AttentionPlan, number: int, device: torch.device) -> torch.Tensor:
        return plan.on_device(f"send {number} of {self.stages}", device, lambda: self._plan(plan)[number].send)

    def _order(self, plan: AttentionPlan, number: int, device: torch.device) -> torch.Tensor:
        return plan.on_device(f"order {number} of {self.stages}", device, lambda: self._plan(plan)[number].order)

    def _start(self, both: torch.Tensor, plan: AttentionPlan, number: int) -> Pending | None:
        """Post the rows of stage `number`, where there is one."""
        stages = self._plan(plan)
        if number >= len(stages):
            return None
        rows = both[self._send_rows(plan, number, both.device)]
        return start_all_to_all(rows, self.axis, stages[number].out_splits, stages[number].in_splits)

    def _arrived(self, coming: Pending | None, plan: AttentionPlan, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a stage in the order of its table."""
        assert coming is not None
        rows = coming.take()
        return _halves(rows[self._order(plan, number, rows.device)])

    def _add(self, dkv: torch.Tensor, returning: Pending, stage: Stage, plan: AttentionPlan, number: int) -> None:
        """Add what came back to the rows that were sent, rank by rank: a row may have gone to several."""
        rows = self._send_rows(plan, number, dkv.device).split(stage.out_splits)
        for index, values in zip(rows, returning.take().split(stage.out_splits), strict=True):
            dkv[index] += values  # a row goes to a rank at most once


def _halves(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, groups, 2d] -> [n, groups, d]` twice, as views."""
    first, second = both.chunk(2, -1)
    return first, second
