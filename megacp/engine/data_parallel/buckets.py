"""Gradient buckets: flat buffers of gradients and parameters, each reduced over its axis while
backward still runs.

A bucket's reduce-scatter starts as soon as its last gradient of the step is there. Buckets start
strictly in index order: ranks in which a parameter got no gradient launch the same collectives as
all others. Every reduction is a plain sum (the loss is already divided by the step's global
denominator). After `finish` each rank of the axis holds one slice of every summed bucket: exactly
what the sharded optimizer updates.

A gradient may be partial over further axes (`tp`, `embedding`): it is summed over them after the
reduce-scatter, on the slice, in one all-reduce per axis. A bucket never mixes parameters that are
treated differently. Whole gradients (ZeRO-1) are reduced once a step; sharded ones (ZeRO-2) once a
microbatch, and added to this rank's slice.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megacp.distributed.collectives import Pending, gather_into, start_reduce_scatter
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.parameter import ParameterSpec, spec_of
from megacp.engine.data_parallel.shards import ParameterShard, ParameterSlice, ShardedParameters

ALIGNMENT = 64
"""Every parameter and every rank's slice begins at a multiple of this many elements (128 bytes in
bf16).
"""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket: elements `[start, start + parameter.numel())`."""

    parameter: nn.Parameter
    spec: ParameterSpec
    start: int


@dataclass(frozen=True)
class BucketPlan:
    """Parameters of one model chunk that are reduced, decayed, counted and stepped alike, in
    backward order.
    """

    chunk: int
    slots: tuple[Slot, ...]
    elements: int
    """Length of the flat buffers: a multiple of the reduce axis's size times `ALIGNMENT`."""


def _aligned(elements: int, multiple: int = ALIGNMENT) -> int:
    return math.ceil(elements / multiple) * multiple


def plan_buckets(
    chunks: Sequence[nn.Module], ranks: Mapping[str, int], bucket_elements: int
) -> list[BucketPlan]:
    """Cut the parameters of the model chunks into buckets of at most `bucket_elements` (a larger
    parameter is alone).

    `ranks` says how many an axis of `ParameterSpec.reduced_over` has. Within a chunk parameters go
    in reverse construction order; the last chunk's buckets come first, because its last backward is
    the first to run. Buckets are ordered by their last parameter, the one that completes them.
    """
    groups: dict[tuple[int, tuple[object, ...]], list[list[Slot]]] = {}
    place: dict[nn.Parameter, int] = {}
    for chunk in reversed(range(len(chunks))):
        for parameter in reversed(list(chunks[chunk].parameters())):
            assert parameter not in place, (
                f"a parameter of shape {tuple(parameter.shape)} is in two model chunks"
            )
            place[parameter], spec = len(place), spec_of(parameter)
            like = (parameter.dtype, parameter.device, parameter.requires_grad)
            reduced = (spec.reduced_over, spec.partial_over, spec.counted)
            stepped = (spec.rule, spec.weight_decay, spec.lr_multiplier)
            buckets = groups.setdefault((chunk, (*like, *reduced, *stepped)), [[]])
            if buckets[-1] and _filled(buckets[-1]) + parameter.numel() > bucket_elements:
                buckets.append([])
            buckets[-1].append(Slot(parameter, spec, _filled(buckets[-1])))
    plans = [
        BucketPlan(
            chunk,
            tuple(slots),
            _aligned(_filled(slots), ALIGNMENT * ranks[slots[0].spec.reduced_over]),
        )
        for (chunk, _), buckets in groups.items()
        for slots in buckets
    ]
    return sorted(plans, key=lambda plan: place[plan.slots[-1].parameter])


def _filled(slots: Sequence[Slot]) -> int:
    return _aligned(slots[-1].start + slots[-1].parameter.numel()) if slots else 0


def slices_of(plan: BucketPlan, begin: int, values: torch.Tensor) -> list[ParameterSlice]:
    """What elements `[begin, begin + len(values))` of a bucket hold, parameter by parameter;
    padding is left out.
    """
    slices = []
    end = begin + values.numel()
    for slot in plan.slots:
        low = max(begin, slot.start)
        high = min(end, slot.start + slot.parameter.numel())
        if low < high:
            part = values[low - begin : high - begin]
            slices.append(
                ParameterSlice(slot.spec, tuple(slot.parameter.shape), low - slot.start, part)
            )
    return slices


