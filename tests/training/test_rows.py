"""Rows on their way to the device: one at a time, once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from megacp.config.run import RunConfig, with_values
from megacp.context_parallel.shard import LocalBatch
from megacp.data.synthetic.mock import MockRules, mock_batch
from megacp.training.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.tensor_parallel.test_fused_gradient import SIZES

GRIDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "full recomputation": {"recompute_granularity": "full"},
    "pp 2, two chunks": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
}


def _arrived(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[int], int]:
    """Rows of earlier microbatches on the device as each of four arrives, and how many are left after the step."""
    model = ParallelModel(with_values(RunConfig(), {**SIZES, **values}), grid(pp=world_size))
    rules, here, alive = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed"), [], []
    move = LocalBatch.to

    def moved(share: LocalBatch, device: torch.device, key: int) -> LocalBatch:
        gc.collect()
        alive.append(sum(row() is not None for row in here))
        batch = move(share, device, key)
        here.append(weakref.ref(batch))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBatch, "to", moved)
        model.gradients([mock_batch([i], rules) for i in range(4)], 1, 100.0)
    gc.collect()
    return alive, sum(row() is not None for row in here)


@pytest.mark.parametrize("case", GRIDS)
def test_a_row_comes_to_the_device_once_and_leaves_with_its_last_chunk(case: str) -> None:
    """Would catch pixels of a whole step on a GPU at once, and rows that are copied again for every chunk."""
    world = GRIDS[case].get("pipeline_model_parallel_size", 1)
    for alive, left in run_ranks(_arrived, world, GRIDS[case]):
        assert len(alive) == 4 and left == 0
        assert max(alive) <= (1 if world == 2 else 0)
