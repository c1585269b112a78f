"""The rows of a rank: their packs, the ranks that share them, and their plan before a step.

With dynamic context parallelism, the packs that different dp ranks would otherwise read form one
row, which is distributed across dp x cp ranks. The layout keeps short documents on few ranks, and
ranks without a common document exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacp.distributed.grid import Axis, ProcessGrid
from megacp.engine.config.run import RunConfig
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.rank import DataRank
from megacp.engine.rows.shard import LocalBatch, row_axis


@dataclass(frozen=True)
class Rows:
    """Which rows a rank reads, and which ranks share them."""

    axis: Axis
    """Axis of the ranks that share a row's tokens: cp, or dp x cp."""
    data_rank: DataRank
    """This rank's index among the readers of a step's rows; equal indices read the same packs."""
    packs: int
    """Number of packs per row."""


@dataclass(frozen=True)
class PlannedRow:
    """A microbatch, together with everything that the host computes for it before its step."""

    batch: PackedBatch
    share: LocalBatch
    """This rank's share of the row, on the host."""
    flops: float = 0.0
    """Model FLOPs for training on the row; 0 if another rank of the replica counts them."""

    @property
    def pack_ids(self) -> tuple[int, ...]:
        """Dataset indices of the row's packs."""
        return self.batch.pack_ids


def rows_of(config: RunConfig, grid: ProcessGrid) -> Rows:
    """Return which rows this rank of `grid` reads."""
    axis = row_axis(grid, config.parallel)
    packs = config.training.micro_batch_size
    # every dp rank reads different rows
    if axis is grid.cp:
        return Rows(axis, DataRank(grid.dp.rank, grid.dp.size), packs)
    # dynamic context parallelism: all ranks of dp x cp share one row
    return Rows(axis, DataRank(0, 1), packs * grid.dp.size)
