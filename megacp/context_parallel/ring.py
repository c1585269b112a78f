"""Ring attention (Liu et al., 2023): K/V travel around the cp axis, each rank attends to what passes by.

Key property: the next K/V is on its way while the present one is used; tiles that a rank does not see cost no kernel;
backward sends K/V round again together with their gradients, so nothing but `(q, k, v, out, lse)` is kept. Grouped K/V
heads are never expanded on the wire. Rejected: keeping every visited K/V for backward, which undoes the memory saved.
"""

from __future__ import annotations

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Kept, Tensors, finished
from megacp.distributed.grid import Axis
from megacp.distributed.p2p import Shift, start_shift
from megacp.ops.kernel import QKV, Kernel, accumulation_dtype, empty_partial


class RingAttention:
    """Transport `p2p`."""

    name = "p2p"

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        self.axis = axis
        self.kernel = kernel

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        q, k, v = qkv
        partial = empty_partial(q)
        kv = torch.stack([k, v])  # [t, groups, d] twice -> [2, t, groups, d]
        for step in range(self.axis.size):
            shift = start_shift(kv, self.axis) if step < self.axis.size - 1 else None
            table = plan.table((self.axis.rank - step) % self.axis.size)
            self.kernel.attend(partial, (q, kv[0], kv[1]), table, scale)
            kv = shift.wait() if shift else kv
        return finished(qkv, partial)

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        mine = Kept(*kept)
        saved = mine.with_gradient(dout)
        wide = accumulation_dtype(mine.q.dtype)
        dq = torch.zeros_like(mine.q, dtype=wide)
        visiting = torch.stack([mine.k, mine.v])  # [t, groups, d] twice -> [2, t, groups, d]
        gradient: Shift | None = None  # of the visiting K/V, as summed by the ranks it visited before
        for step in range(self.axis.size):
            shift = start_shift(visiting, self.axis) if step < self.axis.size - 1 else None
            table = plan.table((self.axis.rank - step) % self.axis.size)
            dkv = torch.zeros_like(visiting, dtype=wide)
            grads = (dq, dkv[0], dkv[1])
            self.kernel.attend_backward(saved, (visiting[0], visiting[1]), table, scale, grads)
            if gradient:
                dkv += gradient.wait()
            gradient = start_shift(dkv, self.axis)
            visiting = shift.wait() if shift else visiting
        assert gradient is not None
        dk, dv = gradient.wait()  # the last step brings every gradient home
        return dq, dk, dv
