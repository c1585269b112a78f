"""The interface of sharded parameters and gradients, independent of the sharding strategy.

The optimizer, checkpoints and the pipeline use this interface. A shard is a flat piece of this
rank's parameters whose elements have the same weight decay, update rule and other properties. Its
slices map elements to parameters, so checkpoint files do not depend on the strategy.
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
"""Maximum number of gradient elements in a joined all-reduce, which needs a copy of this size."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `[start, start + len(values))` of one local parameter, or of its state.

    The parameter is flattened in row-major order.
    """

    spec: ParameterSpec
    shape: tuple[int, ...]
    """Shape of the local parameter."""
    start: int
    values: torch.Tensor
    """1-D view of the parameter or its state; writing to it changes the original."""


@dataclass(frozen=True)
class ParameterShard:
    """The part of a group of similar parameters that this rank updates."""

    values: torch.Tensor
    """View of the parameters `[n]`: in the model's dtype, or in `wide` if they are master weights.
    """
    narrow: torch.dtype
    """Dtype in which the model computes."""
    spec: ParameterSpec
    """Spec of one of the parameters; all have the same update rule, weight decay and axes."""
    slices_of: Callable[[torch.Tensor], list[ParameterSlice]]
    """Function from a tensor shaped like `values` to its slices, one or more per parameter."""

    @property
    def wide(self) -> torch.dtype:
        """Dtype of gradients, moments and master weights: float32, or float64 if it is narrow."""
        return accumulation_dtype(self.narrow)


class ShardedParameters(ABC):
    """Parameters of this rank's chunks, their gradients, and the ranks that share them.

    `reduce_axes` maps names in `ParameterSpec.reduced_over` to axes, and `partial_axes` maps names
    in `partial_over`. If there are several instances, each consists of neighbouring ranks of a
    reduce axis and shards a complete copy of the parameters among them.

    In a step, each backward pass runs between `start_backward` and `end_backward`. Then call
    `finish`, run the optimizer, and call `zero`. The optimizer reads `grad_shard`, writes
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
        """Axes of the ranks that have copies of the same shard, one copy per instance."""
        # shard within each instance; copies of a shard are in different instances
        if instances > 1:
            for name, axis in reduce_axes.items():
                self.axes[name], self.copies[name] = split_axis(axis, axis.size // instances)
        self.partial_axes = dict(partial_axes)
        self.shards: list[ParameterShard] = []
        # summed gradients [n] of each shard, between `finish` and `zero`
        self._sums: list[torch.Tensor] | None = None

    def counts(self, spec: ParameterSpec) -> bool:
        """Return whether this rank's copy of a parameter counts in the gradient norm and is saved.

        This is true for exactly one copy.
        """
        return spec.counted and self.copies[spec.reduced_over].rank == 0

    def unshard(self, chunk: int) -> None:
        """Start to gather a chunk's parameters, if they are sharded."""

    def reshard(self, chunk: int) -> None:
        """Free the parameters that `unshard` gathered."""

    @abstractmethod
    def release(self) -> None:
        """Free all gathered parameters, for example after evaluation, without a backward pass."""

    def start_backward(self, chunk: int, last: bool) -> None:
        """Prepare for a backward pass of the chunk; `last` marks its last one in the step."""

    def end_backward(self, chunk: int) -> None:
        """Finish a backward pass of the chunk."""

    def finish(self) -> None:
        """Complete all gradient sums. Afterwards, `grad_shard` returns this rank's sums."""
        assert self._sums is None, "finish was called twice without zero"
        self.release()
        # sum over the shard axis first, so that later sums are over shards, not whole tensors
        self._sums = self._sum_copies_and_partial(self._summed())

    @abstractmethod
    def _summed(self) -> list[torch.Tensor]:
        """Return the gradients of all shards, each summed over its axis in `axes`."""

    def grad_shard(self, index: int) -> torch.Tensor:
        """Return the summed gradients `[n]` of a shard in its wide dtype.

        The caller may change them in place between `finish` and `zero`.
        """
        assert self._sums is not None, "call grad_shard only between finish and zero"
        return self._sums[index]

    def zero(self) -> None:
        """Discard the gradients and begin a new step."""
        self._sums = None

    def publish(self) -> None:
        """Distribute the updated parameters to all ranks that need them."""

    @abstractmethod
    def parameter_slices(self) -> list[ParameterSlice]:
        """Return this rank's share of all parameters, including frozen ones, in the model's dtype.

        Each element occurs on exactly one rank of its axis.
        """

    @abstractmethod
    def parameters_held(self) -> list[ParameterSlice]:
        """Return all parameter values that this rank stores permanently.

        Other ranks may store some of these values too.
        """

    def parameters_to_load(self) -> list[ParameterSlice]:
        """Return the slices to fill with a checkpoint's weights, in the model's dtype.

        Call `loaded` after filling them.
        """
        return self.parameters_held()

    def loaded(self, masters: bool) -> None:
        """Finish loading, after the slices of `parameters_to_load` have been filled.

        `masters` is whether the optimizer's master weights have also been loaded.
        """

    @abstractmethod
    def clear(self) -> None:
        """Zero all parameters, including padding, before a checkpoint is read into them."""

    def shard_slices(self, values: Iterable[torch.Tensor]) -> list[ParameterSlice]:
        """Return the parameter slices of `values`, which contains one tensor per shard."""
        slices = []
        for shard, x in zip(self.shards, values, strict=True):
            slices += shard.slices_of(x)
        return slices

    def gradient_slices(self) -> list[ParameterSlice]:
        """Return this rank's share of the summed gradients; valid between `finish` and `zero`."""
        return self.shard_slices(self.grad_shard(i) for i in range(len(self.shards)))

    def _sum_copies_and_partial(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of all shards, summed over instances and over their partial axes.

        Gradients are joined, so each axis needs only a few all-reduces. All ranks of an axis get
        identical bits, so copies stay equal.
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
        # all ranks use the same order, so their all-reduces match
        for axis, members in axes:
            for group in _joined(members, found):
                # join small gradients into one message, and split the result again
                summed = all_reduce(torch.cat([found[i] for i in group]), axis)
                sizes = [found[i].numel() for i in group]
                for i, part in zip(group, summed.split(sizes), strict=True):
                    found[i] = part
        return found


def _joined(members: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return groups of consecutive `members` with at most `JOINED_ELEMENTS` elements per group.

    A larger tensor gets a group of its own.
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
