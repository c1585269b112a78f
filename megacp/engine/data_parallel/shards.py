"""The interface of sharded parameters and gradients, independent of the sharding strategy.

The optimizer, checkpoints and the pipeline use it. A shard is a flat piece of this rank's
parameters, and all its elements are decayed, counted and stepped alike. Its slices map elements to
parameters, so checkpoint files do not depend on the strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis, single_axis, split_axis
from megacp.engine.data_parallel.parameter import ParameterSpec

JOINED_ELEMENTS = 1 << 26
"""Number of gradient elements in one joined all-reduce; the joined copy needs the same memory."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `[start, start + len(values))` of one flattened local parameter, or of its state.

    The flattening is row-major.
    """

    spec: ParameterSpec
    shape: tuple[int, ...]
    """Shape of the local parameter."""
    start: int
    values: torch.Tensor
    """1-D view of the parameter or its state; writes go through."""


@dataclass(frozen=True)
class ParameterShard:
    """The part of one group of parameters that this rank updates."""

    values: torch.Tensor
    """Parameters `[n]`, a view in the model's dtype, or in `wide` if they are master weights."""
    narrow: torch.dtype
    """Dtype in which the model computes."""
    spec: ParameterSpec
    """Spec of one parameter; all are decayed, counted, reduced and stepped like it."""
    slices_of: Callable[[torch.Tensor], list[ParameterSlice]]
    """Function from a tensor shaped like `values` to its slices, one or more per parameter."""

    @property
    def wide(self) -> torch.dtype:
        """Dtype of gradients, moments and master weights: float32, or float64 for float64."""
        return accumulation_dtype(self.narrow)


