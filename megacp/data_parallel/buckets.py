"""Flat parameters and gradients in buckets, summed over dp x cp while the backward pass still runs.

Key property: a bucket's reduce-scatter starts as soon as its last gradient of the step is there, and buckets start
strictly in index order, so ranks in which a parameter got no gradient launch the same collectives as all others. Every
reduction is a plain sum (the loss is already divided by the step's global denominator). After `finish` each rank of
dp x cp holds one slice of every summed bucket: exactly what the sharded optimizer updates.

A gradient that is partial over further axes (norm weights under sequence parallelism over `tp`, the two copies of a
tied embedding over `embedding`) is summed over them *after* the reduce-scatter, on the slice: 1 / (dp x cp) of the
bytes, in one fused all-reduce per axis. All ranks of such an all-reduce get identical bits, so copies stay equal.

Rejected: `DistributedDataParallel` (averages, reduces whole gradients, knows neither partial axes nor flat fp32
accumulation) and FSDP (gathers weights per layer, which a pipeline stage repeats for every microbatch).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megacp.data_parallel.layout import BucketPlan, ParameterSlice, plan_buckets, slices_of
from megacp.distributed.collectives import Pending, all_reduce, start_all_gather, start_reduce_scatter
from megacp.distributed.grid import Axis


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
        wide = torch.float64 if plan.dtype == torch.float64 else torch.float32
        self.gradients = torch.zeros(plan.elements, dtype=wide, device=plan.device)
        """`[elements]` float32 (float64 for a float64 model), partial over dp x cp until reduced."""


class FlatBuckets:
    """Gradients of the local model chunks, accumulated and reduced in buckets over `reduce_axis` (dp x cp).

    `partial_axes` maps the names that appear in `ParameterSpec.partial_over` to their axes. Build it once the weights
    are on their device; each step is: backward passes, with `start_last_backward(chunk)` right before the last one of
    each chunk; `finish`; the optimizer, which reads `grad_shard`, writes `Bucket.parameter_shard` and calls
    `gather_parameters`; `zero`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        reduce_axis: Axis,
        partial_axes: Mapping[str, Axis],
        bucket_elements: int,
    ) -> None:
        self.axis = reduce_axis
        plans = plan_buckets(chunks, reduce_axis.size, bucket_elements)
        self.buckets = [Bucket(plan, reduce_axis) for plan in plans if plan.trained]
        self.frozen = [FlatParameters(plan, reduce_axis) for plan in plans if not plan.trained]
        """Parameters without gradients: only what reads and writes checkpoints meets them."""
        self._partial_axes = dict(partial_axes)
        missing = {name for b in self.buckets for name in b.plan.partial_over} - set(partial_axes)
        assert not missing, f"no axis was given for {sorted(missing)}"
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.plan.slots:
                parameter = slot.parameter
                target = bucket.gradients[slot.start : slot.start + parameter.numel()].view(parameter.shape)
                hook = self._hook(index, target)
                parameter.register_post_accumulate_grad_hook(hook)
                if slot.spec.fused_gradient:  # Megatron's names: Transformer Engine's linears know the first two
                    parameter.main_grad = target  # type: ignore[attr-defined]  # ours, on a tensor of torch
                    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # likewise
                    parameter.gradient_added = hook  # type: ignore[attr-defined]  # likewise
        self._reset()

    def _reset(self) -> None:
        self._final_chunks: set[int] = set()
        self._arrived: list[set[nn.Parameter]] = [set() for _ in self.buckets]
        self._pending: list[Pending] = []
        self._shards: list[torch.Tensor] | None = None

    def _hook(self, index: int, target: torch.Tensor) -> Callable[[torch.Tensor], None]:
        chunk = self.buckets[index].plan.chunk
        owner = weakref.ref(self)  # autograd keeps hooks where the collector does not look: a cycle would stay for ever

        def accumulate(parameter: torch.Tensor) -> None:
            me = owner()
            assert me is not None, "the buckets of this parameter are gone"
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            if parameter.grad is None and not fused:
                return  # autograd calls hooks also where a layer that has said so already gave it nothing
            assert len(me._pending) <= index, (
                f"a gradient of shape {tuple(parameter.shape)} arrived after bucket {index} had been reduced: "
                "start_last_backward must come right before the chunk's last backward, zero before the next step"
            )
            if fused:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # a `grad` is only a sign
            else:
                target.add_(parameter.grad)  # type: ignore[arg-type]  # there is one: a hook after it was added
            parameter.grad = None
            if chunk in me._final_chunks:
                me._arrived[index].add(parameter)  # type: ignore[arg-type]  # torch hands the hook a tensor
                me._launch_complete()

        return accumulate

    def _launch_complete(self) -> None:
        while len(self._pending) < len(self.buckets):
            index = len(self._pending)
            if len(self._arrived[index]) < len(self.buckets[index].plan.slots):
                return
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[len(self._pending)]
        self._pending.append(start_reduce_scatter(bucket.gradients, self.axis))

    def start_last_backward(self, chunk: int) -> None:
        """From now on gradients of this chunk are the step's last: complete buckets are reduced at once."""
        self._final_chunks.add(chunk)

    def finish(self) -> None:
        """Reduce what is left and wait for everything; afterwards `grad_shard` holds this rank's summed slices."""
        assert self._shards is None, "finish was called twice without zero"
        while len(self._pending) < len(self.buckets):
            self._launch()
        shards = [pending.wait() for pending in self._pending]
        for name in sorted(self._partial_axes):
            members = [i for i, bucket in enumerate(self.buckets) if name in bucket.plan.partial_over]
            for dtype in sorted({shards[i].dtype for i in members}, key=str):
                same = [i for i in members if shards[i].dtype == dtype]
                fused = all_reduce(torch.cat([shards[i] for i in same]), self._partial_axes[name])
                for i, shard in zip(same, fused.split([shards[i].numel() for i in same]), strict=True):
                    shards[i] = shard
        self._shards = shards

    def grad_shard(self, index: int) -> torch.Tensor:
        """Summed gradients of this rank's slice of a bucket, `[elements / (dp x cp)]`; may be changed in place."""
        assert self._shards is not None, "grad_shard is valid between finish and zero"
        return self._shards[index]

    def zero(self) -> None:
        """Forget the gradients and begin a new step."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        self._reset()

    def gather_parameters(self) -> None:
        """Send every rank's updated slice to all ranks of dp x cp; one bucket is in flight while another is copied."""
        following: Pending | None = None
        for i, bucket in enumerate(self.buckets):
            current = following or start_all_gather(bucket.parameter_shard, self.axis)
            more = i + 1 < len(self.buckets)
            following = start_all_gather(self.buckets[i + 1].parameter_shard, self.axis) if more else None
            gathered = current.wait()
            if gathered.data_ptr() != bucket.parameters.data_ptr():  # an axis of one rank returns its input
                bucket.parameters.copy_(gathered)

    def shard_slices(self, shards: Sequence[torch.Tensor]) -> list[ParameterSlice]:
        """What `shards[i]`, 1-D values shaped like this rank's slice of bucket i, hold parameter by parameter."""
        return [
            part
            for bucket, values in zip(self.buckets, shards, strict=True)
            for part in slices_of(bucket.plan, bucket.shard_start, values)
        ]

    def parameter_slices(self) -> list[ParameterSlice]:
        """This rank's share of the parameters, frozen ones included; the ranks of dp x cp together hold each element
        once.
        """
        everything = (*self.buckets, *self.frozen)
        return [part for b in everything for part in slices_of(b.plan, b.shard_start, b.parameter_shard)]

    def whole_parameters(self) -> list[ParameterSlice]:
        """All local parameters, whole, frozen ones included."""
        everything = (*self.buckets, *self.frozen)
        return [part for bucket in everything for part in slices_of(bucket.plan, 0, bucket.parameters)]
