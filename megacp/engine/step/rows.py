"""Which packs make the rows of this rank, over which ranks a row is dealt, and a row as planned
before its step.

Dynamic context parallelism is another answer to the first two questions: the packs that dp ranks
would read side by side stand in one row, dealt over dp x cp ranks. The layout keeps short documents
on few of them, and ranks that share no document exchange nothing.
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
    """The rows of one rank."""

    axis: Axis
    """The ranks over which the tokens of a row are dealt: cp, or dp x cp."""
    data_rank: DataRank
    """Which of the step's rows are this rank's; ranks with one data rank read the same packs."""
    packs: int
    """Packs of a row."""


@dataclass(frozen=True)
class PlannedRow:
    """A microbatch as it was read, and all that is worked out of it before its step: no device is
    needed.
    """

    batch: PackedBatch
    share: LocalBatch
    """This rank's part of it, on the host."""
    flops: float = 0.0
    """Model FLOPs of training on it; 0 where another rank of the replica counts them."""

    @property
    def pack_ids(self) -> tuple[int, ...]:
        """Numbers of its packs."""
        return self.batch.pack_ids


def rows_of(config: RunConfig, grid: ProcessGrid) -> Rows:
    """The rows of a rank of `grid`."""
    axis = row_axis(grid, config.parallel)
    packs = config.training.micro_batch_size
    if axis is grid.cp:
        return Rows(axis, DataRank(grid.dp.rank, grid.dp.size), packs)
    return Rows(axis, DataRank(0, 1), packs * grid.dp.size)  # dynamic: a row is dealt over dp x cp
