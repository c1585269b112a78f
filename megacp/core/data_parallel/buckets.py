"""Gradient buckets: flat buffers of gradients and parameters, reduced over dp x cp while backward still runs.

A bucket's reduce-scatter starts as soon as its last gradient of the step is there. Buckets start strictly in index
order: ranks in which a parameter got no gradient launch the same collectives as all others. Every reduction is a plain
sum (the loss is already divided by the step's global denominator). After `finish` each rank of dp x cp holds one slice
of every summed bucket: exactly what the sharded optimizer updates.

A gradient may be partial over further axes (`tp`, `embedding`): it is summed over them after the reduce-scatter, on the
slice, in one all-reduce per axis. Whole gradients (ZeRO-1) are reduced once a step; sharded ones (ZeRO-2) once a
microbatch, and added to this rank's slice.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from megacp.core.data_parallel.layout import BucketPlan, ParameterSlice, Slot, plan_buckets, slices_of
from megacp.core.data_parallel.shards import ParameterShard, ShardedParameters
from megacp.core.distributed.collectives import Pending, gather_into, start_reduce_scatter
from megacp.core.distributed.grid import Axis


class FlatParameters:
    """The flat buffer of one `BucketPlan`; parameters of the model are views of it."""

    def __init__(self, plan: BucketPlan, axis: Axis) -> None:
        self.plan = plan
        self.parameters = torch.zeros(plan.elements, dtype=plan.dtype, device=plan.device)
        """`[elements]` in the model dtype, replicated over dp x cp."""
        self.shard_elements = plan.elements // axis.size
        self.shard_start = axis.rank * self.shard_elements
        for slot in plan.slots:
            view = self.parameters[slot.start : slot.start + slot.parameter.numel()].view(slot.parameter.shape)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view

    @property
    def parameter_shard(self) -> torch.Tensor:
        """This rank's slice `[elements / (dp x cp)]` of `parameters`, a view."""
        return self.parameters[self.shard_start : self.shard_start + self.shard_elements]


class Bucket(FlatParameters):
    """Flat parameters with their gradients."""

    def __init__(self, plan: BucketPlan, axis: Axis) -> None:
        super().__init__(plan, axis)
        self.wide = torch.float64 if plan.dtype == torch.float64 else torch.float32
        self._gradients: torch.Tensor | None = None

    @property
    def gradients(self) -> torch.Tensor:
        """`[elements]` float32 (float64 for a float64 model), partial over dp x cp until reduced; zero when first asked
        for.
        """
        if self._gradients is None:
            self._gradients = torch.zeros(self.plan.elements, dtype=self.wide, device=self.plan.device)
        return self._gradients

    def gradient_of(self, slot: Slot) -> torch.Tensor:
        """The view of `gradients` that is shaped like a parameter."""
        return self.gradients[slot.start : slot.start + slot.parameter.numel()].view(slot.parameter.shape)

    def take_gradients(self) -> torch.Tensor:
        """`gradients`, which this bucket then no longer holds."""
        taken, self._gradients = self.gradients, None
        return taken

    def shard(self) -> ParameterShard:
        """What this rank updates of it."""
        plan, start = self.plan, self.shard_start
        return ParameterShard(
            values=self.parameter_shard,
            wide=self.wide,
            narrow=plan.dtype,
            weight_decay=plan.weight_decay,
            counted=plan.counted,
            lr_multiplier=plan.lr_multiplier,
            partial_over=plan.partial_over,
            slices_of=lambda values: slices_of(plan, start, values),
        )


