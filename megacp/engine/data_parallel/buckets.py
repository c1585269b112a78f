"""Gradient buckets: flat buffers of gradients and parameters, reduced during the backward pass.

A bucket's reduce-scatter starts when its last gradient of the step arrives. Buckets start strictly
in index order, so a rank on which a parameter got no gradient launches the same collectives as
other ranks. Every reduction is a plain sum, because the loss is already divided by the step's
global denominator. After `finish`, each rank of the axis has one slice of every summed bucket. The
sharded optimizer updates the parameters of this slice.

Some gradients must also be summed over other axes (`tp`, `embedding`). After the reduce-scatter,
their slices are summed with one all-reduce per axis. All parameters of a bucket are summed over the
same axes. Whole gradients (ZeRO-1) are reduced once per step. Sharded gradients (ZeRO-2) are
reduced once per microbatch and added to this rank's slice.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megacp.distributed.collectives import Pending, gather_into, start_reduce_scatter
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.parameter import ParameterSpec, spec_of
from megacp.engine.data_parallel.shards import ParameterShard, ParameterSlice, ShardedParameters

ALIGNMENT = 64
"""Alignment, in elements, of every parameter and every rank's slice: 128 bytes in bf16."""


@dataclass(frozen=True)
class Slot:
    """Position of a parameter in its bucket: elements `[start, start + parameter.numel())`."""

    parameter: nn.Parameter
    spec: ParameterSpec
    start: int


@dataclass(frozen=True)
class BucketPlan:
    """Parameters of a model chunk, in the order of the backward pass, that form one bucket.

    They are reduced over the same axes and updated with the same rule and settings.
    """

    chunk: int
    slots: tuple[Slot, ...]
    elements: int
    """Length of the flat buffers: a multiple of `ALIGNMENT` times the size of the reduce axis."""


def _aligned(elements: int, multiple: int = ALIGNMENT) -> int:
    return math.ceil(elements / multiple) * multiple


def plan_buckets(
    chunks: Sequence[nn.Module], ranks: Mapping[str, int], bucket_elements: int
) -> list[BucketPlan]:
    """Partition the parameters of all model chunks into buckets, and return the buckets' plans.

    A bucket has at most `bucket_elements` elements; a larger parameter gets its own bucket. `ranks`
    maps each `ParameterSpec.reduced_over` to the size of its axis. Within a chunk, parameters are
    in reverse construction order. The last chunk's buckets come first, because its last backward
    pass runs first. Buckets are ordered by their last parameter, which completes them.
    """
    groups: dict[tuple[int, tuple[object, ...]], list[list[Slot]]] = {}
    place: dict[nn.Parameter, int] = {}
    for chunk in reversed(range(len(chunks))):
        for parameter in reversed(list(chunks[chunk].parameters())):
            assert parameter not in place, (
                f"a parameter of shape {tuple(parameter.shape)} belongs to two model chunks"
            )
            place[parameter] = len(place)
            spec = spec_of(parameter)
            # everything that parameters of the same bucket must have in common
            like = (parameter.dtype, parameter.device, parameter.requires_grad)
            reduced = (spec.reduced_over, spec.partial_over, spec.counted)
            stepped = (spec.rule, spec.weight_decay, spec.lr_multiplier)
            buckets = groups.setdefault((chunk, (*like, *reduced, *stepped)), [[]])
            # start a new bucket if this parameter does not fit into the last one
            if buckets[-1] and _filled(buckets[-1]) + parameter.numel() > bucket_elements:
                buckets.append([])
            buckets[-1].append(Slot(parameter, spec, _filled(buckets[-1])))
    plans = []
    for (chunk, _), buckets in groups.items():
        for slots in buckets:
            # all ranks of the axis get aligned slices of equal length
            multiple = ALIGNMENT * ranks[slots[0].spec.reduced_over]
            plans.append(BucketPlan(chunk, tuple(slots), _aligned(_filled(slots), multiple)))
    return sorted(plans, key=lambda plan: place[plan.slots[-1].parameter])


def _filled(slots: Sequence[Slot]) -> int:
    """Return the number of elements that `slots` occupy, including alignment."""
    if not slots:
        return 0
    return _aligned(slots[-1].start + slots[-1].parameter.numel())


def slices_of(plan: BucketPlan, begin: int, values: torch.Tensor) -> list[ParameterSlice]:
    """Return the parameter slices in elements `[begin, begin + len(values))` of a bucket.

    Padding is not included.
    """
    slices = []
    end = begin + values.numel()
    for slot in plan.slots:
        # intersect the slot with the range
        low = max(begin, slot.start)
        high = min(end, slot.start + slot.parameter.numel())
        if low < high:
            part = values[low - begin : high - begin]
            shape = tuple(slot.parameter.shape)
            slices.append(ParameterSlice(slot.spec, shape, low - slot.start, part))
    return slices


