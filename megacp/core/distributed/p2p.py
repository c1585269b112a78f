"""Point-to-point messages on one axis: the pipeline's hidden states and the ring of context parallelism.

The pipeline posts single messages on its own channels. The ring posts a send and a receive together, because two NCCL
ranks that both send first wait for each other for ever.

gloo moves CUDA tensors in collectives but not from rank to rank. Such a message goes through the host, so several ranks
may share one GPU in a test. A copy to the host waits for the GPU; the copy back is queued behind the `wait`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megacp.core.distributed.grid import Axis
from megacp.core.distributed.same_host import LocalChannel
from megacp.core.large_blocks import empty


def through_host(x: torch.Tensor, axis: Axis) -> bool:
    """Whether a message of this tensor must be copied to the host: gloo cannot send from a device."""
    return axis.backend == "gloo" and x.device.type != "cpu"


def local_channel(x: torch.Tensor, axis: Axis) -> LocalChannel | None:
    """Where messages of this tensor go from memory to memory; None where torch sends them."""
    return axis.local if axis.backend == "gloo" and not through_host(x, axis) else None


class Handle:
    """Messages under way; `wait` returns `tensor` and may be repeated, while gloo hangs on a second wait of a request.

    What is sent (`kept`) stays alive until then. `arrived`: where a message for `tensor` lies on the host before it is
    copied.
    """

    def __init__(
        self, works: list[Any], tensor: torch.Tensor, arrived: torch.Tensor | None = None, kept: object = None
    ) -> None:
        self._works, self.tensor, self._arrived, self._kept = works, tensor, arrived, kept

    def wait(self) -> torch.Tensor:
        """Block until the messages are through and return the tensor; later calls return at once."""
        for work in self._works:
            work.wait()
        if self._arrived is not None:
            self.tensor.copy_(self._arrived)
        self._works, self._arrived, self._kept = [], None, None
        return self.tensor


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start sending contiguous `x` to the rank at index `peer` of the axis. A rank cannot send to itself."""
    assert peer != axis.rank, f"rank {axis.rank} of axis {axis.name} sends to itself"
    x = x.detach().contiguous()
    axis.traffic["send"] += x.nbytes
    sent = x.cpu() if through_host(x, axis) else x
    if (channel := local_channel(x, axis)) is not None:
        return Handle([channel.start([(axis.global_ranks[peer], sent)], [])], sent)
    return Handle([dist.isend(sent, dst=axis.global_ranks[peer], group=axis.group)], sent)


def irecv(buffer: torch.Tensor, axis: Axis, peer: int) -> Handle:
    """Start receiving into contiguous `buffer` from the rank at index `peer`; `wait` returns the buffer."""
    assert peer != axis.rank and buffer.is_contiguous()
    if (channel := local_channel(buffer, axis)) is not None:
        return Handle([channel.start([], [(axis.global_ranks[peer], buffer)])], buffer)
    arrived = torch.empty_like(buffer, device="cpu") if through_host(buffer, axis) else None
    target = buffer if arrived is None else arrived
    return Handle([dist.irecv(target, src=axis.global_ranks[peer], group=axis.group)], buffer, arrived)


def start_shift(x: torch.Tensor, axis: Axis) -> Handle:
    """Start passing contiguous `x` to the next rank of the axis (as a ring) while receiving the previous rank's."""
    x = x.contiguous()
    received = empty(x.shape, x)
    after, before = (axis.global_ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    axis.traffic["ring"] += x.nbytes
    if (channel := local_channel(x, axis)) is not None:
        return Handle([channel.start([(after, x)], [(before, received)])], received)
    staged = through_host(x, axis)
    sent, arrived = (x.cpu(), torch.empty_like(received, device="cpu")) if staged else (x, received)
    send = dist.P2POp(dist.isend, sent, after, axis.group)
    receive = dist.P2POp(dist.irecv, arrived, before, axis.group)
    return Handle(dist.batch_isend_irecv([send, receive]), received, arrived if staged else None, kept=sent)
