"""The public attention function for context-parallel ranks, and the selection of its transport."""

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
    """Return exact attention for rows that are sharded across `axis`; differentiable.

    Every rank of the axis calls this function with its own tokens, in the order of `plan.local`:

    * `q` is `[t, heads, d]`; `k` and `v` are `[t, groups, d]` with `heads % groups == 0` (grouped
      queries).
    * The result is `[t, heads, d]` in the dtype of `q`. Tokens without keys (padding) get zeros.
    * For a layer with a sliding window, pass `plan.within(Reach(window=128))`.
    * `scale` multiplies the scores; None means 1 / sqrt(d). `sinks` `[heads]` are learned logits of
      an extra key whose value is 0 (as in gpt-oss).

    `transport` is a name from `TRANSPORTS`. `a2a+p2p` needs two group sizes and must be built with
    `select_transport`. The first call on an axis chooses the fastest kernel for the device and
    dtype; later calls reuse it.

    Raise ValueError if the plan and the axis differ in size, or if the transport does not support
    the number of heads.
    """
    if plan.cp != axis.size:
        raise ValueError(
            f"the plan is for {plan.cp} ranks, but the axis has {axis.size}; build the plan with "
            "the size of the axis"
        )
    # the transport is built once per axis, name, kernel and device
    chosen = _transport_of(axis, transport, auto_kernel(q.device.type, q.dtype), q.device)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return chosen.attend(q, k, v, plan, scale, sinks)


def select_transport(
    name: str,
    kernel: str,
    axis: Axis,
    device: torch.device,
    hierarchy: tuple[int, ...] = (),
    cap: float = 0.0,
    tell: Tell = lambda line: None,
) -> Transport:
    """Build a transport with a kernel, both by name.

    For `a2a+p2p`, `hierarchy` contains the sizes of the inner all-to-all and the outer ring. The
    kernel `dense` is a reference for one process and ignores the transport. `cap` is described at
    `MathKernel`. `tell` logs which kernel is used.

    `a2a+p2p` creates process groups, so all ranks of the world must make the same call. Raise
    ValueError if the transport or the kernel is unknown.
    """
    if kernel == "dense":
        return DenseAttention(axis, cap)
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name} is unknown; choose {', '.join(TRANSPORTS)}")
    # a single rank has the whole row and needs no transport
    chosen = select_kernel(kernel, device, cap, tell)
    if axis.size == 1:
        return of_one_rank(chosen)
    return TRANSPORTS[name].build(axis, chosen, hierarchy)


@once
def _transport_of(axis: Axis, name: str, kernel: str, device: torch.device) -> Transport:
    """Return a transport that is cached in its axis, so that compiled kernels are reused."""
    return select_transport(name, kernel, axis, device)
