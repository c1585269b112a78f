"""Core attention: one autograd function over a table of transports, one of which is chosen once per run.

Key property: a transport is an object with a forward and a backward over plain tensors; a new one is a row of the
table, and what is saved for backward, `(q, k, v, out, lse)`, is the same for all. Rejected: a function with a branch
per transport, where masks and layouts end up special to each branch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megacp.context_parallel.all_gather import AllGatherAttention
from megacp.context_parallel.local import DenseAttention, LocalAttention
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.ring import RingAttention
from megacp.distributed.grid import Axis
from megacp.ops.attention import QKV, Kernel, Partial, Saved, select_kernel


class Transport(Protocol):
    """Attention over the tokens of a cp axis; tensors are sharded over it by the plan."""

    name: str

    def __init__(self, axis: Axis, kernel: Kernel) -> None: ...

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> Partial:
        """`q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]`, `lse[t, heads]`."""

    def backward(self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan, scale: float) -> QKV:
        """`dq, dk, dv` of this rank's tokens, in the accumulation dtype."""


class _CoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, transport, plan, scale):  # type: ignore[no-untyped-def]
        partial = transport.forward((q, k, v), plan, scale)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse)
        ctx.transport, ctx.plan, ctx.scale = transport, plan, scale
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        saved = Saved(q, out, lse, dout.contiguous())
        grads = ctx.transport.backward(saved, (k, v), ctx.plan, ctx.scale)
        return *(grad.to(q.dtype) for grad in grads), None, None, None


def core_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, transport: Transport, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Softmax attention under the plan's mask: `q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]`."""
    return _CoreAttention.apply(q, k, v, transport, plan, scale)


TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (RingAttention, AllGatherAttention)
}
"""The values of `--cp-comm-type`."""


def select_transport(comm_type: str, kernel: str, axis: Axis, device: torch.device) -> Transport:
    """The transport of `--cp-comm-type` with the kernel of `--attention-kernel`; raises ValueError when unknown.

    The kernel `dense` is the one-process reference and ignores the transport.
    """
    if kernel == "dense":
        return DenseAttention(axis)
    if comm_type not in TRANSPORTS:
        raise ValueError(f"--cp-comm-type {comm_type} is unknown; choose {', '.join(TRANSPORTS)}")
    transport = LocalAttention if axis.size == 1 else TRANSPORTS[comm_type]
    return transport(axis, select_kernel(kernel, device))
