"""Point-to-point messages on one axis: the pipeline's hidden states and the ring of context parallelism.

Key property: a handle keeps its tensor alive until the message is through and its `wait` may be repeated (gloo hangs on
a second wait of its own requests). The pipeline posts single messages on a channel of its own; the ring posts a send
and a receive together, because two NCCL ranks that both send first would wait for each other for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megacp.distributed.grid import Axis


class Handle:
    """One message under way. `tensor` stays alive at least as long as the handle waits."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        """Block until the message is sent or received and return its tensor; later calls return at once."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start sending contiguous `x` to the rank at index `peer` of the axis. A rank cannot send to itself."""
    assert peer != axis.rank, f"rank {axis.rank} of axis {axis.name} sends to itself"
    x = x.detach().contiguous()
    axis.traffic.add("send", x.numel() * x.element_size())
    return Handle(dist.isend(x, dst=axis.global_ranks[peer], group=axis.group), x)


def irecv(buffer: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start receiving into contiguous `buffer` from the rank at index `peer`; `wait` returns the buffer."""
    assert peer != axis.rank and buffer.is_contiguous()
    return Handle(dist.irecv(buffer, src=axis.global_ranks[peer], group=axis.group), buffer)


class Shift:
    """A send and a receive under way together; `wait` returns what arrived and may be called again."""

    def __init__(self, works: list[Any], sent: torch.Tensor, received: torch.Tensor) -> None:
        self._works = works
        self._sent = sent
        self._received = received

    def wait(self) -> torch.Tensor:
        """Block until both messages are through and return the received tensor."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._received


def start_shift(x: torch.Tensor, axis: Axis) -> Shift:
    """Start passing contiguous `x` to the next rank of the axis (as a ring) while receiving the previous rank's."""
    x = x.contiguous()
    received = torch.empty_like(x)
    target, source = (axis.global_ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    axis.traffic.add("ring", x.numel() * x.element_size())
    send = dist.P2POp(dist.isend, x, target, axis.group)
    receive = dist.P2POp(dist.irecv, received, source, axis.group)
    return Shift(dist.batch_isend_irecv([send, receive]), x, received)