class Bucket:
    """The flat buffers of one `BucketPlan`; parameters of the model are views of the first."""

    def __init__(self, plan: BucketPlan, axes: Mapping[str, Axis]) -> None:
        first = plan.slots[0].parameter
        self.plan, self.trained = plan, first.requires_grad
        self.axis = axis = axes[plan.slots[0].spec.reduced_over]
        self.parameters = torch.zeros(plan.elements, dtype=first.dtype, device=first.device)
        """`[elements]` in the model dtype, replicated over the axis."""
        self.shard_elements = plan.elements // axis.size
        self.shard_start = axis.rank * self.shard_elements
        for slot in plan.slots:
            view = self._view(self.parameters, slot)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
        held = partial(slices_of, plan, self.shard_start)
        self.shard = ParameterShard(self.parameter_shard, first.dtype, plan.slots[0].spec, held)
        self._gradients: torch.Tensor | None = None

    @staticmethod
    def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        return flat[slot.start : slot.start + slot.parameter.numel()].view(slot.parameter.shape)

    @property
    def parameter_shard(self) -> torch.Tensor:
        """This rank's slice `[elements / axis.size]` of `parameters`, a view."""
        return self.parameters[self.shard_start : self.shard_start + self.shard_elements]

    @property
    def gradients(self) -> torch.Tensor:
        """`[elements]`, wide, partial over the axis until reduced; zero when first asked for."""
        if self._gradients is None:
            self._gradients = self.parameters.new_zeros(self.plan.elements, dtype=self.shard.wide)
        return self._gradients

    def gradient_of(self, slot: Slot) -> torch.Tensor:
        """The view of `gradients` that is shaped like a parameter."""
        return self._view(self.gradients, slot)

    def take_gradients(self) -> torch.Tensor:
        """`gradients`, which this bucket then no longer holds."""
        taken, self._gradients = self.gradients, None
        return taken