class ShardedParameters(ABC):
    """The parameters of this rank's chunks, their gradients, and the ranks that share them.

    `reduce_axes` maps the names in `ParameterSpec.reduced_over` to axes, and `partial_axes` the
    names in `partial_over`. With several instances, an instance is a group of neighbouring ranks
    of a reduce axis. It shards the parameters among its ranks, and every instance has a copy.

    The order of calls in a step: every backward between `start_backward` and `end_backward`, then
    `finish`, then the optimizer, then `zero`. The optimizer reads `grad_shard`, writes
    `ParameterShard.values` and calls `publish`. Hooks that a strategy does not need do nothing.
    """

    by_schedule = False
    """Whether actions of the pipeline schedule gather and free the parameters of a chunk."""

    def __init__(
        self, reduce_axes: Mapping[str, Axis], partial_axes: Mapping[str, Axis], instances: int = 1
    ) -> None:
        self.axes = dict(reduce_axes)
        """Axes over which parameters are sharded, by `ParameterSpec.reduced_over`."""
        self.copies = {name: single_axis("copies") for name in self.axes}
        """Axes of the ranks that have the same shard, one per instance."""
        # shard within each instance; the copies of a shard are in different instances
        if instances > 1:
            for name, axis in reduce_axes.items():
                self.axes[name], self.copies[name] = split_axis(axis, axis.size // instances)
        self.partial_axes = dict(partial_axes)
        self.shards: list[ParameterShard] = []
        # summed gradients [n] of each shard, between `finish` and `zero`
        self._sums: list[torch.Tensor] | None = None

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this rank's copy of a parameter counts in the gradient norm and is saved.

        This is true for exactly one copy.
        """
        return spec.counted and self.copies[spec.reduced_over].rank == 0

    def unshard(self, chunk: int) -> None:
        """Start to gather the parameters of a chunk, if they are sharded."""

    def reshard(self, chunk: int) -> None:
        """Free the parameters that `unshard` gathered."""

    @abstractmethod
    def release(self) -> None:
        """Free all gathered parameters, for example after a forward without a backward."""

    def start_backward(self, chunk: int, last: bool) -> None:
        """Prepare for a backward of the chunk; `last` marks its last backward of the step."""

    def end_backward(self, chunk: int) -> None:
        """Finish a backward of the chunk."""

    def finish(self) -> None:
        """Complete all gradient sums; afterwards `grad_shard` returns this rank's sums."""
        assert self._sums is None, "finish was called twice without zero"
        self.release()
        # sum over the shard axis first: the later sums then work on shards instead of whole tensors
        self._sums = self._sum_copies_and_partial(self._summed())

    @abstractmethod
    def _summed(self) -> list[torch.Tensor]:
        """Return the gradients of all shards, each summed over its axis in `axes`."""

    def grad_shard(self, index: int) -> torch.Tensor:
        """Return the summed gradients `[n]` of a shard in its wide dtype.

        The caller may change them in place between `finish` and `zero`.
        """
        assert self._sums is not None, "grad_shard is valid between finish and zero"
        return self._sums[index]

    def zero(self) -> None:
        """Discard the gradients and begin a new step."""
        self._sums = None

    def publish(self) -> None:
        """Distribute the updated values to all ranks."""

    @abstractmethod
    def parameter_slices(self) -> list[ParameterSlice]:
        """Return this rank's share of all parameters, in the model's dtype.

        Frozen parameters are included. Over the ranks of the axis, each element occurs once.
        """

    @abstractmethod
    def parameters_held(self) -> list[ParameterSlice]:
        """Return all parameter values that this rank stores permanently.

        They include values that other ranks store as well.
        """

    def parameters_to_load(self) -> list[ParameterSlice]:
        """Return the slices to fill with a checkpoint's weights, in the model's dtype.

        Call `loaded` after filling them.
        """
        return self.parameters_held()

    def loaded(self, masters: bool) -> None:
        """Finish loading after the slices of `parameters_to_load` have been filled.

        `masters` means that the optimizer's master weights have been loaded too.
        """

    @abstractmethod
    def clear(self) -> None:
        """Zero all parameters, padding included, before a checkpoint is read into them."""

    def shard_slices(self, values: Iterable[torch.Tensor]) -> list[ParameterSlice]:
        """Return the parameter slices of `values`, one tensor per shard and shaped like it."""
        slices = []
        for shard, x in zip(self.shards, values, strict=True):
            slices += shard.slices_of(x)
        return slices

    def gradient_slices(self) -> list[ParameterSlice]:
        """Return this rank's share of the summed gradients; valid between `finish` and `zero`."""
        return self.shard_slices(self.grad_shard(i) for i in range(len(self.shards)))

    def _sum_copies_and_partial(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum the gradients of all shards over the instances, then over their partial axes.

        Each axis needs few all-reduces. All its ranks get identical bits, so copies stay equal.
        """
        found = list(gradients)
        specs = [shard.spec for shard in self.shards]
        # axes to sum over, each with the indices of the shards that need it
        axes: list[tuple[Axis, list[int]]] = []
        for name, axis in sorted(self.copies.items()):
            if axis.size > 1:
                members = [i for i, spec in enumerate(specs) if spec.reduced_over == name]
                axes.append((axis, members))
        for name in sorted(self.partial_axes):
            members = [i for i, spec in enumerate(specs) if name in spec.partial_over]
            axes.append((self.partial_axes[name], members))
        # all ranks iterate in the same order, so their all-reduces match
        for axis, members in axes:
            for group in _joined(members, found):
                # join small gradients into one message, and split the result again
                summed = all_reduce(torch.cat([found[i] for i in group]), axis)
                sizes = [found[i].numel() for i in group]
                for i, part in zip(group, summed.split(sizes), strict=True):
                    found[i] = part
        return found


def _joined(members: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group consecutive tensors of at most `JOINED_ELEMENTS` together.

    A larger tensor forms a group of one.
    """
    groups: list[list[int]] = []
    filled = 0  # elements in the last group
    for i in members:
        if not groups or filled + tensors[i].numel() > JOINED_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += tensors[i].numel()
    return groups
