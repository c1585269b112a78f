"""Sharding of a microbatch: selects one rank's tokens from every per-token array.

The same indices select from all arrays, including padding. `collate` has already shifted the
labels, so a shard never needs a token from another rank. Padding tokens (leave 0, weight 0) make
the row divisible, and no token attends to them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megacp.attention.context_parallel.balance import ALIKE, Mix
from megacp.attention.context_parallel.layout import CONTIGUOUS, Layout
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.device import pinned, to_device
from megacp.attention.ops.mask import Metadata
from megacp.distributed.grid import Axis, ProcessGrid
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.vision import LocalVision, local_vision


@dataclass(frozen=True)
class LocalBatch:
    """One rank's share of a microbatch: `t = padded tokens / cp` tokens, and their attention plan.

    The tokens have the order of `plan.local`. Even on a single rank, it differs from the order in
    the row, because a plan sorts the tokens of a video by type.
    """

    tokens: torch.Tensor
    """Token ids: int64 `[t]`."""
    labels: torch.Tensor
    """Labels, already shifted: int64 `[t]`."""
    loss_weights: torch.Tensor
    """Loss weights: float32 `[t]`; 0 for tokens without a label."""
    position_ids: torch.Tensor
    """Positions: int64 `[t]` along the paths of each document's tree, or `[t, 3]` (time, row and
    column)."""
    token_names: torch.Tensor
    """Token identifiers, the same on every grid: int64 `[t]` (`PackedBatch.token_names`)."""
    plan: AttentionPlan
    key: int = 0
    """Key of the step, the same on every grid; dropout masks are derived from it."""
    vision: LocalVision | None = None
    """Images to encode on this rank and the routes of their features; None if there are none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank, including padding."""
        return len(self.plan.local)

    def to(self, device: torch.device, key: int) -> LocalBatch:
        """Copy this host batch to `device`, and return the copy with its step's `key`."""
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in _TENSORS}
        vision = None if self.vision is None else self.vision.to(device)
        return dataclasses.replace(self, **moved, key=key, vision=vision)

    def pinned_for(self, device: torch.device) -> LocalBatch:
        """Return a copy of this batch in pinned memory, for copies to `device`.

        With it, a step allocates no memory between its communication calls.
        """
        # pinned memory only speeds up copies to CUDA
        if device.type != "cuda":
            return self
        moved: dict[str, Any] = {name: pinned(getattr(self, name), device) for name in _TENSORS}
        return dataclasses.replace(self, **moved)

    def in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values[t, ...]`, which belong to this rank's tokens, in the order of the row.

        Raise ValueError if several ranks share the row.
        """
        if self.plan.cp > 1:
            raise ValueError(
                f"in_row_order needs the whole row on one rank, but {self.plan.cp} cp ranks share "
                "this row"
            )
        # argsort of a permutation is its inverse
        return values[to_device(np.argsort(self.plan.local), values.device)]


# tensors of a LocalBatch that move between devices
_TENSORS = ("tokens", "labels", "loss_weights", "position_ids", "token_names")


def row_axis(grid: ProcessGrid, parallel: ParallelConfig) -> Axis:
    """Return the axis whose ranks share a row: cp, or dp x cp with --dynamic-context-parallel."""
    return grid.over("dp", "cp") if parallel.dynamic_context_parallel else grid.cp


def mask_metadata(batch: PackedBatch) -> Metadata:
    """Return the mask metadata of a complete row, in the order of the row."""
    return Metadata.of_row(batch.leave, batch.span)


def padded_row(
    batch: PackedBatch,
    layout: Layout,
    cp: int,
    tp: int,
) -> tuple[PackedBatch, Metadata]:
    """Return the row padded to the length that the layout needs, and its mask metadata."""
    padded = batch.with_padding_to(layout.padded_length(mask_metadata(batch), cp, tp))
    return padded, mask_metadata(padded)


def shard_batch(
    batch: PackedBatch,
    cp: Axis,
    layout: Layout,
    *,
    tp: int = 1,
    mix: Mix = ALIKE,
) -> LocalBatch:
    """Return this cp rank's share of `batch[T]`, on the host and padded for the layout.

    For sequence parallelism, `tp` is the number of tp ranks. `mix` contains the layers' attention
    ranges.
    """
    if cp.size == 1:
        layout = CONTIGUOUS  # one rank gets all tokens
    padded, metadata = padded_row(batch, layout, cp.size, tp)
    # the plan contains the tokens of all ranks, and `plan.local` this rank's tokens
    plan = AttentionPlan(layout.deal(metadata, cp.size, mix), metadata, cp.rank)
    # [T], or [T, 3] if time, row and column of image tokens differ
    positions = padded.position_ids if padded.position_axes is None else padded.position_axes
    fields = (padded.tokens, padded.labels, padded.loss_weights, positions, padded.token_names)
    # select this rank's tokens from every array: [T, ...] -> [t, ...]
    local: dict[str, Any] = {}
    for name, values in zip(_TENSORS, fields, strict=True):
        local[name] = torch.from_numpy(values[plan.local])
    vision = local_vision(batch.vision, plan.indices, cp) if batch.vision is not None else None
    return LocalBatch(**local, plan=plan, vision=vision)
