"""All-gather attention (Llama 3, 2024): every rank gathers all K/V and attends with its own queries.

Key property: a rank attends to its own keys while the others' are under way; gathered keys are put into the row's
order, so neighbouring tiles join and a document costs few kernel calls; backward gathers again and reduce-scatters the
gradients. Rejected: saving the gathered K/V, cp times the memory.
"""

from __future__ import annotations

import numpy as np
import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Kept, Tensors, finished
from megacp.distributed.collectives import Pending, reduce_scatter, start_all_gather
from megacp.distributed.grid import Axis
from megacp.ops.kernel import QKV, Kernel, accumulation_dtype, empty_partial
from megacp.ops.mask import TileTable, tile_table


def _others(plan: AttentionPlan) -> np.ndarray:
    """Indices `[T - t]` into the row of the tokens that other ranks hold, in the row's order."""
    mine = np.zeros(len(plan.metadata), bool)
    mine[plan.local] = True
    return plan.order[~mine[plan.order]]


def table_of_others(plan: AttentionPlan) -> TileTable:
    return tile_table(plan.metadata.take(plan.local), plan.metadata.take(_others(plan)))


def _places_of_others(plan: AttentionPlan) -> np.ndarray:
    """Where the tokens of `_others` stand once all tokens are gathered in rank order: int64 `[T - t]`."""
    return np.argsort(plan.indices.reshape(-1))[_others(plan)]


class AllGatherAttention:
    """Transport `all_gather`."""

    name = "all_gather"

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        self.axis = axis
        self.kernel = kernel

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        q, k, v = qkv
        gathered = self._start(k, v)
        partial = empty_partial(q)
        self.kernel.attend(partial, qkv, plan.table(plan.cp_rank), scale)
        keys, values = self._arrived(gathered, plan, q.device)
        self.kernel.attend(partial, (q, keys, values), plan.part("others", lambda: table_of_others(plan)), scale)
        return finished(qkv, partial)

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        mine = Kept(*kept)
        saved, wide = mine.with_gradient(dout), accumulation_dtype(mine.q.dtype)
        gathered = self._start(mine.k, mine.v)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (mine.q, mine.k, mine.v))
        self.kernel.attend_backward(saved, (mine.k, mine.v), plan.table(plan.cp_rank), scale, (dq, dk, dv))
        keys, values = self._arrived(gathered, plan, dout.device)
        theirs = torch.zeros(*keys.shape[:-1], 2 * keys.shape[-1], dtype=wide, device=keys.device)
        grads = (dq, *theirs.chunk(2, -1))
        table = plan.part("others", lambda: table_of_others(plan))
        self.kernel.attend_backward(saved, (keys, values), table, scale, grads)
        row = theirs.new_zeros(len(plan.metadata), *theirs.shape[1:])  # gradients of all keys, in rank order
        row[self._places(plan, dout.device)] = theirs
        first = plan.cp_rank * len(dk)
        row[first : first + len(dk)] = torch.cat([dk, dv], -1)
        dk, dv = reduce_scatter(row, self.axis).chunk(2, -1)  # [t, groups, 2d] -> [t, groups, d] twice
        return dq, dk, dv

    def _start(self, k: torch.Tensor, v: torch.Tensor) -> Pending:
        """`k, v[t, groups, d]` of all ranks, in rank order: `[T, groups, 2d]`."""
        return start_all_gather(torch.cat([k, v], -1), self.axis)

    def _places(self, plan: AttentionPlan, device: torch.device) -> torch.Tensor:
        return plan.on_device("places of others", device, lambda: _places_of_others(plan))

    def _arrived(self, gathered: Pending, plan: AttentionPlan, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Keys and values `[T - t, groups, d]` of the other ranks, in the row's order."""
        theirs = gathered.take()[self._places(plan, device)]
        keys, values = theirs.chunk(2, -1)  # [T - t, groups, 2d] -> [T - t, groups, d] twice
        return keys, values
