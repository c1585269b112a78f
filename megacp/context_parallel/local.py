"""Attention of one rank that holds the whole row: no message, one tile table; and the dense reference.

Key property: the same kernels and the same merged-LSE backward as under context parallelism, so the one-process run is
not a different program. Rejected: `scaled_dot_product_attention`, which needs a dense mask for packs.
"""

from __future__ import annotations

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Kept, Tensors, finished
from megacp.distributed.grid import Axis
from megacp.ops.kernel import QKV, Kernel, accumulation_dtype, empty_partial
from megacp.ops.mask import allowed
from megacp.ops.tile_kernels import dense_attention
from megacp.ops.to_device import to_device


class LocalAttention:
    """Transport for a cp axis of one rank."""

    name = "local"

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        assert axis.size == 1
        self.kernel = kernel

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        partial = empty_partial(qkv[0])
        self.kernel.attend(partial, qkv, plan.table_of_row, scale)
        return finished(qkv, partial)

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        mine = Kept(*kept)
        wide = accumulation_dtype(mine.q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (mine.q, mine.k, mine.v))
        saved = mine.with_gradient(dout)
        self.kernel.attend_backward(saved, (mine.k, mine.v), plan.table_of_row, scale, (dq, dk, dv))
        return dq, dk, dv


class DenseAttention:
    """The reference for one process: an explicit bool mask from the rule itself, differentiated by autograd."""

    name = "dense"

    def __init__(self, axis: Axis) -> None:
        if axis.size != 1:
            raise ValueError(f"--attention-kernel dense is the one-process reference, cp has {axis.size} ranks")

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
