"""Collectives and messages over one `Axis`, blocking and asynchronous; the one place that handles
an axis of size 1.

On gloo, a reduce-scatter or small all-reduce is an all-to-all followed by a local sum in rank
order: the same bits on every run, bf16 summed in fp32. CPU ranks of one machine exchange and gather
from memory to memory (`same_host.py`). Collectives work on dim 0 and make their input contiguous
(gloo reduces strided views silently wrong).

The ring posts a send and a receive together, because two NCCL ranks that both send first wait for
each other for ever. gloo moves CUDA tensors in collectives but not from rank to rank: such a
message goes through the host.
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

# torch 2.13 renames these two; older releases know only the second name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HALVES = (torch.bfloat16, torch.float16)
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SMALL_REDUCE = 16_384
"""Elements up to which a gloo all-reduce is bound by latency: one round of messages beats its
rings.
"""


class Pending:
    """What is under way; `wait` returns its result and may be called again, while gloo hangs on a
    second wait.
    """

    def __init__(self, works: list[Any], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the result is ready and return it."""
        if self._result is None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._works = []
            self._finish = None  # type: ignore[assignment]  # drops the buffers it holds
        return self._result

    def take(self) -> Any:
        """The result, which is then no longer held here; once only."""
        result, self._result = self.wait(), None
        return result


def through_host(x: torch.Tensor, axis: Axis) -> bool:
    """Whether a message of this tensor must be copied to the host: gloo cannot send from a
    device.
    """
    return axis.backend == "gloo" and x.device.type != "cpu"


def local_channel(x: torch.Tensor, axis: Axis) -> LocalChannel | None:
    """Where messages of this tensor go from memory to memory; None where torch sends them."""
    return None if through_host(x, axis) else axis.local


def _among_neighbours(
    out: Sequence[torch.Tensor], x: Sequence[torch.Tensor], axis: Axis, channel: LocalChannel
) -> Operation:
    """Send `x[r]` to each rank r of the axis while `out[r]` arrives from it; the own block is
    copied.
    """
    if out[axis.rank].data_ptr() != x[axis.rank].data_ptr():
        out[axis.rank].copy_(x[axis.rank])
    others = [(i, rank) for i, rank in enumerate(axis.global_ranks) if i != axis.rank]
    return channel.start(
        [(rank, x[i]) for i, rank in others], [(rank, out[i]) for i, rank in others]
    )


