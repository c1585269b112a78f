"""The real model from grid to grid: weights and optimizer state bit for bit, the next losses to 1e-10 in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.config.cli import parse
from megacp.core.config.run import RunConfig, with_values
from megacp.core.distributed.grid import single_axis
from megacp.core.models.build import grid_shape
from megacp.core.training.state import RunState, load
from megacp.core.training.step import ParallelModel
from megacp.train import prepare
from tests.ranks import grid, run_ranks
from tests.training.runs import TINY, grid_flags, losses, run, save

WORLD = single_axis("world")
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
TWO_CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
GRADIENTS, FULL = (["--data-parallel-sharding-strategy", s] for s in ("optim_grads", "optim_grads_params"))
INSTANCES = ["--num-distributed-optimizer-instances", "2"]
Case = tuple[dict[str, int], list[str]]

GRIDS: list[Case] = [
    ({}, []),
    ({"dp": 2}, FULL),
    ({"dp": 4}, ["--ddp-bucket-size", "1000", *GRADIENTS, *INSTANCES]),
    ({"tp": 2}, []),
    ({"cp": 2}, []),
    ({"cp": 2, "dp": 2}, [*FULL, *INSTANCES]),
    ({"pp": 2}, TWO_CHUNKS),
    ({"pp": 4}, []),
    ({"tp": 2, "pp": 2}, TWO_CHUNKS),
    ({"tp": 2, "cp": 2, "pp": 2}, [*TWO_CHUNKS, *FULL]),
]
"""Worlds of 1, 2, 4 and 8 ranks and all sharding strategies. The first is a single process."""

TABLE = [(GRIDS[0], place) for place in GRIDS[1:]] + [(place, GRIDS[(i + 4) % 10]) for i, place in enumerate(GRIDS[1:])]
"""Every grid reads a checkpoint of one process, and is read by another grid."""


def ranks(case: Case) -> int:
    return math.prod(case[0].values())


def flags_of(case: Case) -> list[str]:
    return [*TINY, *grid_flags(**{axis: size for axis, size in case[0].items() if axis != "dp"}), *case[1]]


def _read_and_write_again(rank: int, world_size: int, asked: RunConfig, target: str) -> int:
    """Load `--load` on this grid and save it from there; the optimizer's count of updates."""
    config, sources = prepare(asked, world_size)
    shape = grid_shape(config, world_size)
    model = ParallelModel(config, grid(tp=shape.tp, cp=shape.cp, dp=shape.dp, pp=shape.pp))
    for part in model.parameters.parameters_held():
        part.values.fill_(7.0)
    fresh = RunState(data_fingerprint=sources.fingerprint, seed=config.training.seed)
    progress = load(model, fresh, config).state
    save(model, progress, with_values(config, {"save": target}))
    return model.optimizer.updates


def state(folder: Path) -> dict[str, torch.Tensor]:
    loaded = load_checkpoint(folder, WORLD)
    return {f"{kind}.{name}": tensor for kind in KINDS for name, tensor in loaded.whole_tensors(kind)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each grid's checkpoint after two of four steps is, once it was asked for."""
    return {"root": tmp_path_factory.mktemp("grids")}


def checkpoint_of(case: Case, made: dict[str, Path]) -> Path:
    name = str(case)
    if name not in made:
        made[name] = made["root"] / f"grid_{len(made)}"
        flags = [*flags_of(case), "--save", str(made[name]), "--train-iters", "2", "--lr-decay-iters", "4"]
        run(ranks(case), flags)
    return made[name]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), TABLE, ids=str)
def test_state_is_equal_bit_for_bit_after_any_change_of_grid(
    tmp_path: Path, checkpoints: dict[str, Path], before: Case, after: Case
) -> None:
    source, target = checkpoint_of(before, checkpoints), tmp_path / "again"
    arguments = (parse([*flags_of(after), "--load", str(source)]), str(target))
    world = ranks(after)
    updates = (
        run_ranks(_read_and_write_again, world, *arguments) if world > 1 else [_read_and_write_again(0, 1, *arguments)]
    )
    assert updates == [2] * world
    expected, found = state(source), state(target)
    assert len(expected) == 3 * len([name for name in expected if name.startswith("model.")])
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert all(tensor.any() for tensor in expected.values())
    old, new = load_checkpoint(source, WORLD).extra, load_checkpoint(target, WORLD).extra
    assert old == new and old["consumed_samples"] == 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of four steps on one process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(1, [*TINY, "--save", str(folder)])
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), TABLE[9:], ids=str)
def test_the_next_losses_are_those_of_the_uninterrupted_run(
    tmp_path: Path, checkpoints: dict[str, Path], uninterrupted: dict[int, float], before: Case, after: Case
) -> None:
    source = checkpoint_of(before, checkpoints)
    run(ranks(after), [*flags_of(after), "--load", str(source), "--save", str(tmp_path)])
    found = losses(tmp_path)
    assert sorted(found) == [3, 4]
    assert found == pytest.approx({step: uninterrupted[step] for step in found}, rel=1e-10)
