"""Point-to-point messages on one axis: the pipeline's hidden states and the ring of context parallelism.

Key property: a handle keeps its tensor alive until the message is through. `wait` may be repeated, while gloo hangs on
a second wait of one request. The pipeline posts single messages on its own channels. The ring posts a send and a
receive together, because two NCCL ranks that both send first wait for each other for ever.

gloo moves CUDA tensors in collectives but not from rank to rank. Such a message goes through the host, so several ranks
may share one GPU in a test. A copy to the host waits for the GPU; the copy back is queued behind the `wait`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megacp.core.distributed.calls import Call
from megacp.core.distributed.grid import Axis
from megacp.core.distributed.neighbours import NearChannel
from megacp.core.large_blocks import empty


def through_host(x: torch.Tensor, axis: Axis) -> bool:
    """Whether a message of this tensor must be copied to the host: gloo cannot send from a device."""
    return axis.backend == "gloo" and x.device.type != "cpu"


def local_channel(x: torch.Tensor, axis: Axis) -> NearChannel | None:
    """Where messages of this tensor go from memory to memory; None where torch sends them."""
    return axis.local if axis.backend == "gloo" and not through_host(x, axis) else None


class Handle:
    """One message under way. `tensor` stays alive at least as long as the handle waits.

    `arrived`: where a message that is received on the host lies until it is copied to `tensor`.
    """

    def __init__(
        self, work: Any, tensor: torch.Tensor, arrived: torch.Tensor | None = None, call: Call | None = None
    ) -> None:
        self._work = work
        self._call = call
        self.tensor = tensor
        self._arrived = arrived

    def wait(self) -> torch.Tensor:
        """Block until the message is sent or received and return its tensor; later calls return at once."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._call is not None:
                self._call.done = True
            if self._arrived is not None:
                self.tensor.copy_(self._arrived)
                self._arrived = None
        return self.tensor


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start sending contiguous `x` to the rank at index `peer` of the axis. A rank cannot send to itself."""
    assert peer != axis.rank, f"rank {axis.rank} of axis {axis.name} sends to itself"
    x = x.detach().contiguous()
    axis.traffic.add("send", x.numel() * x.element_size())
    sent = x.cpu() if through_host(x, axis) else x
    call = axis.calls.message("send", axis.global_ranks[peer], sent)
    if (channel := local_channel(x, axis)) is not None:
        return Handle(channel.start([(axis.global_ranks[peer], sent)], []), sent, call=call)
    return Handle(dist.isend(sent, dst=axis.global_ranks[peer], group=axis.group), sent, call=call)


def irecv(buffer: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start receiving into contiguous `buffer` from the rank at index `peer`; `wait` returns the buffer."""
    assert peer != axis.rank and buffer.is_contiguous()
    arrived = torch.empty_like(buffer, device="cpu") if through_host(buffer, axis) else None
    target = buffer if arrived is None else arrived
    call = axis.calls.message("receive", axis.global_ranks[peer], target)
    if (channel := local_channel(buffer, axis)) is not None:
        return Handle(channel.start([], [(axis.global_ranks[peer], target)]), buffer, call=call)
    return Handle(dist.irecv(target, src=axis.global_ranks[peer], group=axis.group), buffer, arrived, call)


class Shift:
    """A send and a receive under way together; `wait` returns what arrived and may be called again.

    `device` is where it is wanted, if not where it arrives.
    """

    def __init__(
        self,
        works: list[Any],
        sent: torch.Tensor,
        received: torch.Tensor,
        device: torch.device | None = None,
        call: Call | None = None,
    ) -> None:
        self._works = works
        self._call = call
        self._sent = sent
        self._received = received
        self._device = device

    def wait(self) -> torch.Tensor:
        """Block until both messages are through and return the received tensor."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._call is not None:
            self._call.done = True
        if self._device is not None:
            self._received, self._device = self._received.to(self._device), None
        return self._received


def start_shift(x: torch.Tensor, axis: Axis) -> Shift:
    """Start passing contiguous `x` to the next rank of the axis (as a ring) while receiving the previous rank's."""
    x = x.contiguous()
    device = x.device if through_host(x, axis) else None
    sent = x if device is None else x.cpu()
    received = empty(sent.shape, sent)
    target, source = (axis.global_ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    axis.traffic.add("ring", x.numel() * x.element_size())
    if (channel := local_channel(x, axis)) is not None:
        call = axis.calls.begin("ring shift", sent)
        return Shift([channel.start([(target, sent)], [(source, received)])], sent, received, call=call)
    send = dist.P2POp(dist.isend, sent, target, axis.group)
    receive = dist.P2POp(dist.irecv, received, source, axis.group)
    call = axis.calls.begin("ring shift", sent)
    return Shift(dist.batch_isend_irecv([send, receive]), sent, received, device, call)
