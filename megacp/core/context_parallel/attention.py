"""Core attention: one autograd function over a table of transports, one of which is chosen once per run.

Key property: a transport is an object with a forward and a backward over plain tensors, and a row of the table.
Rejected: a function with a branch per transport, where masks and layouts end up special to each branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacp.core.context_parallel.a2a import HeadsForSequence, WholeHeadsForSequence
from megacp.core.context_parallel.all_gather import AllGatherAttention
from megacp.core.context_parallel.kv_exchange import KVExchange
from megacp.core.context_parallel.local import DenseAttention, LocalAttention, WholeAttention
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.ring import RingAttention
from megacp.core.context_parallel.transport import Attend, Transport
from megacp.core.distributed.grid import Axis, single_axis, split_axis
from megacp.core.ops.kernel import Kernel, WholeKernel
from megacp.core.ops.kernels import select_kernel


class _CoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        transport: Transport,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        out, kept = transport.forward((q, k, v), plan, scale)
        ctx.save_for_backward(*kept)
        ctx.transport, ctx.plan, ctx.scale = transport, plan, scale
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.transport.backward(ctx.saved_tensors, douts[0].contiguous(), ctx.plan, ctx.scale)
        return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None


def core_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, transport: Transport, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Softmax attention under the plan's mask: `q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]`."""
    # kernels and messages take the last dim as dense; a transposed view would be read past its end
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    attend: Attend | None = getattr(transport, "attend", None)
    if attend is not None:
        return attend(q, k, v, plan, scale)
    return _CoreAttention.apply(q, k, v, transport, plan, scale)


@dataclass(frozen=True)
class TransportOptions:
    """Options of some transports besides their axis."""

    hierarchy: tuple[int, ...] = ()
    """`--hierarchical-context-parallel-sizes`: ranks of the inner all-to-all, ranks of the outer ring."""
    exchange_stages: int = 1
    """`--cp-exchange-stages`: all-to-alls of kv_exchange."""


def _a2a(axis: Axis, kernel: Kernel, options: TransportOptions) -> Transport:
    if isinstance(kernel, WholeKernel):
        return WholeHeadsForSequence(axis, kernel)
    return HeadsForSequence("a2a", axis, LocalAttention(single_axis("cp_outer"), kernel))


def _a2a_p2p(axis: Axis, kernel: Kernel, options: TransportOptions) -> Transport:
    if len(options.hierarchy) != 2 or options.hierarchy[0] * options.hierarchy[1] != axis.size:
        raise ValueError(
            f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B with A x B = "
            f"--context-parallel-size {axis.size}, got {' '.join(map(str, options.hierarchy)) or 'none'}"
        )
    inner, outer = split_axis(axis, options.hierarchy[0])
    ring = RingAttention(outer, kernel) if outer.size > 1 else LocalAttention(outer, kernel)
    return HeadsForSequence("a2a+p2p", inner, ring)


TRANSPORTS: dict[str, Callable[[Axis, Kernel, TransportOptions], Transport]] = {
    "p2p": lambda axis, kernel, options: RingAttention(axis, kernel),
    "all_gather": lambda axis, kernel, options: AllGatherAttention(axis, kernel),
    "a2a": _a2a,
    "a2a+p2p": _a2a_p2p,
    "kv_exchange": lambda axis, kernel, options: KVExchange(axis, kernel, options.exchange_stages),
}
"""The values of `--cp-comm-type`."""


def select_transport(
    comm_type: str, kernel: str, axis: Axis, device: torch.device, options: TransportOptions | None = None
) -> Transport:
    """The transport of `--cp-comm-type` with the kernel of `--attention-kernel`; raises ValueError when unknown.

    The kernel `dense` is the one-process reference and ignores the transport. `a2a+p2p` makes process groups: all ranks
    of the world must call this alike.
    """
    if kernel == "dense":
        return DenseAttention(axis)
    if comm_type not in TRANSPORTS:
        raise ValueError(f"--cp-comm-type {comm_type} is unknown; choose {', '.join(TRANSPORTS)}")
    chosen = select_kernel(kernel, device)
    if axis.size == 1:
        return WholeAttention(axis, chosen) if isinstance(chosen, WholeKernel) else LocalAttention(axis, chosen)
    return TRANSPORTS[comm_type](axis, chosen, options or TransportOptions())