class ParameterGather:
    """The overlapped all-gather of updated parameters: a part of the model waits for its own buckets alone.

    It waits right before its forward, so the first layers of the next step compute while later ones are on their way.
    Whoever reads whole parameters in another way waits for all.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, Pending] = {}

    def start(self, bucket: int, gather: Pending) -> None:
        """The gather of a bucket has begun."""
        self._under_way[bucket] = gather

    def wait(self, buckets: Iterable[int]) -> None:
        """Until these have arrived; those that have cost nothing."""
        for bucket in buckets:
            if (gather := self._under_way.pop(bucket, None)) is not None:
                gather.wait()

    def wait_for_all(self) -> None:
        """Until all have arrived."""
        self.wait(list(self._under_way))

    def before_forward(self, parts: Sequence[nn.Module], holding: dict[nn.Parameter, int]) -> None:
        """Let each part wait for its buckets before it runs. `holding` says which bucket has a parameter; one in
        several parts is the first one's.
        """
        seen: set[nn.Parameter] = set()
        for part in parts:
            own = [parameter for parameter in part.parameters() if parameter not in seen]
            seen.update(own)
            buckets = sorted({holding[parameter] for parameter in own if parameter in holding})
            part.register_forward_pre_hook(lambda module, inputs, buckets=buckets: self.wait(buckets))


class FlatBuckets(ShardedParameters):
    """Gradients of the local model chunks, accumulated and reduced in buckets over `reduce_axis` (dp x cp).

    `partial_axes` maps the names that appear in `ParameterSpec.partial_over` to their axes. Build it once the weights
    are on their device. With `each_microbatch` gradients are reduced after every backward and kept as slices. With
    `parts`, modules that together run all of the chunks, updated parameters arrive while parts before them compute.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        reduce_axis: Axis,
        partial_axes: Mapping[str, Axis],
        bucket_elements: int,
        *,
        each_microbatch: bool = False,
        instances: int = 1,
        parts: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(reduce_axis, partial_axes, instances)
        plans = plan_buckets(chunks, self.axis.size, bucket_elements)
        self.buckets = [Bucket(plan, self.axis) for plan in plans if plan.trained]
        self.frozen = [FlatParameters(plan, self.axis) for plan in plans if not plan.trained]
        """Parameters without gradients: only what reads and writes checkpoints meets them."""
        self.shards = [bucket.shard() for bucket in self.buckets]
        missing = {name for b in self.buckets for name in b.plan.partial_over} - set(partial_axes)
        assert not missing, f"no axis was given for {sorted(missing)}"
        self._each_microbatch = each_microbatch
        self._gather, self._ahead = ParameterGather(), len(parts) > 0
        self._gather.before_forward(parts, {s.parameter: i for i, b in enumerate(self.buckets) for s in b.plan.slots})
        for index, bucket in enumerate(self.buckets):
            for number, slot in enumerate(bucket.plan.slots):
                parameter = slot.parameter
                hook = self._hook(index, number)
                parameter.register_post_accumulate_grad_hook(hook)
                if slot.spec.fused_gradient:  # Megatron's names: Transformer Engine's linears know the first two
                    assert not each_microbatch, "fused gradients need buckets that last"
                    parameter.main_grad = bucket.gradient_of(slot)  # type: ignore[attr-defined]  # ours, on a tensor of torch
                    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # likewise
                    parameter.gradient_added = hook  # type: ignore[attr-defined]  # likewise
        self._reset()

    def _reset(self) -> None:
        self._final: set[int] = set()
        """Buckets whose gradients of this backward are to be reduced."""
        self._arrived: list[set[nn.Parameter]] = [set() for _ in self.buckets]
        self._to_launch: deque[int] = deque(() if self._each_microbatch else range(len(self.buckets)))
        """Buckets not yet reduced, in the order that all ranks keep."""
        self._pending: deque[tuple[int, Pending]] = deque()
        self._sums: list[torch.Tensor | None] = [None for _ in self.buckets]
        self._shards: list[torch.Tensor] | None = None

    def _hook(self, index: int, number: int) -> Callable[[torch.Tensor], None]:
        """For the parameter in slot `number` of bucket `index`."""
        owner = weakref.ref(self)  # autograd keeps hooks where the collector does not look: a cycle would stay for ever

        def accumulate(parameter: torch.Tensor) -> None:
            me = owner()
            assert me is not None, "the buckets of this parameter are gone"
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            if parameter.grad is None and not fused:
                return  # autograd calls hooks also where a layer that has said so already gave it nothing
            assert index in me._to_launch, (
                f"a gradient of shape {tuple(parameter.shape)} arrived after bucket {index} had been reduced: "
                "start_backward must come right before each backward of the chunk, zero before the next step"
            )
            if fused:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # a `grad` is only a sign
            else:
                bucket = me.buckets[index]
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
            self._pending.append((index, start_reduce_scatter(bucket.take_gradients(), self.axis)))
        else:
            self._pending.append((index, start_reduce_scatter(bucket.gradients, self.axis)))

    def _collect(self, left: int) -> None:
        """Wait for reductions until only `left` are under way; their sums are added to this rank's slices."""
        while len(self._pending) > left:
            index, pending = self._pending.popleft()
            total, found = self._sums[index], pending.take()
            self._sums[index] = found if total is None else total.add_(found)

    def unshard(self, chunk: int) -> None:
        """Nothing: parameters are whole."""

    def reshard(self, chunk: int) -> None:
        """Nothing: parameters stay whole."""

    def release(self) -> None:
        """Parameters stay whole; those under way arrive."""
        self._gather.wait_for_all()

    def start_backward(self, chunk: int, last: bool) -> None:
        """From now on gradients of this chunk are to be reduced: complete buckets at once."""
        if not (last or self._each_microbatch):
            return
        of_chunk = [index for index, bucket in enumerate(self.buckets) if bucket.plan.chunk == chunk]
        self._final.update(of_chunk)
        if self._each_microbatch:
            for index in of_chunk:
                self._arrived[index].clear()
            self._to_launch.extend(of_chunk)

    def end_backward(self, chunk: int) -> None:
        """Reduce what the chunk's parameters without a gradient have held back, where that is due."""
        while self._each_microbatch and self._to_launch:
            self._launch()

    def finish(self) -> None:
        """Reduce what is left and wait for everything; afterwards `grad_shard` holds this rank's summed slices."""
        assert self._shards is None, "finish was called twice without zero"
        self._gather.wait_for_all()  # of parts that no microbatch has used
        while self._to_launch:
            self._launch()
        self._collect(0)
        empty = (torch.zeros(b.shard_elements, dtype=b.wide, device=b.plan.device) for b in self.buckets)
        sums = [zero if found is None else found for found, zero in zip(self._sums, empty, strict=True)]
        self._sums = [None for _ in self.buckets]
        self._shards = self._sum_copies_and_partial(sums)

    def grad_shard(self, index: int) -> torch.Tensor:
        assert self._shards is not None, "grad_shard is valid between finish and zero"
        return self._shards[index]

    def zero(self) -> None:
        for bucket in self.buckets:
            if not self._each_microbatch:
                bucket.gradients.zero_()
        self._reset()

    def publish(self) -> None:
        """Send every rank's updated slice to all ranks of dp x cp, where they belong."""
        if self.axis.size == 1:
            return
        for index in reversed(range(len(self.buckets))):  # the order of the forward
            bucket = self.buckets[index]
            self._gather.start(index, gather_into(bucket.parameters, bucket.parameter_shard, self.axis))
        if not self._ahead:
            self._gather.wait_for_all()

    def parameter_slices(self) -> list[ParameterSlice]:
        everything = (*self.buckets, *self.frozen)
        return [part for b in everything for part in slices_of(b.plan, b.shard_start, b.parameter_shard)]

    def parameters_held(self) -> list[ParameterSlice]:
        """All local parameters, whole, frozen ones included."""
        self._gather.wait_for_all()
        everything = (*self.buckets, *self.frozen)
        return [part for bucket in everything for part in slices_of(bucket.plan, 0, bucket.parameters)]

    def parameters_to_load(self) -> list[ParameterSlice]:
        return self.parameters_held()

    def loaded(self, masters: bool) -> None:
        """Nothing is left to do: the parameters themselves were filled."""

    def clear(self) -> None:
        self._gather.wait_for_all()
        for bucket in (*self.buckets, *self.frozen):
            bucket.parameters.zero_()
