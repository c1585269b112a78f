"""Attention of one rank that holds the whole row: no message, one tile table; and the dense reference.

Key property: kernels and backward are those of context parallelism, so a run of one process is the same program.
Rejected: `scaled_dot_product_attention`, which needs a dense mask for packs.
"""

from __future__ import annotations

import torch

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.context_parallel.transport import KeysToQueries, Tensors, Visits
from megacp.core.distributed.grid import Axis
from megacp.core.ops.kernel import QKV, Kernel, WholeKernel
from megacp.core.ops.mask import TileTable, allowed
from megacp.core.ops.tile_kernels import dense_attention
from megacp.core.ops.to_device import to_device


class LocalAttention(KeysToQueries):
    """Transport for a cp axis of one rank."""

    name = "local"

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        assert axis.size == 1
        self.kernel = kernel

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """See `KeysToQueries.tables`."""
        return [plan.table_of_row]

    def visits(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> Visits:
        """See `KeysToQueries.visits`."""
        return (yield k, v, plan.table_of_row)


class WholeAttention(LocalAttention):
    """Transport for a cp axis of one rank with a kernel that autograd differentiates."""

    kernel: WholeKernel

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """Differentiable attention: `q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]`."""
        return self.kernel.whole(q, k, v, plan.table_of_row, scale)


class DenseAttention:
    """The reference for one process: an explicit bool mask from the rule itself, differentiated by autograd."""

    name = "dense"

    def __init__(self, axis: Axis) -> None:
        if axis.size != 1:
            raise ValueError(f"--attention-kernel dense is the one-process reference, cp has {axis.size} ranks")

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`: its mask is dense."""

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        mine = plan.metadata.take(plan.local)
        visible = to_device(allowed(mine, mine), qkv[0].device)
        return dense_attention(*qkv, visible, scale), qkv

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in kept)
            out, _ = self.forward((q, k, v), plan, scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return dq, dk, dv
