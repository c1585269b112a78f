"""Full sharding (ZeRO-3) of parameters, gradients and optimizer state with torch's `fully_shard`.

Parameters are sharded over dp x cp, and experts over the ranks that have the same experts. A part
is a block, the vision encoder, the embedding or the head, and exists unsharded only while it
computes. The optimizer updates its shard directly, in float32 for a 16-bit model, so there are no
separate master weights. After every backward pass, gradients are summed over the ranks and added to
this rank's shard.

Without a pipeline, a part is gathered for its forward pass and again for its backward pass, each
time while the previous part computes. A pipeline stage computes other microbatches in between, so
actions of the schedule gather and free its chunks. The model is sharded part by part while it is
built, so no rank ever stores the complete model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.fully_shard import (
    FullyShardedModule,
    local_part,
    own_parameters,
    shard_module,
    with_group,
)
from megacp.engine.data_parallel.parameter import ParameterSpec, spec_of
from megacp.engine.data_parallel.shards import ParameterShard, ParameterSlice, ShardedParameters
from megacp.engine.layers.table import DATA


def _slices(
    spec: ParameterSpec, shape: tuple[int, ...], start: int, values: torch.Tensor
) -> list[ParameterSlice]:
    """Return the slice `[start, start + n)` of a flattened parameter as a list; empty if n is 0."""
    return [ParameterSlice(spec, shape, start, values)] if values.numel() else []


class FullShards(ShardedParameters):
    """Shards of all parts of the model.

    While building a chunk, call `add` for each of its parts in order, and finally for the chunk
    itself. `narrow` is the dtype in which the model computes. With `by_schedule`, only `unshard`
    and `reshard` gather and free parameters, whole chunks at a time instead of parts.
    """

    def __init__(
        self,
        reduce_axes: Mapping[str, Axis],
        partial_axes: Mapping[str, Axis],
        narrow: torch.dtype,
        *,
        by_schedule: bool = False,
        instances: int = 1,
    ) -> None:
        super().__init__(reduce_axes, partial_axes, instances)
        self.axes = {name: with_group(axis) for name, axis in self.axes.items()}
        self.narrow = narrow
        self.by_schedule = by_schedule
        self._trained: list[nn.Parameter] = []  # parameters of `shards`
        self._frozen: list[ParameterShard] = []
        self._chunks: list[list[FullyShardedModule]] = []  # parts of each chunk, in order
        self._parts: list[FullyShardedModule] = []  # parts of the chunk that is being built
        self._reading: list[torch.Tensor] = []  # narrow copies of `shards` while a checkpoint loads

    def add(self, module: nn.Module, role: str) -> list[ParameterSlice]:
        """Shard the parameters of `module` that are in no part yet, and register them as a part.

        Each parameter is sharded over its reduce axis. Return this rank's slices, whose values are
        not initialised yet. The role determines when the part is gathered and freed:

        * The backward pass of an "embedding" needs no parameters.
        * The backward pass of a "head" directly follows its forward pass, so the head stays
          gathered in between.
        * A "chunk" contains the parts added before it; its remaining parameters stay gathered
          during its whole forward pass.
        """
        before = own_parameters(module)
        wide = accumulation_dtype(self.narrow)
        specs = {name: (spec_of(p), tuple(p.shape)) for name, p in before.items()}
        for parameter in before.values():
            # the shard will be the master weight, so widen the parameter before sharding
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
        axes = {}
        for name, parameter in before.items():
            spec, _ = specs[name]
            axes[parameter] = self.axes[spec.reduced_over]
        part = shard_module(module, axes, self.axes[DATA], self.narrow, wide)
        held: list[ParameterSlice] = []
        # sharding has replaced the parameters, so look them up again
        for name, parameter in own_parameters(module).items():
            spec, shape = specs[name]
            axis = self.axes[spec.reduced_over]
            rows = -(-shape[0] // axis.size)  # rows per rank; the last ranks may have fewer
            first_row = min(axis.rank * rows, shape[0])
            start = first_row * (parameter.numel() // shape[0])
            slices_of = partial(_slices, spec, shape, start)
            shard = ParameterShard(local_part(parameter), self.narrow, spec, slices_of)
            if parameter.requires_grad:
                self._trained.append(parameter)
                self.shards.append(shard)
            else:
                self._frozen.append(shard)
            held += shard.slices_of(shard.values)
        # set when torch gathers and frees the part; by default, around each pass
        if self.by_schedule or role in ("head", "chunk"):
            part.set_reshard_after_forward(False, recurse=False)
        if self.by_schedule:
            part.set_reshard_after_backward(False, recurse=False)  # `reshard` frees them
        elif role == "embedding":
            part.set_unshard_in_backward(False)
        self._parts.append(part)
        if role == "chunk":
            # each part gathers the next one while it computes
            for one, following in itertools.pairwise(self._parts[:-1]):
                one.set_modules_to_forward_prefetch([following])
            self._chunks.append(self._parts)
            self._parts = []
        return held

    def unshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.unshard(async_op=True)  # torch waits for it in the part's forward pass

    def reshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.reshard()

    def release(self) -> None:
        for chunk in range(len(self._chunks)):
            self.reshard(chunk)

    def _summed(self) -> list[torch.Tensor]:
        sums = []
        for parameter, shard in zip(self._trained, self.shards, strict=True):
            if parameter.grad is None:
                sums.append(torch.zeros_like(shard.values))
            else:  # fully_shard has already summed the gradient over the axis
                sums.append(local_part(parameter.grad))
        return sums

    def zero(self) -> None:
        super().zero()
        for parameter in self._trained:
            parameter.grad = None

    def _slices_of(self, trained: list[torch.Tensor]) -> list[ParameterSlice]:
        slices = self.shard_slices(trained)
        for shard in self._frozen:
            slices += shard.slices_of(shard.values)
        return slices

    def parameter_slices(self) -> list[ParameterSlice]:
        return self._slices_of([shard.values.to(self.narrow) for shard in self.shards])

    def parameters_held(self) -> list[ParameterSlice]:
        return self.parameter_slices()

    def parameters_to_load(self) -> list[ParameterSlice]:
        """Return this rank's slices of every parameter, in the model's dtype.

        If a trained shard has a wider dtype, its slices are a copy, which `loaded` converts.
        """
        self._reading = [shard.values.to(self.narrow) for shard in self.shards]
        return self._slices_of(self._reading)

    def loaded(self, masters: bool) -> None:
        # if the checkpoint has no master weights, widen the loaded weights instead
        for shard, narrow in zip(self.shards, self._reading, strict=True):
            if not masters and shard.wide != narrow.dtype:
                shard.values.copy_(narrow)
        self._reading = []

    def clear(self) -> None:
        for shard in (*self.shards, *self._frozen):
            shard.values.zero_()
