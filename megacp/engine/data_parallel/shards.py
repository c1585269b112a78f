"""What the optimizer, checkpoints and the pipeline ask of sharded parameters and gradients, however
they are sharded.

A shard is a flat piece of this rank's parameters that are decayed, counted and stepped alike. It
knows which elements of which parameters it holds, so files do not depend on the strategy.
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
"""Gradients that one all-reduce takes: as many bytes stand beside them meanwhile."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `[start, start + len(values))` of the row-major flattening of one local parameter
    (or of its state).
    """

    spec: ParameterSpec
    shape: tuple[int, ...]
    """Shape of the local parameter."""
    start: int
    values: torch.Tensor
    """1-D view; writing to it writes to the parameter or the state."""


@dataclass(frozen=True)
class ParameterShard:
    """What this rank updates of one group of parameters."""

    values: torch.Tensor
    """`[n]` parameters, a view: in the model's dtype, or in `wide` where they are the master
    weights themselves.
    """
    narrow: torch.dtype
    """Dtype in which the model computes."""
    spec: ParameterSpec
    """Spec of one of them: how all are decayed, counted, reduced and stepped."""
    slices_of: Callable[[torch.Tensor], list[ParameterSlice]]
    """What values shaped like `values` hold, parameter by parameter."""

    @property
    def wide(self) -> torch.dtype:
        """Dtype of gradients, moments and master weights: float32, or float64 in a float64
        model.
        """
        return accumulation_dtype(self.narrow)


class ShardedParameters(ABC):
    """The parameters of this rank's chunks, their gradients, and the ranks that share them.

    `reduce_axes` maps the names in `ParameterSpec.reduced_over` to their axes, `partial_axes` those
    in `partial_over`. With several instances each is a group of neighbouring ranks of a reduce axis
    that shards among itself, and the instances hold copies. A step is: backwards between
    `start_backward` and `end_backward`, `finish`, the optimizer, which reads `grad_shard`, writes
    `ParameterShard.values` and calls `publish`, then `zero`. What a strategy has no use for does
    nothing here.
    """

    by_schedule = False
    """Whether the actions of the pipeline gather and free the parameters of a chunk."""

    def __init__(
        self, reduce_axes: Mapping[str, Axis], partial_axes: Mapping[str, Axis], instances: int = 1
    ) -> None:
        self.axes = dict(reduce_axes)
        """The ranks among which parameters are sharded, by `ParameterSpec.reduced_over`."""
        self.copies = {name: single_axis("copies") for name in self.axes}
        """Axes of ranks that hold the same shard."""
        for name, axis in reduce_axes.items() if instances > 1 else ():
            self.axes[name], self.copies[name] = split_axis(axis, axis.size // instances)
        self.partial_axes = dict(partial_axes)
        self.shards: list[ParameterShard] = []
        self._sums: list[torch.Tensor] | None = (
            None  # [n] of each shard, between `finish` and `zero`
        )

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether the gradient norm counts a parameter on this rank, which then saves its shard: no
        other copy is.
        """
        return spec.counted and self.copies[spec.reduced_over].rank == 0

    def unshard(self, chunk: int) -> None:
        """Start to gather the parameters of a chunk, where they are sharded."""

    def reshard(self, chunk: int) -> None:
        """Free what `unshard` gathered."""

    @abstractmethod
    def release(self) -> None:
        """Free all gathered parameters: after a forward without backward."""

    def start_backward(self, chunk: int, last: bool) -> None:
        """A backward of the chunk is about to begin; `last`: its last one of the step."""

    def end_backward(self, chunk: int) -> None:
        """The backward of the chunk has finished."""

    def finish(self) -> None:
        """Sum what is left and wait; afterwards `grad_shard` holds this rank's sums."""
        assert self._sums is None, "finish was called twice without zero"
        self.release()
        self._sums = self._sum_copies_and_partial(self._summed())

    @abstractmethod
    def _summed(self) -> list[torch.Tensor]:
        """Gradients of all shards, summed each over its axis of `axes`."""

    def grad_shard(self, index: int) -> torch.Tensor:
        """Summed gradients of a shard, `[n]`, wide; they may be changed in place between `finish`
        and `zero`.
        """
        assert self._sums is not None, "grad_shard is valid between finish and zero"
        return self._sums[index]

    def zero(self) -> None:
        """Forget the gradients and begin a new step."""
        self._sums = None

    def publish(self) -> None:
        """Let all ranks have the updated values."""

    @abstractmethod
    def parameter_slices(self) -> list[ParameterSlice]:
        """This rank's share of the parameters in the model's dtype, frozen ones included; the ranks
        of its axis together hold each element once.
        """

    @abstractmethod
    def parameters_held(self) -> list[ParameterSlice]:
        """All values of parameters that this rank holds for good, copies of other ranks
        included.
        """

    def parameters_to_load(self) -> list[ParameterSlice]:
        """What this rank reads of a checkpoint's weights, in the model's dtype; `loaded` ends
        it.
        """
        return self.parameters_held()

    def loaded(self, masters: bool) -> None:
        """The slices of `parameters_to_load` are filled, and with `masters` the optimizer's master
        weights too.
        """

    @abstractmethod
    def clear(self) -> None:
        """Zero all parameters, padding included, before a checkpoint is read into them."""

    def shard_slices(self, values: Iterable[torch.Tensor]) -> list[ParameterSlice]:
        """What `values[i]`, shaped like shard i, hold parameter by parameter."""
        return [
            part
            for shard, x in zip(self.shards, values, strict=True)
            for part in shard.slices_of(x)
        ]

    def gradient_slices(self) -> list[ParameterSlice]:
        """This rank's share of the summed gradients, between `finish` and `zero`."""
        return self.shard_slices(self.grad_shard(i) for i in range(len(self.shards)))

    def _sum_copies_and_partial(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of all shards summed over the instances and over the axes on which they are
        still partial.

        Few all-reduces for each axis; all ranks of it get identical bits, so copies stay equal.
        """
        found = list(gradients)
        specs = [shard.spec for shard in self.shards]
        axes = [
            (axis, [i for i, spec in enumerate(specs) if spec.reduced_over == name])
            for name, axis in sorted(self.copies.items())
            if axis.size > 1
        ]
        for name in sorted(self.partial_axes):
            members = [i for i, spec in enumerate(specs) if name in spec.partial_over]
            axes.append((self.partial_axes[name], members))
        for axis, members in axes:
            for group in _joined(members, found):
                summed = all_reduce(torch.cat([found[i] for i in group]), axis)
                for i, part in zip(
                    group, summed.split([found[i].numel() for i in group]), strict=True
                ):
                    found[i] = part
        return found


def _joined(members: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Neighbours, together at most `JOINED_ELEMENTS` (a larger tensor is alone)."""
    groups: list[list[int]] = []
    filled = 0
    for i in members:
        if not groups or filled + tensors[i].numel() > JOINED_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += tensors[i].numel()
    return groups
