"""Collectives and messages on one `Axis`, blocking and asynchronous; only this module handles axes
of size 1.

On gloo, a reduce-scatter or a small all-reduce is an all-to-all followed by a local sum in rank
order. The results are therefore bitwise equal in every run, and bf16 is summed in fp32. CPU ranks
on one machine exchange and gather tensors from memory to memory (`same_host.py`). Collectives work
on dim 0 and make their input contiguous, because gloo reduces strided views incorrectly without an
error.

The ring posts a send and a receive together: two NCCL ranks that both send first would deadlock.
gloo supports CUDA tensors in collectives but not in point-to-point messages, so such messages are
copied through the host.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megacp.distributed.grid import Axis, HostGroup, WorldAxis
from megacp.distributed.large_blocks import empty
from megacp.distributed.same_host import LocalChannel, Operation

# torch 2.13 renames these two functions; older releases have only the names on the right
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HALVES = (torch.bfloat16, torch.float16)
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SMALL_REDUCE = 16_384
"""Largest number of elements for which latency dominates a gloo all-reduce; a single round of
messages is then faster than gloo's ring.
"""


class Pending:
    """An operation in flight.

    `wait` may be called several times, unlike gloo's, which would hang in the second call.
    """

    def __init__(self, works: list[Any], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the result is ready and return it."""
        # a stored result also marks the works as done
        if self._result is None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._works = []
            self._finish = None  # type: ignore[assignment]  # frees the buffers of the closure
        return self._result

    def take(self) -> Any:
        """Return the result and drop the reference to it; may be called only once."""
        result = self.wait()
        self._result = None
        return result


def through_host(x: torch.Tensor, axis: Axis) -> bool:
    """Return whether messages with this tensor must be copied through the host.

    gloo cannot send messages from a device.
    """
    return axis.backend == "gloo" and x.device.type != "cpu"


def local_channel(x: torch.Tensor, axis: Axis) -> LocalChannel | None:
    """Return the channel that copies this tensor between ranks, or None if torch sends it."""
    return None if through_host(x, axis) else axis.local


def _among_neighbours(
    out: Sequence[torch.Tensor], x: Sequence[torch.Tensor], axis: Axis, channel: LocalChannel
) -> Operation:
    """Start sending `x[r]` to each rank r of the axis and receiving `out[r]` from it.

    The rank's own block is copied.
    """
    if out[axis.rank].data_ptr() != x[axis.rank].data_ptr():
        out[axis.rank].copy_(x[axis.rank])
    sends = []
    receives = []
    for i, rank in enumerate(axis.global_ranks):
        if i != axis.rank:
            sends.append((rank, x[i]))
            receives.append((rank, out[i]))
    return channel.start(sends, receives)


