"""Sharded gradients and parameters: transferred and kept bytes, and equal checkpoints under ZeRO-1.

`test_golden_gradients` and `test_vision_parity` check that every grid trains like one process under
every strategy.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.distributed.grid import Axis, single_axis
from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel import fully_shard
from megacp.engine.models import init
from megacp.engine.pipeline_parallel.schedules import Kind, schedule, with_parameters
from megacp.engine.step.step import ParallelModel
from megacp.train import prepare_run
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.loop.state import RunState, load
from tests.ranks import grid, run_ranks
from tests.reference.training import Values, config_of, step_batches
from tests.training.runs import TINY, grid_flags, losses, run, save

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
UNTIED: Values = {"untie_embeddings_and_output_weights": True}


def sharded(strategy: str, **values: Any) -> Values:
    return {"data_parallel_sharding_strategy": strategy, **values}


def _calls(
    rank: int, world_size: int, shape: dict[str, int], values: Values, packs: int
) -> dict[str, int]:
    """Return the collectives over dp x cp in the second step, when all buffers exist."""
    place = grid(**shape)
    model = ParallelModel(config_of(values, shape), place)
    found: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Any:
            found[name] += 1
            return real(out, x, axis)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_into", "reduce_scatter_into"):
            patch.setattr(fully_shard, name, counted(name, getattr(fully_shard, name)))
        for step in (1, 2):
            found.clear()
            batches = step_batches(packs, step)
            model.gradients(batches[place.dp.rank :: place.dp.size], step, 1.0)
            model.optimizer.step(1e-3)
    return dict(found)


LAYERS = 4


@pytest.mark.slow
def test_a_block_is_gathered_twice_a_microbatch_and_summed_once() -> None:
    microbatches = 3
    for granularity in ("none", "full"):
        options = sharded("optim_grads_params", **UNTIED, recompute_granularity=granularity)
        calls = run_ranks(_calls, 2, {"dp": 2}, options, 2 * microbatches)
        gathers = microbatches * (
            2 * LAYERS + 2
        )  # the embedding in forward, the head with its norm for both
        assert (
            calls
            == [{"gather_into": gathers, "reduce_scatter_into": microbatches * (LAYERS + 2)}] * 2
        )


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.slow
def test_a_pipeline_gathers_when_its_schedule_says_so(virtual: int) -> None:
    microbatches = 4
    options = sharded("optim_grads_params", **UNTIED, num_virtual_stages_per_pipeline_rank=virtual)
    calls = run_ranks(_calls, 4, {"dp": 2, "pp": 2}, options, 2 * microbatches)
    for rank, found in enumerate(calls):
        stage = rank // 2
        actions = with_parameters(schedule("1f1b", stage, 2, microbatches, virtual))
        parts = [
            layers + (stage + 2 * chunk in (0, 2 * virtual - 1))
            for chunk, layers in enumerate([2 // virtual] * virtual)
        ]
        gathered = [action.chunk for action in actions if action.kind is Kind.UNSHARD]
        assert found == {
            "gather_into": sum(parts[chunk] for chunk in gathered),
            "reduce_scatter_into": microbatches * sum(parts),
        }
        assert len(gathered) < microbatches * virtual


def _state_bytes(model: ParallelModel) -> int:
    """Return the bytes of parameters, moments, master weights and gradients on this rank; each
    storage counts once.
    """
    shards = model.parameters.shards
    kept = [s.values for s in shards] + [
        part.values for parts in model.optimizer.state_slices().values() for part in parts
    ]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(storages.values()) + sum(s.values.numel() * s.wide.itemsize for s in shards)


def _bytes(rank: int, world_size: int, dtype: str) -> tuple[int, int]:
    model = ParallelModel(
        config_of(sharded("optim_grads_params", dtype=dtype, hidden_size=192), {}),
        grid(dp=world_size),
    )
    whole = sum(int(np.prod(part.shape)) for part in model.parameters.parameters_held())
    return _state_bytes(model), whole


def test_state_is_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    for dtype in ("bfloat16", "float32"):
        found = run_ranks(_bytes, 4, dtype)
        whole = found[0][1]
        for held, _ in found:
            assert held == pytest.approx(16 * whole / 4, rel=0.02)


def _drawn(rank: int, world_size: int, values: Values) -> tuple[int, int]:
    """Return the numbers that a rank draws, and the part that it keeps."""
    counts, randn = list[int](), torch.randn

    def counted(*shape: int, generator: torch.Generator) -> torch.Tensor:
        counts.append(math.prod(shape))
        return randn(*shape, generator=generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(init.DRAWS, "normal", counted)
        model = ParallelModel(config_of(values, {}), grid(dp=world_size))
    assert all(x.equal(x.bfloat16().float()) for x in model.optimizer.slices), (
        "masters are the rounded weights"
    )
    return sum(counts), sum(
        p.values.numel() for p in model.parameters.parameter_slices() if p.spec.init == "normal"
    )


def test_a_rank_draws_the_rows_that_it_keeps() -> None:
    """Check that every matrix has a multiple of 128 rows, and that 64 are drawn from one seed."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 128, "vocab_size": 128, "num_layers": 1}
    for drawn, kept in run_ranks(
        _drawn, 2, sharded("optim_grads_params", dtype="bfloat16", **sizes)
    ):
        assert drawn == kept > 0


