"""Parameters, gradients and optimizer state all sharded over dp x cp (ZeRO-3), by torch's `fully_shard`.

A part (a block, the vision encoder, the embedding, the head) is whole only while it computes. Its shard
is the parameter that the optimizer updates, in float32 for a 16-bit model, so there are no master weights beside it.
Gradients are summed over the ranks after every backward and added to this rank's part.

Without a pipeline a part is gathered for its forward and again for its backward, while the one before it computes. A
pipeline stage computes other microbatches in between, so its chunks are gathered by actions of the schedule and stay.
The model is sharded part by part as it is built: no rank ever holds it whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megacp.core.data_parallel.layout import ParameterSlice
from megacp.core.data_parallel.shards import ParameterShard, ShardedParameters
from megacp.core.distributed.fully_shard import FSDPModule, local_part, own_parameters, shard_module
from megacp.core.distributed.grid import Axis
from megacp.core.distributed.parameter import ParameterSpec, spec_of


@dataclass(frozen=True)
class _Held:
    """A sharded parameter; this rank's part is elements `[start, start + n)` of the flattened local parameter."""

    parameter: nn.Parameter
    spec: ParameterSpec
    shape: tuple[int, ...]
    start: int

    def slices(self, values: torch.Tensor) -> list[ParameterSlice]:
        return [ParameterSlice(self.spec, self.shape, self.start, values)] if values.numel() else []

    @property
    def values(self) -> torch.Tensor:
        """This rank's part, `[n]`, a view."""
        return local_part(self.parameter)


class FullShards(ShardedParameters):
    """Shards of the parts that `add` is given while the chunks are built, in order, each chunk last; `close` ends it.

    `narrow` is the dtype in which the model computes. `by_schedule`: chunks are gathered and freed by `unshard` and
    `reshard` alone, not around each of their parts.
    """

    def __init__(
        self,
        reduce_axis: Axis,
        partial_axes: Mapping[str, Axis],
        narrow: torch.dtype,
        *,
        by_schedule: bool = False,
        instances: int = 1,
    ) -> None:
        super().__init__(reduce_axis, partial_axes, instances)
        self.narrow, self.by_schedule = narrow, by_schedule
        self.wide = torch.float64 if narrow == torch.float64 else torch.float32
        self.shards = []
        self._trained: list[_Held] = []
        self._frozen: list[_Held] = []
        self._chunks: list[list[FSDPModule]] = []
        self._parts: list[FSDPModule] = []
        self._reading: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: list[torch.Tensor] | None = None

    def add(self, module: nn.Module, role: str) -> None:
        """Shard the parameters of `module` that are in no part yet, as one part.

        An "embedding" needs no parameter in backward. The backward of a "head" follows its forward at once, so nothing
        is freed between. A "chunk" holds the parts before it; its own parameters are there for all of its forward.
        """
        before = own_parameters(module)
        specs = {name: (spec_of(p), tuple(p.shape)) for name, p in before.items()}
        for parameter in before.values():
            if parameter.requires_grad:  # the shard is the master weight
                parameter.data = parameter.data.to(self.wide)
        part = shard_module(module, self.axis, self.narrow, self.wide)
        for name, parameter in own_parameters(module).items():
            spec, shape = specs[name]
            rows = -(-shape[0] // self.axis.size)  # of every rank but the last ones
            start = min(self.axis.rank * rows, shape[0]) * (parameter.numel() // shape[0])
            held = _Held(parameter, spec, shape, start)
            (self._trained if parameter.requires_grad else self._frozen).append(held)
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

    def close(self) -> None:
        """All chunks are built."""
        self.shards = [
            ParameterShard(
                values=held.values,
                wide=self.wide,
                narrow=self.narrow,
                weight_decay=held.spec.weight_decay,
                counted=held.spec.counted,
                lr_multiplier=held.spec.lr_multiplier,
                partial_over=held.spec.partial_over,
                slices_of=held.slices,
            )
            for held in self._trained
        ]

    def unshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.unshard(async_op=True)

    def reshard(self, chunk: int) -> None:
        for part in self._chunks[chunk]:
            part.reshard()

    def release(self) -> None:
        for chunk in range(len(self._chunks)):
            self.reshard(chunk)

    def start_backward(self, chunk: int, last: bool) -> None:
        """Nothing: every backward gathers and sums by itself."""

    def end_backward(self, chunk: int) -> None:
        """Nothing, likewise."""

    def finish(self) -> None:
        assert self._gradients is None, "finish was called twice without zero"
        self.release()
        found = []
        for held in self._trained:
            grad = held.parameter.grad
            found.append(torch.zeros_like(held.values) if grad is None else local_part(grad))
        self._gradients = self._sum_copies_and_partial(found)

    def grad_shard(self, index: int) -> torch.Tensor:
        assert self._gradients is not None, "grad_shard is valid between finish and zero"
        return self._gradients[index]

    def zero(self) -> None:
        for held in self._trained:
            held.parameter.grad = None
        self._gradients = None

    def publish(self) -> None:
        """Nothing: the next forward gathers the shards that were updated."""

    def parameter_slices(self) -> list[ParameterSlice]:
        found = [part for held in self._trained for part in held.slices(held.values.to(self.narrow))]
        return found + [part for held in self._frozen for part in held.slices(held.values)]

    def parameters_held(self) -> list[ParameterSlice]:
        return self.parameter_slices()

    def parameters_to_load(self) -> list[ParameterSlice]:
        """This rank's part of every parameter; copies stand in for those whose shards are wider than the model."""
        self._reading = [(held.values, held.values.to(self.narrow)) for held in self._trained]
        parts = zip(self._trained, self._reading, strict=True)
        found = [part for held, (_, narrow) in parts for part in held.slices(narrow)]
        return found + [part for held in self._frozen for part in held.slices(held.values)]

    def loaded(self, masters: bool) -> None:
        for values, narrow in self._reading:
            if not masters and values.dtype != narrow.dtype:
                values.copy_(narrow)
        self._reading = []

    def clear(self) -> None:
        for held in (*self._trained, *self._frozen):
            held.values.zero_()