class Bucket:
    """The flat buffers of one `BucketPlan`. Model parameters are views of the parameter buffer."""

    def __init__(self, plan: BucketPlan, axes: Mapping[str, Axis]) -> None:
        first = plan.slots[0].parameter
        self.plan = plan
        self.trained = first.requires_grad
        axis = axes[plan.slots[0].spec.reduced_over]
        self.axis = axis
        self.parameters = torch.zeros(plan.elements, dtype=first.dtype, device=first.device)
        """Parameters `[elements]` in the model's dtype, replicated over the axis."""
        self.shard_elements = plan.elements // axis.size
        self.shard_start = axis.rank * self.shard_elements
        # move the parameters into the flat buffer
        for slot in plan.slots:
            view = self._view(self.parameters, slot)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
        # the optimizer updates only this rank's slice
        held = partial(slices_of, plan, self.shard_start)
        self.shard = ParameterShard(self.parameter_shard, first.dtype, plan.slots[0].spec, held)
        self._gradients: torch.Tensor | None = None

    @staticmethod
    def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        end = slot.start + slot.parameter.numel()
        return flat[slot.start : end].view(slot.parameter.shape)

    @property
    def parameter_shard(self) -> torch.Tensor:
        """View of this rank's slice of `parameters`: `[elements / axis.size]`."""
        end = self.shard_start + self.shard_elements
        return self.parameters[self.shard_start : end]

    @property
    def gradients(self) -> torch.Tensor:
        """Gradients `[elements]` in the wide dtype, not yet summed over the axis.

        The first access allocates a buffer of zeros.
        """
        if self._gradients is None:
            self._gradients = self.parameters.new_zeros(self.plan.elements, dtype=self.shard.wide)
        return self._gradients

    def gradient_of(self, slot: Slot) -> torch.Tensor:
        """Return the gradient of the parameter in `slot`, as a view with the parameter's shape."""
        return self._view(self.gradients, slot)

    def take_gradients(self) -> torch.Tensor:
        """Return `gradients` and drop this bucket's reference to the buffer."""
        taken = self.gradients
        self._gradients = None
        return taken