WORLD = single_axis("world")
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.master")
TWO_CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
GRADIENTS, FULL = (
    ["--data-parallel-sharding-strategy", s] for s in ("optim_grads", "optim_grads_params")
)
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

TABLE = [(GRIDS[0], place) for place in GRIDS[1:]] + [
    (place, GRIDS[(i + 4) % 10]) for i, place in enumerate(GRIDS[1:])
]
"""Every grid reads a checkpoint of one process; another grid reads its checkpoint."""
STAGES = [
    ({"dp": ranks}, ["--dtype", "bfloat16", *more])
    for ranks, more in ((2, []), (4, GRADIENTS), (2, FULL))
]
HALVES = list(zip(STAGES, STAGES[1:] + STAGES[:1], strict=True))
"""Each strategy reads the bfloat16 model of another strategy, with its master weights."""


def ranks(case: Case) -> int:
    return math.prod(case[0].values())


def flags_of(case: Case) -> list[str]:
    return [
        *TINY,
        *grid_flags(**{axis: size for axis, size in case[0].items() if axis != "dp"}),
        *case[1],
    ]


def _read_and_write_again(rank: int, world_size: int, asked: RunConfig, target: str) -> int:
    """Load `--load` on this grid and save it again; return the optimizer's count of updates."""
    config, sources = prepare_run(asked, world_size)
    shape = config.grid_shape(world_size)
    model = ParallelModel(config, grid(tp=shape.tp, cp=shape.cp, dp=shape.dp, pp=shape.pp))
    for part in model.parameters.parameters_held():
        part.values.fill_(7.0)
    fresh = RunState(data_fingerprint=sources.fingerprint, seed=config.training.seed)
    progress = load(model, fresh, config).state
    save(model, progress, with_values(config, {"save": target}))
    return model.optimizer.updates


def state(folder: Path) -> dict[str, torch.Tensor]:
    loaded = load_checkpoint(folder, WORLD)
    return {
        f"{kind}.{name}": tensor for kind in KINDS for name, tensor in loaded.whole_tensors(kind)
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return each grid's checkpoint after two of four steps; it is made on the first request."""
    return {"root": tmp_path_factory.mktemp("grids")}


def checkpoint_of(case: Case, made: dict[str, Path]) -> Path:
    name = str(case)
    if name not in made:
        made[name] = made["root"] / f"grid_{len(made)}"
        flags = [
            *flags_of(case),
            "--save",
            str(made[name]),
            "--train-iters",
            "2",
            "--lr-decay-iters",
            "4",
        ]
        run(ranks(case), flags)
    return made[name]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*TABLE, *HALVES], ids=str)
def test_state_is_equal_bit_for_bit_after_any_change_of_grid(
    tmp_path: Path, checkpoints: dict[str, Path], before: Case, after: Case
) -> None:
    source, target = checkpoint_of(before, checkpoints), tmp_path / "again"
    arguments = (parse([*flags_of(after), "--load", str(source)]), str(target))
    world = ranks(after)
    updates = (
        run_ranks(_read_and_write_again, world, *arguments)
        if world > 1
        else [_read_and_write_again(0, 1, *arguments)]
    )
    assert updates == [2] * world
    expected, found = state(source), state(target)
    kinds = 4 if (before, after) in HALVES else 3
    assert len(expected) == kinds * len([name for name in expected if name.startswith("model.")])
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert all(tensor.any() for tensor in expected.values())
    old, new = load_checkpoint(source, WORLD).extra, load_checkpoint(target, WORLD).extra
    assert old == new and old["consumed_samples"] == 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of four steps on one process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(1, [*TINY, "--save", str(folder)])
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), TABLE[9::4], ids=str)
def test_the_next_losses_are_those_of_the_uninterrupted_run(
    tmp_path: Path,
    checkpoints: dict[str, Path],
    uninterrupted: dict[int, float],
    before: Case,
    after: Case,
) -> None:
    source = checkpoint_of(before, checkpoints)
    run(ranks(after), [*flags_of(after), "--load", str(source), "--save", str(tmp_path)])
    found = losses(tmp_path)
    assert sorted(found) == [3, 4]
    assert found == pytest.approx({step: uninterrupted[step] for step in found}, rel=1e-10)
