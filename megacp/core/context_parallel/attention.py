"""The table of transports, one of which is chosen once per run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.core.context_parallel.a2a import HeadsForSequence
from megacp.core.context_parallel.all_gather import AllGatherAttention
from megacp.core.context_parallel.kv_exchange import KVExchange
from megacp.core.context_parallel.ring import RingAttention
from megacp.core.context_parallel.transport import DenseAttention, LocalAttention, Transport, WholeAttention
from megacp.core.distributed.grid import Axis, split_axis
from megacp.core.ops.kernel import Kernel, WholeKernel
from megacp.core.ops.kernels import select_kernel


@dataclass(frozen=True)
class TransportOptions:
    """Options of some transports besides their axis."""

    hierarchy: tuple[int, ...] = ()
    """`--hierarchical-context-parallel-sizes`: ranks of the inner all-to-all, ranks of the outer ring."""
    exchange_stages: int = 1
    """`--cp-exchange-stages`: all-to-alls of kv_exchange."""


def _of_one_rank(kernel: Kernel) -> Transport:
    return WholeAttention(kernel) if isinstance(kernel, WholeKernel) else LocalAttention(kernel)


def _a2a_p2p(axis: Axis, kernel: Kernel, options: TransportOptions) -> Transport:
    if len(options.hierarchy) != 2 or options.hierarchy[0] * options.hierarchy[1] != axis.size:
        raise ValueError(
            f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B with A x B = "
            f"--context-parallel-size {axis.size}, got {' '.join(map(str, options.hierarchy)) or 'none'}"
        )
    inner, outer = split_axis(axis, options.hierarchy[0])
    ring = RingAttention(outer, kernel) if outer.size > 1 else LocalAttention(kernel)
    return HeadsForSequence("a2a+p2p", inner, ring)


TRANSPORTS: dict[str, Callable[[Axis, Kernel, TransportOptions], Transport]] = {
    "p2p": lambda axis, kernel, options: RingAttention(axis, kernel),
    "all_gather": lambda axis, kernel, options: AllGatherAttention(axis, kernel),
    "a2a": lambda axis, kernel, options: HeadsForSequence("a2a", axis, _of_one_rank(kernel)),
    "a2a+p2p": _a2a_p2p,
    "kv_exchange": lambda axis, kernel, options: KVExchange(axis, kernel, options.exchange_stages),
}
"""The values of `--cp-comm-type` besides auto."""


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
    return (
        _of_one_rank(chosen) if axis.size == 1 else TRANSPORTS[comm_type](axis, chosen, options or TransportOptions())
    )
