"""All-gather attention (Llama 3, 2024): every rank gathers all K/V and attends with its own queries.

Key property: gathered keys are put back into the row's order, so neighbouring tiles join and a document costs few
kernel calls; backward gathers again and reduce-scatters the gradients. Rejected: saving the gathered K/V, cp times the
memory.
"""

from __future__ import annotations

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.distributed.collectives import all_gather, reduce_scatter
from megacp.distributed.grid import Axis
from megacp.ops import attention as kernels


class AllGatherAttention:
    """Transport `all_gather`."""

    name = "all_gather"

    def __init__(self, axis: Axis, kernel: kernels.Kernel) -> None:
        self.axis = axis
        self.kernel = kernel

    def forward(self, qkv: kernels.QKV, plan: AttentionPlan, scale: float) -> kernels.Partial:
        """See `Transport.forward`."""
        q, k, v = qkv
        keys, values = self._gather_row(k, v, plan)
        partial = kernels.empty_partial(q)
        kernels.attend(self.kernel, partial, (q, keys, values), plan.table_of_row, scale)
        return partial

    def backward(
        self, saved: kernels.Saved, kv: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan, scale: float
    ) -> kernels.QKV:
        """See `Transport.backward`."""
        wide = kernels.accumulation_dtype(saved.q.dtype)
        keys, values = self._gather_row(*kv, plan)
        dq = torch.zeros_like(saved.q, dtype=wide)
        dkv = torch.zeros(*keys.shape[:-1], 2 * keys.shape[-1], dtype=wide, device=keys.device)
        dk, dv = dkv.chunk(2, -1)
        kernels.attend_backward(self.kernel, saved, (keys, values), plan.table_of_row, scale, (dq, dk, dv))
        mine = reduce_scatter(dkv[plan.to_rank_order(dkv.device)], self.axis)
        dk, dv = mine.chunk(2, -1)  # [t, groups, 2d] -> [t, groups, d] twice
        return dq, dk, dv

    def _gather_row(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """`k, v[t, groups, d]` of all ranks in row order: `[T, groups, d]` each."""
        both = all_gather(torch.cat([k, v], -1), self.axis)  # [t, groups, 2d] -> [T, groups, 2d] in rank order
        row = both[plan.to_row_order(k.device)]
        return row[..., : k.shape[-1]], row[..., k.shape[-1] :]
