"""Which parameter lies where in which flat bucket: a pure plan, equal on every rank of dp x cp.

Buckets are numbered in the order in which the backward pass completes them. A bucket never mixes
parameters that are treated differently: by dtype, axes of partial gradients, weight decay, learning rate, frozen,
counted or copy. So later rooms handle whole buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megacp.core.distributed.parameter import ParameterSpec, spec_of

ALIGNMENT = 64
"""Every parameter and every rank's slice begins at a multiple of this many elements (128 bytes in bf16)."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket: elements `[start, start + parameter.numel())`."""

    parameter: nn.Parameter
    spec: ParameterSpec
    start: int


@dataclass(frozen=True)
class BucketPlan:
    """Parameters of one model chunk that are reduced, decayed, counted and stepped alike, in backward order."""

    chunk: int
    slots: tuple[Slot, ...]
    elements: int
    """Length of the flat buffers: a multiple of the reduce axis's size times `ALIGNMENT`."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `[start, start + len(values))` of the row-major flattening of one local parameter (or of its state)."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    """Shape of the local parameter."""
    start: int
    values: torch.Tensor
    """1-D view; writing to it writes to the parameter or the state."""


def _aligned(elements: int, multiple: int = ALIGNMENT) -> int:
    return math.ceil(elements / multiple) * multiple


def plan_buckets(chunks: Sequence[nn.Module], reduce_size: int, bucket_elements: int) -> list[BucketPlan]:
    """Cut the parameters of the model chunks into buckets of at most `bucket_elements` (a larger parameter is alone).

    Within a chunk parameters go in reverse construction order; the last chunk's buckets come first, because its last
    backward is the first to run. Buckets are ordered by their last parameter, the one that completes them.
    """
    groups: dict[tuple[int, tuple[object, ...]], list[list[tuple[int, nn.Parameter]]]] = {}
    seen: set[nn.Parameter] = set()
    position = 0
    for chunk in reversed(range(len(chunks))):
        for parameter in reversed(list(chunks[chunk].parameters())):
            assert parameter not in seen, f"a parameter of shape {tuple(parameter.shape)} is in two model chunks"
            seen.add(parameter)
            spec = spec_of(parameter)
            like = (parameter.dtype, parameter.device, parameter.requires_grad)
            treated = (spec.partial_over, spec.weight_decay, spec.counted, spec.lr_multiplier)
            buckets = groups.setdefault((chunk, (*like, *treated)), [[]])
            filled = sum(_aligned(p.numel()) for _, p in buckets[-1])
            if buckets[-1] and filled + parameter.numel() > bucket_elements:
                buckets.append([])
            buckets[-1].append((position, parameter))
            position += 1
    members = [(chunk, bucket) for (chunk, _), buckets in groups.items() for bucket in buckets]
    members.sort(key=lambda item: item[1][-1][0])
    return [_plan(chunk, [p for _, p in bucket], reduce_size) for chunk, bucket in members]


def _plan(chunk: int, parameters: list[nn.Parameter], reduce_size: int) -> BucketPlan:
    slots = []
    start = 0
    for parameter in parameters:
        slots.append(Slot(parameter, spec_of(parameter), start))
        start += _aligned(parameter.numel())
    return BucketPlan(chunk, tuple(slots), _aligned(start, ALIGNMENT * reduce_size))


def slices_of(plan: BucketPlan, begin: int, values: torch.Tensor) -> list[ParameterSlice]:
    """What elements `[begin, begin + len(values))` of a bucket hold, parameter by parameter; padding is left out."""
    slices = []
    end = begin + values.numel()
    for slot in plan.slots:
        low = max(begin, slot.start)
        high = min(end, slot.start + slot.parameter.numel())
        if low < high:
            part = values[low - begin : high - begin]
            slices.append(ParameterSlice(slot.spec, tuple(slot.parameter.shape), low - slot.start, part))
    return slices