def _sum_blocks(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of at least two blocks in rank order, halves accumulated in fp32."""
    first, second, *others = (block.detach() for block in blocks)
    halves = first.dtype in _HALVES
    total = (
        first.float() + second.float()
        if halves
        else torch.add(first, second, out=empty(first.shape, first))
    )
    for block in others:
        total += block
    return total.to(first.dtype)


def start_all_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """`[n, ...] -> [size * n, ...]`, blocks in axis order."""
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    return gather_into(empty((x.shape[0] * axis.size, *x.shape[1:]), x), x, axis)


def gather_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Pending:
    """`start_all_gather` of contiguous `x[n]` into `out[size * n]` of the caller; `x` may be its
    own block of it.
    """
    axis.traffic["all_gather"] += x.nbytes * (axis.size - 1)
    if (channel := local_channel(x, axis)) is not None:
        return Pending(
            [_among_neighbours(out.tensor_split(axis.size), [x] * axis.size, axis, channel)],
            lambda: out,
        )
    return Pending([_all_gather_single(out, x, group=axis.group, async_op=True)], lambda: out)


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Blocking `start_all_gather`."""
    return start_all_gather(x, axis).wait()


def start_reduce_scatter(x: torch.Tensor, axis: Axis, *, in_place: bool = False) -> Pending:
    """`[size * n, ...] -> [n, ...]`: this rank's block of the sum over the axis.

    `in_place`: the sum may stand in this rank's block of contiguous `x`, of which the rest then
    means nothing (NCCL's in-place form); gloo gives it memory of its own all the same.
    """
    assert x.shape[0] % axis.size == 0, f"reduce-scatter of {tuple(x.shape)} over {axis.size} ranks"
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["reduce_scatter"] += x.nbytes // axis.size * (axis.size - 1)
    if axis.backend == "gloo":
        return _start_sum(x, axis)
    own = x.tensor_split(axis.size)[axis.rank]
    out = own if in_place else torch.empty_like(own)
    return Pending([_reduce_scatter_single(out, x, group=axis.group, async_op=True)], lambda: out)


def _start_sum(x: torch.Tensor, axis: Axis) -> Pending:
    """`start_reduce_scatter` as an exchange and a local sum; neighbours leave the own block where
    it is.
    """
    if (channel := local_channel(x, axis)) is None:
        out = empty(x.shape, x)
        exchange: Any = dist.all_to_all_single(out, x, group=axis.group, async_op=True)
        return Pending([exchange], lambda: _sum_blocks(out.tensor_split(axis.size)))
    blocks = list(x.tensor_split(axis.size))
    mine = blocks.pop(axis.rank)
    others = [rank for rank in axis.global_ranks if rank != axis.global_ranks[axis.rank]]
    arriving = list(empty((mine.shape[0] * len(others), *x.shape[1:]), x).tensor_split(len(others)))
    work = channel.start(
        list(zip(others, blocks, strict=True)), list(zip(others, arriving, strict=True))
    )
    return Pending(
        [work], lambda: _sum_blocks([*arriving[: axis.rank], mine, *arriving[axis.rank :]])
    )


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
    """Blocking `start_reduce_scatter` into memory of the caller, `out[n]` from contiguous `x[size *
    n]`.
    """
    if axis.backend == "gloo":
        out.copy_(reduce_scatter(x, axis))
        return
    axis.traffic["reduce_scatter"] += x.nbytes // axis.size * (axis.size - 1)
    _reduce_scatter_single(out, x, group=axis.group)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Blocking `start_reduce_scatter`."""
    return start_reduce_scatter(x, axis).wait()


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Elementwise reduction (`sum`, `max`, `min`) over the axis; identical bits on all ranks.
    Returns a tensor.
    """
    if axis.size == 1:
        return x
    if axis.backend == "gloo":
        flat = x.reshape(-1)
        if op != "sum":
            stacked = all_gather(flat, axis).view(axis.size, -1)  # [size * n] -> [size, n]
            return (stacked.amax(0) if op == "max" else stacked.amin(0)).view(x.shape)
        if flat.numel() <= _SMALL_REDUCE:
            return (
                _sum_blocks(all_gather(flat, axis).tensor_split(axis.size)).view(x.shape).detach()
            )
        if x.dtype in _HALVES or local_channel(x, axis) is not None:
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size))
            # `fully_shard` warns of a module that returns a view: detached, it is none
            return (
                all_gather(reduce_scatter(padded, axis), axis)[: flat.numel()]
                .view(x.shape)
                .detach()
            )
    axis.traffic["all_reduce"] += 2 * x.nbytes * (axis.size - 1) // axis.size
    x = x.contiguous().clone()
    dist.all_reduce(x, op=_REDUCE[op], group=axis.group)
    return x


