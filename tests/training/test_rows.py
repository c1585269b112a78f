"""Rows on their way to the device: one at a time, once. Axes that meet before the first of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import megacp
from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.shard import LocalBatch
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.grid import Axis
from megacp.core.ops.tile_kernels import TileKernel
from megacp.core.training import step
from megacp.core.training.step import ParallelModel
from megacp.train import main
from tests.ranks import grid, run_ranks
from tests.tensor_parallel.test_weight_gradients import SIZES
from tests.training.runs import TINY

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
    world = GRIDS[case].get("pipeline_model_parallel_size", 1)
    for alive, left in run_ranks(_arrived, world, GRIDS[case]):
        assert len(alive) == 4 and left == 0
        assert max(alive) <= (1 if world == 2 else 0)


def _met(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and sizes of the axes whose ranks a new model lets meet."""
    met: list[tuple[str, int]] = []
    real = step.connect

    def connect(axes: Sequence[Axis], device: torch.device) -> None:
        met.extend((axis.name, axis.size) for axis in axes)
        real(axes, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "connect", connect)
        cp = values["context_parallel_size"]
        ParallelModel(with_values(RunConfig(), {**SIZES, **values}), grid(cp=cp, dp=world_size // cp))
    return met


def _packs(rank: int, world_size: int, dynamic: bool) -> tuple[int, int, int]:
    rows = step.rows_of(with_values(RunConfig(), {"dynamic_context_parallel": dynamic}), grid(dp=world_size))
    return rows.packs, rows.axis.size, rows.data_rank.size


def test_a_row_of_dynamic_context_parallelism_has_the_packs_of_all_its_ranks() -> None:
    assert run_ranks(_packs, 2, True) == [(2, 2, 1)] * 2 and run_ranks(_packs, 2, False) == [(1, 1, 2)] * 2


def test_ranks_of_split_axes_meet_before_the_first_step() -> None:
    split = {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
    for met in run_ranks(_met, 4, split):
        assert met == [("cp_inner", 2), ("cp_outer", 2)]
    for met in run_ranks(_met, 4, {"context_parallel_size": 2, "num_distributed_optimizer_instances": 2}):
        assert len(met) == 2 and [size for _, size in met] == [2, 2]


MOST_FRAMES = 14


def own_frames() -> list[str]:
    """Functions of the package on the stack, from `Trainer.run` to the caller's caller."""
    frame, names = sys._getframe(2), list[str]()
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(Path(megacp.__file__).parent):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    names.reverse()
    return names[names.index("Trainer.run") :]


def test_few_frames_lie_between_the_loop_and_the_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []
    real = TileKernel.attend

    def attend(self: TileKernel, *rest: object) -> None:
        found.append(own_frames())
        real(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TileKernel, "attend", attend)
    assert main([*TINY, "--dtype", "float32", "--train-iters", "1", "--lr-warmup-iters", "0"]) == 0
    frames = [*found[0], "TileKernel.attend"]
    assert len(frames) <= MOST_FRAMES, frames