class FlatBuckets(ShardedParameters):
    """Gradients of the local model chunks, accumulated and reduced in buckets, each over its own
    axis.

    Build it once the weights are on their device. With `each_microbatch` gradients are reduced
    after every backward and kept as slices. With `parts`, modules that together run all of the
    chunks, a part waits for updated parameters of only its own buckets, right before its forward:
    the first layers compute while later ones are on their way.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        reduce_axes: Mapping[str, Axis],
        partial_axes: Mapping[str, Axis],
        bucket_elements: int,
        *,
        each_microbatch: bool = False,
        instances: int = 1,
        parts: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(reduce_axes, partial_axes, instances)
        plans = plan_buckets(
            chunks, {name: axis.size for name, axis in self.axes.items()}, bucket_elements
        )
        self._all = [Bucket(plan, self.axes) for plan in plans]
        self.buckets = [bucket for bucket in self._all if bucket.trained]
        """Buckets with gradients; only what reads and writes checkpoints meets frozen ones."""
        self.shards = [bucket.shard for bucket in self.buckets]
        self._each_microbatch, self._ahead = each_microbatch, len(parts) > 0
        self._under_way: dict[int, Pending] = {}  # gathers of updated parameters, by bucket
        self._wait_before(parts)
        for index, bucket in enumerate(self.buckets):
            for number, slot in enumerate(bucket.plan.slots):
                parameter, hook = slot.parameter, self._hook(index, number)
                parameter.register_post_accumulate_grad_hook(hook)
                if (
                    slot.spec.fused_gradient
                ):  # Megatron's names: Transformer Engine's linears know the first two
                    assert not each_microbatch, "fused gradients need buckets that last"
                    parameter.main_grad = bucket.gradient_of(slot)  # type: ignore[attr-defined]  # ours, on a tensor of torch
                    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # likewise
                    parameter.gradient_added = hook  # type: ignore[attr-defined]  # likewise
        self._reset()

    def _reset(self) -> None:
        self._final: set[int] = set()
        """Buckets whose gradients of this backward are to be reduced."""
        self._arrived: list[set[nn.Parameter]] = [set() for _ in self.buckets]
        self._to_launch: deque[int] = deque(
            () if self._each_microbatch else range(len(self.buckets))
        )
        """Buckets not yet reduced, in the order that all ranks keep."""
        self._pending: deque[tuple[int, Pending]] = deque()
        self._added: dict[int, torch.Tensor] = {}  # this rank's slices of sums, by bucket

    def _wait_before(self, parts: Sequence[nn.Module]) -> None:
        """Let each part wait for its buckets before it runs; a parameter in several parts is the
        first one's.
        """
        holding = {
            slot.parameter: i for i, bucket in enumerate(self.buckets) for slot in bucket.plan.slots
        }
        for part in parts:
            found = (holding.pop(parameter, None) for parameter in part.parameters())
            own = sorted({index for index in found if index is not None})
            part.register_forward_pre_hook(lambda module, inputs, own=own: self._arrive(own))

    def _arrive(self, buckets: Iterable[int]) -> None:
        """Wait for updated parameters; those that have come cost nothing."""
        for index in buckets:
            if (gather := self._under_way.pop(index, None)) is not None:
                gather.wait()

    def _hook(self, index: int, number: int) -> Callable[[torch.Tensor], None]:
        """Gradient hook of the parameter in slot `number` of bucket `index`."""
        owner = weakref.ref(
            self
        )  # autograd keeps hooks where the collector does not look: a cycle would stay for ever

        def accumulate(parameter: torch.Tensor) -> None:
            me = owner()
            assert me is not None, "the buckets of this parameter are gone"
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            if parameter.grad is None and not fused:
                # autograd calls hooks also where a layer that has said so already gave it nothing
                return
            assert index in me._to_launch, (
                f"a gradient of shape {tuple(parameter.shape)} arrived after bucket {index} had "
                "been reduced: "
                "start_backward must come right before each backward of the chunk, zero before the next step"
            )
            bucket = me.buckets[index]
            if fused:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # a `grad` is only a sign
            else:
                bucket.gradient_of(bucket.plan.slots[number]).add_(parameter.grad)  # type: ignore[arg-type]  # there is one
            parameter.grad = None
            if index in me._final:
                me._arrived[index].add(parameter)  # type: ignore[arg-type]  # torch hands the hook a tensor
                me._launch_complete()

        return accumulate

    def _launch_complete(self) -> None:
        while self._to_launch:
            index = self._to_launch[0]
            if len(self._arrived[index]) < len(self.buckets[index].plan.slots):
                return
            self._launch()

    def _launch(self) -> None:
        index = self._to_launch.popleft()
        bucket = self.buckets[index]
        if self._each_microbatch:
            self._collect(1)  # this bucket's buffer and one more are all that exists
        gradients = bucket.take_gradients() if self._each_microbatch else bucket.gradients
        pending = start_reduce_scatter(gradients, bucket.axis, in_place=not self._each_microbatch)
        self._pending.append((index, pending))

    def _collect(self, left: int) -> None:
        """Wait for reductions until only `left` are under way; their sums are added to this rank's
        slices.
        """
        while len(self._pending) > left:
            index, pending = self._pending.popleft()
            total, found = self._added.get(index), pending.take()
            self._added[index] = found if total is None else total.add_(found)

    def release(self) -> None:
        """Parameters stay whole; those under way arrive."""
        self._arrive(list(self._under_way))

    def start_backward(self, chunk: int, last: bool) -> None:
        """Reduce gradients of this chunk from now on: complete buckets at once."""
        if not (last or self._each_microbatch):
            return
        of_chunk = [
            index for index, bucket in enumerate(self.buckets) if bucket.plan.chunk == chunk
        ]
        self._final.update(of_chunk)
        if self._each_microbatch:
            for index in of_chunk:
                self._arrived[index].clear()
            self._to_launch.extend(of_chunk)

    def end_backward(self, chunk: int) -> None:
        """Reduce what the chunk's parameters without a gradient have held back, where that is
        due.
        """
        while self._each_microbatch and self._to_launch:
            self._launch()

    def _summed(self) -> list[torch.Tensor]:
        while self._to_launch:
            self._launch()
        self._collect(0)
        added, self._added = self._added, {}
        return [
            added[i] if i in added else torch.zeros_like(s.values, dtype=s.wide)
            for i, s in enumerate(self.shards)
        ]

    def zero(self) -> None:
        super().zero()
        for bucket in () if self._each_microbatch else self.buckets:
            bucket.gradients.zero_()
        self._reset()

    def publish(self) -> None:
        """Send every rank's updated slice to all ranks of its axis, where they belong."""
        for index in reversed(range(len(self.buckets))):  # the order of the forward
            bucket = self.buckets[index]
            if bucket.axis.size > 1:
                self._under_way[index] = gather_into(
                    bucket.parameters, bucket.parameter_shard, bucket.axis
                )
        if not self._ahead:
            self.release()

    def parameter_slices(self) -> list[ParameterSlice]:
        return [
            part for bucket in self._all for part in bucket.shard.slices_of(bucket.parameter_shard)
        ]

    def parameters_held(self) -> list[ParameterSlice]:
        """All local parameters, whole, frozen ones included."""
        self.release()
        return [
            part for bucket in self._all for part in slices_of(bucket.plan, 0, bucket.parameters)
        ]

    def clear(self) -> None:
        self.release()
        for bucket in self._all:
            bucket.parameters.zero_()
