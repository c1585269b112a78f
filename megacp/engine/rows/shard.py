"""Cutting a microbatch for one rank: every per-token array by the same indices, padding included.

Labels were shifted before (`collate`), so a cut never needs a neighbour's token. Tokens that make
the row divisible are padding (leave 0, weight 0), and no token sees them.
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
    """One rank's share of a microbatch: `t = padded tokens / cp` tokens, and the plan that relates
    them.

    The tokens stand in the order of `plan.local`, which is not that of the row, also on one rank: a
    plan sorts a video's tokens by type.
    """

    tokens: torch.Tensor
    """int64 `[t]`."""
    labels: torch.Tensor
    """int64 `[t]`, already shifted."""
    loss_weights: torch.Tensor
    """float32 `[t]`; 0 where nothing is predicted."""
    position_ids: torch.Tensor
    """int64 `[t]`, along the paths of each document's tree; or `[t, 3]`, by time, row and column.
    """
    token_names: torch.Tensor
    """int64 `[t]`: what names each token in its microbatch, on every grid; see
    `PackedBatch.token_names`.
    """
    plan: AttentionPlan
    key: int = 0
    """Names this microbatch on every grid; dropout masks are derived from it."""
    vision: LocalVision | None = None
    """Images to encode here and where their features go; None for rows of a dataset without images.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank, padding included."""
        return len(self.plan.local)

    def to(self, device: torch.device, key: int) -> LocalBatch:
        """This batch, made on the host, with its tensors on `device` and the `key` of its step."""
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in _TENSORS}
        vision = None if self.vision is None else self.vision.to(device)
        return dataclasses.replace(self, **moved, key=key, vision=vision)

    def pinned_for(self, device: torch.device) -> LocalBatch:
        """This batch in memory that `device` copies from, so that a step allocates none between its
        messages.
        """
        if device.type != "cuda":
            return self
        moved: dict[str, Any] = {name: pinned(getattr(self, name), device) for name in _TENSORS}
        return dataclasses.replace(self, **moved)

    def in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        """`values [t, ...]` of this rank's tokens as the row has them. ValueError where ranks share
        the row.
        """
        if self.plan.cp > 1:
            raise ValueError(
                f"a rank of {self.plan.cp} holds a part of the row: its order is that of one rank "
                "alone"
            )
        return values[to_device(np.argsort(self.plan.local), values.device)]


_TENSORS = ("tokens", "labels", "loss_weights", "position_ids", "token_names")


def row_axis(grid: ProcessGrid, parallel: ParallelConfig) -> Axis:
    """The ranks over which the tokens of a row are dealt: cp, or dp x cp with
    `--dynamic-context-parallel`.
    """
    return grid.over("dp", "cp") if parallel.dynamic_context_parallel else grid.cp


def mask_metadata(batch: PackedBatch) -> Metadata:
    """What the mask must know of a whole row, in its own order."""
    return Metadata.of_row(batch.leave, batch.span)


def padded_row(
    batch: PackedBatch, layout: Layout, cp: int, tp: int
) -> tuple[PackedBatch, Metadata]:
    """The row filled up as the layout needs it, and what the mask must know of it."""
    padded = batch.with_padding_to(layout.padded_length(mask_metadata(batch), cp, tp))
    return padded, mask_metadata(padded)


def shard_batch(
    batch: PackedBatch, cp: Axis, layout: Layout, *, tp: int = 1, mix: Mix = ALIKE
) -> LocalBatch:
    """This cp rank's share of `batch[T]`, on the host, padded as the layout needs it.

    `tp` > 1 with sequence parallelism; `mix` says how far the layers look that attend to it.
    """
    if cp.size == 1:
        layout = CONTIGUOUS  # there is nothing to deal
    padded, metadata = padded_row(batch, layout, cp.size, tp)
    plan = AttentionPlan(layout.deal(metadata, cp.size, mix), metadata, cp.rank)
    # [T], or [T, 3] where time, row and column of image tokens differ
    positions = padded.position_ids if padded.position_axes is None else padded.position_axes
    fields = (padded.tokens, padded.labels, padded.loss_weights, positions, padded.token_names)
    local: dict[str, Any] = {
        name: torch.from_numpy(field[plan.local])
        for name, field in zip(_TENSORS, fields, strict=True)
    }
    vision = local_vision(batch.vision, plan.indices, cp) if batch.vision is not None else None
    return LocalBatch(**local, plan=plan, vision=vision)