def _sum_blocks(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of at least two blocks in rank order; bf16 and fp16 are summed in fp32."""
    first, second, *others = (block.detach() for block in blocks)
    if first.dtype in _HALVES:
        total = first.float() + second.float()
    else:
        total = torch.add(first, second, out=empty(first.shape, first))
    for block in others:
        total += block
    return total.to(first.dtype)


def start_all_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """Start an all-gather of `[n, ...]` as `[size * n, ...]`, with blocks in axis order."""
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    return gather_into(empty((x.shape[0] * axis.size, *x.shape[1:]), x), x, axis)


def gather_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Pending:
    """Start an all-gather of contiguous `x[n]` into the caller's `out[size * n]`.

    `x` may be this rank's block of `out`.
    """
    # each rank sends its block to all other ranks
    axis.traffic["all_gather"] += x.nbytes * (axis.size - 1)
    if (channel := local_channel(x, axis)) is not None:
        blocks = out.tensor_split(axis.size)
        work: Any = _among_neighbours(blocks, [x] * axis.size, axis, channel)
    else:
        work = _all_gather_single(out, x, group=axis.group, async_op=True)
    return Pending([work], lambda: out)


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gather `[n, ...]` as `[size * n, ...]` and wait for the result."""
    return start_all_gather(x, axis).wait()


def start_reduce_scatter(x: torch.Tensor, axis: Axis, *, in_place: bool = False) -> Pending:
    """Start a reduce-scatter of `[size * n, ...]` to `[n, ...]`, this rank's block of the sum.

    With `in_place`, NCCL may write the sum into this rank's block of contiguous `x`; the other
    blocks are then undefined. gloo always allocates the sum.
    """
    assert x.shape[0] % axis.size == 0, f"reduce-scatter of {tuple(x.shape)} to {axis.size} ranks"
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    # each rank sends its blocks for all other ranks
    axis.traffic["reduce_scatter"] += x.nbytes // axis.size * (axis.size - 1)
    if axis.backend == "gloo":
        return _start_sum(x, axis)
    # NCCL's in-place form: the output is this rank's block of the input
    own = x.tensor_split(axis.size)[axis.rank]
    out = own if in_place else torch.empty_like(own)
    return Pending([_reduce_scatter_single(out, x, group=axis.group, async_op=True)], lambda: out)


def _start_sum(x: torch.Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter that consists of an exchange and a local sum.

    Ranks on one machine do not copy their own block.
    """
    if (channel := local_channel(x, axis)) is None:
        # torch exchanges all blocks; block r of `out` arrives from rank r
        out = empty(x.shape, x)
        exchange: Any = dist.all_to_all_single(out, x, group=axis.group, async_op=True)
        return Pending([exchange], lambda: _sum_blocks(out.tensor_split(axis.size)))
    # from memory to memory, only the blocks of other ranks move
    blocks = list(x.tensor_split(axis.size))
    mine = blocks.pop(axis.rank)
    others = [rank for rank in axis.global_ranks if rank != axis.global_ranks[axis.rank]]
    buffer = empty((mine.shape[0] * len(others), *x.shape[1:]), x)
    arriving = list(buffer.tensor_split(len(others)))
    sends = list(zip(others, blocks, strict=True))
    receives = list(zip(others, arriving, strict=True))
    work = channel.start(sends, receives)
    # sum in rank order, with this rank's block at its place
    in_order = [*arriving[: axis.rank], mine, *arriving[axis.rank :]]
    return Pending([work], lambda: _sum_blocks(in_order))


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
    """Reduce contiguous `x[size * n]` into the caller's `out[n]`: this rank's block of the sum."""
    if axis.backend == "gloo":
        out.copy_(reduce_scatter(x, axis))
        return
    axis.traffic["reduce_scatter"] += x.nbytes // axis.size * (axis.size - 1)
    _reduce_scatter_single(out, x, group=axis.group)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce `[size * n, ...]` to `[n, ...]` and wait for the result."""
    return start_reduce_scatter(x, axis).wait()


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Return the elementwise reduction (`sum`, `max`, `min`) across the axis.

    The results of all ranks are bitwise identical.
    """
    if axis.size == 1:
        return x
    if axis.backend == "gloo":
        flat = x.reshape(-1)
        if op != "sum":
            stacked = all_gather(flat, axis).view(axis.size, -1)  # [size * n] -> [size, n]
            reduced = stacked.amax(0) if op == "max" else stacked.amin(0)
            return reduced.view(x.shape)
        # results are detached, because `fully_shard` warns about modules that return a view
        if flat.numel() <= _SMALL_REDUCE:
            blocks = all_gather(flat, axis).tensor_split(axis.size)
            return _sum_blocks(blocks).view(x.shape).detach()
        if x.dtype in _HALVES or local_channel(x, axis) is not None:
            # pad to equal blocks, reduce one block per rank, and gather the sums
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size))
            total = all_gather(reduce_scatter(padded, axis), axis)
            return total[: flat.numel()].view(x.shape).detach()
    # a ring all-reduce sends every element about twice
    axis.traffic["all_reduce"] += 2 * x.nbytes * (axis.size - 1) // axis.size
    # torch reduces in place, so reduce a copy
    x = x.contiguous().clone()
    dist.all_reduce(x, op=_REDUCE[op], group=axis.group)
    return x


def start_all_to_all(
    x: torch.Tensor,
    axis: Axis,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> Pending:
    """Start sending `in_splits[r]` rows to each rank r and receiving `out_splits[r]` rows from it.

    Rows are along dim 0. If the splits are None, they are even.
    """
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    even = [len(x) // axis.size] * axis.size
    sent = list(in_splits or even)
    arriving = list(out_splits or even)
    # bytes per row times the rows for other ranks
    axis.traffic["all_to_all"] += x.nbytes // max(len(x), 1) * (len(x) - sent[axis.rank])
    out = empty((sum(arriving), *x.shape[1:]), x)
    # ranks of one machine, even splits, or uneven splits
    if (channel := local_channel(x, axis)) is not None:
        work: Any = _among_neighbours(out.split(arriving), x.split(sent), axis, channel)
    elif in_splits is None:
        work = dist.all_to_all_single(out, x, group=axis.group, async_op=True)
    else:
        work = dist.all_to_all_single(out, x, arriving, sent, group=axis.group, async_op=True)
    return Pending([work], lambda: out)


def all_to_all(x: torch.Tensor, axis: Axis, *splits: Sequence[int] | None) -> torch.Tensor:
    """Exchange rows all-to-all and wait for the result; see `start_all_to_all`."""
    return start_all_to_all(x, axis, *splits).wait()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return the small picklable objects of all ranks, in axis order.

    The world axis uses its host group if it has one.
    """
    values: list[Any] = [value] * axis.size
    if axis.size > 1:
        group = axis.group
        if isinstance(axis, WorldAxis) and axis.host is not None:
            group = axis.host.group
        dist.all_gather_object(values, value, group=group)
    return values


def gather_to_first(value: Any, axis: Axis) -> list[Any] | None:
    """Return the picklable objects of all ranks, in axis order, on the first rank of the axis.

    Return None on other ranks.
    """
    # only the receiving rank passes a list
    values: list[Any] | None = [value] * axis.size if axis.rank == 0 else None
    if axis.size > 1:
        dist.gather_object(value, values, dst=axis.global_ranks[0], group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has arrived."""
    if axis.size > 1:
        # without a device, NCCL guesses one and logs a warning in every call
        devices = [torch.cuda.current_device()] if axis.backend == "nccl" else None
        dist.barrier(group=axis.group, device_ids=devices)


def await_all(host: HostGroup) -> None:
    """Wait until every rank has arrived, but stop waiting as soon as a rank is killed.

    Raise RuntimeError after `host.seconds`. On the first rank, the error includes a late rank.
    """
    dist.monitored_barrier(host.group, datetime.timedelta(seconds=host.seconds))


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Pending:
    """Start sending contiguous `x` to the rank at index `peer` of the axis."""
    assert peer != axis.rank, f"rank {axis.rank} of axis {axis.name} sends to itself"
    x = x.detach().contiguous()
    axis.traffic["send"] += x.nbytes
    target = axis.global_ranks[peer]
    # the closure keeps `sent` alive until the message has left
    sent = x.cpu() if through_host(x, axis) else x
    if (channel := local_channel(x, axis)) is not None:
        return Pending([channel.start([(target, sent)], [])], lambda: sent)
    return Pending([dist.isend(sent, dst=target, group=axis.group)], lambda: sent)


def irecv(buffer: torch.Tensor, axis: Axis, peer: int) -> Pending:
    """Start receiving into contiguous `buffer` from the rank at index `peer` of the axis.

    `wait` returns the buffer.
    """
    assert peer != axis.rank and buffer.is_contiguous()
    source = axis.global_ranks[peer]
    if (channel := local_channel(buffer, axis)) is not None:
        return Pending([channel.start([], [(source, buffer)])], lambda: buffer)
    # gloo receives on the host; `wait` then copies to the device
    arrived = torch.empty_like(buffer, device="cpu") if through_host(buffer, axis) else buffer
    work = dist.irecv(arrived, src=source, group=axis.group)
    return Pending([work], lambda: buffer if arrived is buffer else buffer.copy_(arrived))


def start_shift(x: torch.Tensor, axis: Axis, by: int = 1) -> Pending:
    """Start shifting contiguous `x` by `by` ranks around the axis, treated as a ring.

    The result is the tensor that arrives from the rank `by` places before this one.
    """
    x = x.contiguous()
    # the ranks at this distance after and before this rank
    after, before = (axis.global_ranks[(axis.rank + step) % axis.size] for step in (by, -by))
    axis.traffic["ring"] += x.nbytes
    if (channel := local_channel(x, axis)) is not None:
        received = empty(x.shape, x)
        return Pending([channel.start([(after, x)], [(before, received)])], lambda: received)
    # NCCL and gloo: post the send and the receive together
    sent = x.cpu() if through_host(x, axis) else x
    arrived = empty(sent.shape, sent)
    messages = [
        dist.P2POp(dist.isend, sent, after, axis.group),
        dist.P2POp(dist.irecv, arrived, before, axis.group),
    ]
    works = dist.batch_isend_irecv(messages)
    return Pending(works, lambda: arrived if sent is x else arrived.to(x.device))
