"""Attention over context-parallel ranks: the function to call, and the transport that it calls."""

from __future__ import annotations

import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import DenseAttention, Transport, of_one_rank
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.kernels import Tell, auto_kernel, select_kernel
from megacp.attention.ops.once import once
from megacp.distributed.grid import Axis


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    axis: Axis,
    *,
    transport: str = "p2p",
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend exactly over the rows that the ranks of `axis` share; differentiable.

    Every rank of the axis calls it with its own tokens, in the order of `plan.local`:

    * `q` is `[t, heads, d]`, `k` and `v` are `[t, groups, d]` with `heads % groups == 0` (grouped
      queries).
    * The result is `[t, heads, d]` in the dtype of `q`. A token that sees nothing (padding) gets
      zeros.
    * `plan.within(Reach(window=128))` is the plan of a layer with a sliding window.
    * `scale` multiplies the scores; 1 / sqrt(d) if None. `sinks` `[heads]` are learned logits of an
      extra key whose value is 0 (as in gpt-oss).

    `transport` is a name in `TRANSPORTS`; `a2a+p2p` needs two sizes, so build it with
    `select_transport`. The first call on an axis chooses the fastest kernel for the device and
    dtype; later calls reuse it. ValueError if the plan and the axis differ in size, or if the
    transport does not support the number of heads.
    """
    if plan.cp != axis.size:
        raise ValueError(f"the plan deals the row to {plan.cp} ranks, the axis has {axis.size}")
    chosen = _transport_of(axis, transport, auto_kernel(q.device.type, q.dtype), q.device)
    return chosen.attend(q, k, v, plan, q.shape[-1] ** -0.5 if scale is None else scale, sinks)


def select_transport(
    name: str,
    kernel: str,
    axis: Axis,
    device: torch.device,
    hierarchy: tuple[int, ...] = (),
    cap: float = 0.0,
    tell: Tell = lambda line: None,
) -> Transport:
    """Build the transport of a name with the kernel of a name; ValueError if either is unknown.

    `hierarchy`: ranks of the inner all-to-all and of the outer ring of `a2a+p2p`. The kernel
    `dense` is the reference for one process and ignores the transport. `cap`: see `MathKernel`.
    `a2a+p2p` makes process groups, so all ranks of the world must call this alike.
    """
    if kernel == "dense":
        return DenseAttention(axis, cap)
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name} is unknown; choose {', '.join(TRANSPORTS)}")
    chosen = select_kernel(kernel, device, cap, tell)
    return (
        of_one_rank(chosen) if axis.size == 1 else TRANSPORTS[name].build(axis, chosen, hierarchy)
    )


@once
def _transport_of(axis: Axis, name: str, kernel: str, device: torch.device) -> Transport:
    """Keep the transport with its axis, because a compiled kernel belongs to its object."""
    return select_transport(name, kernel, axis, device)
