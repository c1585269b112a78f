"""Any grid to any grid: model and optimizer state, bit for bit, through the real buckets and optimizer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.names import boxes_to_load, boxes_to_save
from megacp.core.config.training import TrainingConfig
from megacp.core.data_parallel.buckets import FlatBuckets
from megacp.core.distributed.grid import ProcessGrid, single_axis
from megacp.core.optim.sharded import ShardedAdamW
from tests.checkpoint.saves import save_checkpoint
from tests.ranks import grid, run_ranks
from tests.reference.sharded_toy import Toy, global_shapes, local_of, values


def build(place: ProcessGrid, dtype: torch.dtype) -> tuple[Toy, FlatBuckets, ShardedAdamW]:
    model = Toy(place.tp.size, place.tp.rank, place.pp.size, place.pp.rank, dtype)
    axes = {"tp": place.tp, "embedding": place.embedding}
    buckets = FlatBuckets([model], place.over("dp", "cp"), axes, 150)
    return model, buckets, ShardedAdamW(buckets, TrainingConfig(), place.world, place.device)


def _save(rank: int, world_size: int, shape: dict[str, int], root: str, dtype: torch.dtype) -> None:
    place = grid(**shape)
    model, buckets, optimizer = build(place, dtype)
    for step in range(2):
        model.loss(values((step, buckets.axis.rank), dtype)).backward()
        buckets.finish()
        optimizer.step(0.01)
    boxes = boxes_to_save(buckets.parameter_slices(), optimizer.state_slices())
    extra = {"updates": optimizer.updates}
    save_checkpoint(root, 2, boxes, extra=extra, config_yaml="", world=place.world, grid=shape)


def _check(rank: int, world_size: int, shape: dict[str, int], root: str, dtype: torch.dtype) -> int:
    """Load on another grid and compare every element, padding included, with the global tensors; returns how many."""
    place = grid(**shape)
    model, buckets, optimizer = build(place, dtype)
    for tensor in [p.data for p in model.parameters()] + [b.parameters for b in buckets.buckets]:
        tensor.fill_(7)
    loaded = load_checkpoint(root, place.world)
    optimizer.clear()
    loaded.read(boxes_to_load(buckets.parameters_held(), optimizer.state_slices()))
    optimizer.set_updates(loaded.extra["updates"])
    assert optimizer.updates == 2
    specs = {id(p.megacp_spec): p for p in model.parameters()}  # type: ignore[attr-defined]
    groups = {"model": buckets.parameters_held()}
    groups |= {f"optimizer.{kind}": parts for kind, parts in optimizer.state_slices().items()}
    compared = 0
    for kind, parts in groups.items():
        whole = dict(load_checkpoint(root, single_axis("world")).whole_tensors(kind))
        assert set(whole) == set(global_shapes())
        assert all(tensor.any() for tensor in whole.values())
        for part in parts:
            expected = local_of(specs[id(part.spec)], whole).flatten()[part.start :][: part.values.numel()]
            assert torch.equal(part.values, expected), (kind, part.spec.pieces[0].name)
            compared += part.values.numel()
    return compared


SAVED = {"tp": 2, "dp": 2}
GRIDS = [{}, {"tp": 4}, {"dp": 4}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"dp": 2}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_a_checkpoint_of_one_grid_loads_on_every_other_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    run_ranks(_save, 4, SAVED, str(tmp_path), dtype)
    for shape in GRIDS:
        ranks = math.prod(shape.values())
        compared = (
            run_ranks(_check, ranks, shape, str(tmp_path), dtype)
            if ranks > 1
            else [_check(0, 1, shape, str(tmp_path), dtype)]
        )
        assert min(compared) > 100


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"pp": 2, "dp": 2}, {"tp": 4}, {}], ids=str)
def test_every_grid_writes_files_that_one_process_reads(tmp_path: Path, shape: dict[str, int]) -> None:
    ranks = math.prod(shape.values())
    if ranks > 1:
        run_ranks(_save, ranks, shape, str(tmp_path), torch.float32)
    else:
        _save(0, 1, shape, str(tmp_path), torch.float32)
    assert _check(0, 1, {}, str(tmp_path), torch.float32) > 100


def _resume(rank: int, world_size: int, shape: dict[str, int], root: str) -> bool:
    place = grid(**shape)
    results = []
    for resumed in (False, True):
        model, buckets, optimizer = build(place, torch.float32)
        for step in range(4):
            if resumed and step < 2:
                continue
            if resumed and step == 2:
                loaded = load_checkpoint(root, place.world)
                optimizer.clear()
                loaded.read(boxes_to_load(buckets.parameters_held(), optimizer.state_slices()))
                optimizer.set_updates(loaded.extra["updates"])
            model.loss(values((step, buckets.axis.rank), torch.float32)).backward()
            buckets.finish()
            optimizer.step(0.01)
        results.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    run_ranks(_save, 4, SAVED, str(tmp_path), torch.float32)
    assert run_ranks(_resume, 4, SAVED, str(tmp_path)) == [True] * 4