def start_all_to_all(
    x: torch.Tensor,
    axis: Axis,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> Pending:
    """Send `in_splits[r]` rows of dim 0 to rank r, receive `out_splits[r]` rows from it; even
    splits when None.
    """
    x = x.contiguous()
    if axis.size == 1:
        return Pending([], lambda: x)
    even = [len(x) // axis.size] * axis.size
    sent, arriving = list(in_splits or even), list(out_splits or even)
    axis.traffic["all_to_all"] += x.nbytes // max(len(x), 1) * (len(x) - sent[axis.rank])
    out = empty((sum(arriving), *x.shape[1:]), x)
    if (channel := local_channel(x, axis)) is not None:
        work: Any = _among_neighbours(out.split(arriving), x.split(sent), axis, channel)
    elif in_splits is None:
        work = dist.all_to_all_single(out, x, group=axis.group, async_op=True)
    else:
        work = dist.all_to_all_single(out, x, arriving, sent, group=axis.group, async_op=True)
    return Pending([work], lambda: out)


def all_to_all(x: torch.Tensor, axis: Axis, *splits: Sequence[int] | None) -> torch.Tensor:
    """Blocking `start_all_to_all`."""
    return start_all_to_all(x, axis, *splits).wait()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return the small picklable objects of all ranks, in axis order; the world uses its host
    group, if it has one.
    """
    values: list[Any] = [value] * axis.size
    if axis.size > 1:
        group = axis.group
        if isinstance(axis, WorldAxis) and axis.host is not None:
            group = axis.host.group
        dist.all_gather_object(values, value, group=group)
    return values


def gather_to_first(value: Any, axis: Axis) -> list[Any] | None:
    """Picklable objects of all ranks, in axis order, on the first rank of the axis; None on the
    others.
    """
    values: list[Any] | None = [value] * axis.size if axis.rank == 0 else None
    if axis.size > 1:
        dist.gather_object(value, values, dst=axis.global_ranks[0], group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Return once every rank of the axis has arrived."""
    if axis.size > 1:
        # without its device NCCL guesses one, and warns at every call
        devices = [torch.cuda.current_device()] if axis.backend == "nccl" else None
        dist.barrier(group=axis.group, device_ids=devices)


def await_all(host: HostGroup) -> None:
    """Return once every rank has arrived; a killed rank ends the wait at once.

    Raises RuntimeError after `host.seconds`. On the first rank it names a late rank.
    """
    dist.monitored_barrier(host.group, datetime.timedelta(seconds=host.seconds))


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Pending:
    """Start sending contiguous `x` to the rank at index `peer` of the axis. A rank cannot send to
    itself.
    """
    assert peer != axis.rank, f"rank {axis.rank} of axis {axis.name} sends to itself"
    x = x.detach().contiguous()
    axis.traffic["send"] += x.nbytes
    sent = x.cpu() if through_host(x, axis) else x
    if (channel := local_channel(x, axis)) is not None:
        return Pending([channel.start([(axis.global_ranks[peer], sent)], [])], lambda: sent)
    return Pending([dist.isend(sent, dst=axis.global_ranks[peer], group=axis.group)], lambda: sent)


def irecv(buffer: torch.Tensor, axis: Axis, peer: int) -> Pending:
    """Start receiving into contiguous `buffer` from the rank at index `peer`; `wait` returns the
    buffer.
    """
    assert peer != axis.rank and buffer.is_contiguous()
    if (channel := local_channel(buffer, axis)) is not None:
        return Pending([channel.start([], [(axis.global_ranks[peer], buffer)])], lambda: buffer)
    arrived = torch.empty_like(buffer, device="cpu") if through_host(buffer, axis) else buffer
    work = dist.irecv(arrived, src=axis.global_ranks[peer], group=axis.group)
    return Pending([work], lambda: buffer if arrived is buffer else buffer.copy_(arrived))


def start_shift(x: torch.Tensor, axis: Axis, by: int = 1) -> Pending:
    """Start passing contiguous `x` on by so many ranks of the axis (as a ring) while another rank's
    arrives.
    """
    x = x.contiguous()
    after, before = (axis.global_ranks[(axis.rank + step) % axis.size] for step in (by, -by))
    axis.traffic["ring"] += x.nbytes
    if (channel := local_channel(x, axis)) is not None:
        received = empty(x.shape, x)
        return Pending([channel.start([(after, x)], [(before, received)])], lambda: received)
    sent = x.cpu() if through_host(x, axis) else x
    arrived = empty(sent.shape, sent)
    messages = [
        dist.P2POp(dist.isend, sent, after, axis.group),
        dist.P2POp(dist.irecv, arrived, before, axis.group),
    ]
    return Pending(
        dist.batch_isend_irecv(messages), lambda: arrived if sent is x else arrived.to(x.device)
    )
