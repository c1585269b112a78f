"""Parameters, gradients and optimizer state all sharded over dp x cp (ZeRO-3), those of experts
over the ranks that hold the same ones, by torch's `fully_shard`.

A part (a block, the vision encoder, the embedding, the head) is whole only while it computes. Its
shard is the parameter that the optimizer updates, in float32 for a 16-bit model, so there are no
master weights beside it. Gradients are summed over the ranks after every backward and added to this
rank's part.

Without a pipeline a part is gathered for its forward and again for its backward, while the one
before it computes. A pipeline stage computes other microbatches in between, so its chunks are
gathered by actions of the schedule and stay. The model is sharded part by part as it is built: no
rank ever holds it whole.
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
    """What a rank holds of one parameter: elements `[start, start + n)` of the flattened local
    parameter.
    """
    return [ParameterSlice(spec, shape, start, values)] if values.numel() else []


class FullShards(ShardedParameters):
    """Shards of the parts that `add` is given while the chunks are built, in order, each chunk
    last.

    `narrow` is the dtype in which the model computes. `by_schedule`: chunks are gathered and freed
    only by `unshard` and `reshard`, not around each of their parts.
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
        self.narrow, self.by_schedule = narrow, by_schedule
        self._trained: list[nn.Parameter] = []  # of `shards`
        self._frozen: list[ParameterShard] = []
        self._chunks: list[list[FullyShardedModule]] = []
        self._parts: list[FullyShardedModule] = []
        self._reading: list[torch.Tensor] = []

    def add(self, module: nn.Module, role: str) -> list[ParameterSlice]:
        """Shard the parameters of `module` that are in no part yet, as one part: each over the axis
        it is reduced over. What this rank holds of them, which has no values yet.

        An "embedding" needs no parameter in backward. The backward of a "head" follows its forward
        at once, so nothing is freed between. A "chunk" holds the parts before it; its own
        parameters are there for all of its forward.
        """
        before, wide = own_parameters(module), accumulation_dtype(self.narrow)
        specs = {name: (spec_of(p), tuple(p.shape)) for name, p in before.items()}
        for parameter in before.values():
            if parameter.requires_grad:  # the shard is the master weight
                parameter.data = parameter.data.to(wide)
        axes = {
            parameter: self.axes[specs[name][0].reduced_over] for name, parameter in before.items()
        }
        part, held = (
            shard_module(module, axes, self.axes[DATA], self.narrow, wide),
            list[ParameterSlice](),
        )
        for name, parameter in own_parameters(module).items():
            spec, shape = specs[name]
            axis = self.axes[spec.reduced_over]
            rows = -(-shape[0] // axis.size)  # of every rank but the last ones
            start = min(axis.rank * rows, shape[0]) * (parameter.numel() // shape[0])
            shard = ParameterShard(
                local_part(parameter), self.narrow, spec, partial(_slices, spec, shape, start)
            )
            if parameter.requires_grad:
                self._trained.append(parameter)
            (self.shards if parameter.requires_grad else self._frozen).append(shard)
            held += shard.slices_of(shard.values)
        if self.by_schedule or role in ("head", "chunk"):
            part.set_reshard_after_forward(False, recurse=False)
        if self.by_schedule:
            part.set_reshard_after_backward(False, recurse=False)  # `reshard` frees
        elif role == "embedding":
            part.set_unshard_in_backward(False)
        self._parts.append(part)
        if role == "chunk":
            for one, following in itertools.pairwise(self._parts[:-1]):
                one.set_modules_to_forward_prefetch([following])
            self._chunks.append(self._parts)
            self._parts = []
        return held

    def unshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.unshard(async_op=True)

    def reshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.reshard()

    def release(self) -> None:
        for chunk in range(len(self._chunks)):
            self.reshard(chunk)

    def _summed(self) -> list[torch.Tensor]:
        pairs = zip(self._trained, self.shards, strict=True)
        return [
            torch.zeros_like(s.values) if p.grad is None else local_part(p.grad) for p, s in pairs
        ]

    def zero(self) -> None:
        super().zero()
        for parameter in self._trained:
            parameter.grad = None

    def _slices_of(self, trained: list[torch.Tensor]) -> list[ParameterSlice]:
        frozen = [part for shard in self._frozen for part in shard.slices_of(shard.values)]
        return self.shard_slices(trained) + frozen

    def parameter_slices(self) -> list[ParameterSlice]:
        return self._slices_of([shard.values.to(self.narrow) for shard in self.shards])

    def parameters_held(self) -> list[ParameterSlice]:
        return self.parameter_slices()

    def parameters_to_load(self) -> list[ParameterSlice]:
        """This rank's part of every parameter; copies stand in for those whose shards are wider
        than the model.
        """
        self._reading = [shard.values.to(self.narrow) for shard in self.shards]
        return self._slices_of(self._reading)

    def loaded(self, masters: bool) -> None:
        for shard, narrow in zip(self.shards, self._reading, strict=True):
            if not masters and shard.wide != narrow.dtype:
                shard.values.copy_(narrow)
        self._reading = []

    def clear(self) -> None:
        for shard in (*self.shards, *self._frozen):
            shard.values.zero_()
