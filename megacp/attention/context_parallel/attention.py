"""The table of transports, one of which is chosen once per run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megacp.attention.context_parallel.a2a import HeadsForSequence
from megacp.attention.context_parallel.all_gather import AllGatherAttention
from megacp.attention.context_parallel.kv_exchange import KVExchange
from megacp.attention.context_parallel.ring import RingAttention
from megacp.attention.context_parallel.transport import DenseAttention, LocalAttention, Transport, WholeAttention
from megacp.attention.ops.kernel import Kernel, WholeKernel
from megacp.attention.ops.kernels import Tell, select_kernel
from megacp.distributed.grid import Axis, split_axis


def _of_one_rank(kernel: Kernel) -> Transport:
    return WholeAttention(kernel) if isinstance(kernel, WholeKernel) else LocalAttention(kernel)


def _a2a_p2p(axis: Axis, kernel: Kernel, hierarchy: tuple[int, ...]) -> Transport:
    if len(hierarchy) != 2 or hierarchy[0] * hierarchy[1] != axis.size:
        raise ValueError(
            f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B with A x B = "
            f"--context-parallel-size {axis.size}, got {' '.join(map(str, hierarchy)) or 'none'}"
        )
    # neighbours, often on one machine, change heads; ranks a whole inner group apart form the ring
    inner, outer = split_axis(axis, hierarchy[0])
    ring = RingAttention(outer, kernel) if outer.size > 1 else LocalAttention(kernel)
    return HeadsForSequence("a2a+p2p", inner, ring)


TRANSPORTS: dict[str, Callable[[Axis, Kernel, tuple[int, ...]], Transport]] = {
    "p2p": lambda axis, kernel, hierarchy: RingAttention(axis, kernel),
    "all_gather": lambda axis, kernel, hierarchy: AllGatherAttention(axis, kernel),
    "a2a": lambda axis, kernel, hierarchy: HeadsForSequence("a2a", axis, _of_one_rank(kernel)),
    "a2a+p2p": _a2a_p2p,
    "kv_exchange": lambda axis, kernel, hierarchy: KVExchange(axis, kernel),
}
"""The values of `--cp-comm-type` besides auto."""


def select_transport(
    comm_type: str,
    kernel: str,
    axis: Axis,
    device: torch.device,
    hierarchy: tuple[int, ...] = (),
    cap: float = 0.0,
    tell: Tell = lambda line: None,
) -> Transport:
    """The transport of `--cp-comm-type` with the kernel of `--attention-kernel`; raises ValueError when unknown.

    `hierarchy` (`--hierarchical-context-parallel-sizes`): ranks of the inner all-to-all and of the outer ring. The
    kernel `dense` is the one-process reference and ignores the transport. `cap`: see `MathKernel`. `a2a+p2p` makes
    process groups: all ranks of the world must call this alike.
    """
    if kernel == "dense":
        return DenseAttention(axis, cap)
    if comm_type not in TRANSPORTS:
        raise ValueError(f"--cp-comm-type {comm_type} is unknown; choose {', '.join(TRANSPORTS)}")
    chosen = select_kernel(kernel, device, cap, tell)
    return _of_one_rank(chosen) if axis.size == 1 else TRANSPORTS[comm_type](axis, chosen, hierarchy)