class FlatBuckets(ShardedParameters):
    """Gradients of the local model chunks, accumulated and reduced in buckets.

    Construct this object after the weights have been moved to their device. With `each_microbatch`,
    gradients are reduced after every backward pass and kept as slices. `parts` are modules that
    together run all chunks. If they are given, each part waits only for the updated parameters of
    its own buckets, right before its forward pass, so the first layers compute while later
    parameters are still being gathered.
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
        ranks = {name: axis.size for name, axis in self.axes.items()}
        plans = plan_buckets(chunks, ranks, bucket_elements)
        self._all = [Bucket(plan, self.axes) for plan in plans]
        self.buckets = [bucket for bucket in self._all if bucket.trained]
        """Buckets with gradients. Frozen buckets are only used for checkpoints."""
        self.shards = [bucket.shard for bucket in self.buckets]
        self._each_microbatch = each_microbatch
        self._ahead = len(parts) > 0
        self._under_way: dict[int, Pending] = {}  # gathers of updated parameters, by bucket
        self._wait_before(parts)
        for index, bucket in enumerate(self.buckets):
            for number, slot in enumerate(bucket.plan.slots):
                parameter: Any = slot.parameter  # Any: torch does not declare the attributes below
                hook = self._hook(index, number)
                parameter.register_post_accumulate_grad_hook(hook)
                # Megatron's names; Transformer Engine's linear layers use the first two
                if slot.spec.fused_gradient:
                    assert not each_microbatch, (
                        "fused gradients need gradient buckets that exist during the whole step"
                    )
                    parameter.main_grad = bucket.gradient_of(slot)
                    parameter.grad_added_to_main_grad = False
                    parameter.gradient_added = hook
        self._reset()

    def _reset(self) -> None:
        self._final: set[int] = set()
        """Buckets to reduce as soon as they are complete."""
        self._arrived: list[set[nn.Parameter]] = [set() for _ in self.buckets]
        self._to_launch: deque[int] = deque()
        """Buckets still to be reduced, in the same order on all ranks."""
        if not self._each_microbatch:
            self._to_launch.extend(range(len(self.buckets)))
        self._pending: deque[tuple[int, Pending]] = deque()
        self._added: dict[int, torch.Tensor] = {}  # this rank's slices of sums, by bucket

    def _wait_before(self, parts: Sequence[nn.Module]) -> None:
        """Make each part wait for its buckets before its forward pass.

        If several parts share a parameter, the first of them waits for it.
        """
        holding: dict[nn.Parameter, int] = {}
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.plan.slots:
                holding[slot.parameter] = index
        # parts run in this order, and the first part that uses a parameter waits for it
        for part in parts:
            found = [holding.pop(parameter, None) for parameter in part.parameters()]
            own = sorted({index for index in found if index is not None})
            part.register_forward_pre_hook(lambda module, inputs, own=own: self._arrive(own))

    def _arrive(self, buckets: Iterable[int]) -> None:
        """Wait for the updated parameters of these buckets, unless they have already arrived."""
        for index in buckets:
            gather = self._under_way.pop(index, None)
            if gather is not None:
                gather.wait()

    def _hook(self, index: int, number: int) -> Callable[[torch.Tensor], None]:
        """Return the gradient hook for the parameter in slot `number` of bucket `index`."""
        # The garbage collector cannot see hooks that autograd stores, so a reference cycle through
        # a hook would never be freed.
        owner = weakref.ref(self)

        def accumulate(parameter: torch.Tensor) -> None:
            me = owner()
            assert me is not None, "the buckets of this parameter have been deleted"
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            if parameter.grad is None and not fused:
                # the layer has already reported a fused gradient; this second call is autograd's
                return
            assert index in me._to_launch, (
                f"a gradient of shape {tuple(parameter.shape)} arrived after bucket {index} was "
                "reduced: call start_backward right before each backward pass of the chunk, and "
                "zero before the next step"
            )
            bucket = me.buckets[index]
            if fused:  # if `grad` exists, it is only a placeholder
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            else:
                assert parameter.grad is not None
                bucket.gradient_of(bucket.plan.slots[number]).add_(parameter.grad)
            parameter.grad = None
            # before the step's last backward pass, gradients only accumulate
            if index in me._final:
                # torch annotates hooks with Tensor, but passes the parameter
                me._arrived[index].add(parameter)  # type: ignore[arg-type]
                me._launch_complete()

        return accumulate

    def _launch_complete(self) -> None:
        """Start to reduce complete buckets in order, up to the first incomplete one."""
        while self._to_launch:
            index = self._to_launch[0]
            if len(self._arrived[index]) < len(self.buckets[index].plan.slots):
                return
            self._launch()

    def _launch(self) -> None:
        index = self._to_launch.popleft()
        bucket = self.buckets[index]
        if self._each_microbatch:
            self._collect(1)  # only this buffer and one more exist at the same time
            gradients = bucket.take_gradients()
        else:
            gradients = bucket.gradients
        pending = start_reduce_scatter(gradients, bucket.axis, in_place=not self._each_microbatch)
        self._pending.append((index, pending))

    def _collect(self, left: int) -> None:
        """Wait until at most `left` reductions are pending, and add the completed sums."""
        while len(self._pending) > left:
            index, pending = self._pending.popleft()
            total = self._added.get(index)
            found = pending.take()
            self._added[index] = found if total is None else total.add_(found)

    def release(self) -> None:
        """Wait for pending gathers. Parameters are replicated, so there is nothing to free."""
        self._arrive(list(self._under_way))

    def start_backward(self, chunk: int, last: bool) -> None:
        """Prepare for a backward pass whose gradients complete buckets of this chunk.

        From now on, each bucket is reduced as soon as it is complete.
        """
        if not (last or self._each_microbatch):
            return
        of_chunk = [
            index for index, bucket in enumerate(self.buckets) if bucket.plan.chunk == chunk
        ]
        self._final.update(of_chunk)
        # with one reduction per microbatch, the buckets must be reduced again
        if self._each_microbatch:
            for index in of_chunk:
                self._arrived[index].clear()
            self._to_launch.extend(of_chunk)

    def end_backward(self, chunk: int) -> None:
        """If gradients are reduced per microbatch, reduce the remaining (incomplete) buckets.

        A bucket is incomplete if one of its parameters got no gradient.
        """
        while self._each_microbatch and self._to_launch:
            self._launch()

    def _summed(self) -> list[torch.Tensor]:
        # reduce buckets that remain incomplete because some parameters got no gradient
        while self._to_launch:
            self._launch()
        self._collect(0)
        added = self._added
        self._added = {}
        sums = []
        for index, shard in enumerate(self.shards):
            if index in added:
                sums.append(added[index])
            else:  # no backward pass has produced a gradient for this bucket
                sums.append(torch.zeros_like(shard.values, dtype=shard.wide))
        return sums

    def zero(self) -> None:
        super().zero()
        if not self._each_microbatch:  # otherwise the buffers no longer exist
            for bucket in self.buckets:
                bucket.gradients.zero_()
        self._reset()

    def publish(self) -> None:
        """Gather the updated slices of all ranks into every rank's flat parameters."""
        for index in reversed(range(len(self.buckets))):  # in the order of the forward pass
            bucket = self.buckets[index]
            if bucket.axis.size > 1:
                gather = gather_into(bucket.parameters, bucket.parameter_shard, bucket.axis)
                self._under_way[index] = gather
        if not self._ahead:  # no part waits before its forward pass, so wait now
            self.release()

    def parameter_slices(self) -> list[ParameterSlice]:
        slices = []
        for bucket in self._all:
            slices += bucket.shard.slices_of(bucket.parameter_shard)
        return slices

    def parameters_held(self) -> list[ParameterSlice]:
        """Return all unsharded local parameters, including frozen ones."""
        self.release()
        slices = []
        for bucket in self._all:
            slices += slices_of(bucket.plan, 0, bucket.parameters)
        return slices

    def clear(self) -> None:
        self.release()
        for bucket in self._all:
            bucket.parameters.zero_()
