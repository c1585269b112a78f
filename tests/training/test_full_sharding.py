"""Sharded gradients and parameters: what travels and what stays, and the same bits in checkpoints as under ZeRO-1.

That every grid trains like one process under every strategy stands in `test_golden_gradients` and `test_vision_parity`.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.config.cli import parse
from megacp.core.config.run import RunConfig, with_values
from megacp.core.distributed import fully_shard
from megacp.core.distributed.grid import Axis, single_axis
from megacp.core.models.build import grid_shape
from megacp.core.pipeline_parallel.schedules import Kind, schedule, with_parameters
from megacp.core.training.state import RunState, load
from megacp.core.training.step import ParallelModel
from megacp.train import prepare
from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble
from tests.reference.training import Values, config_of, step_batches, train
from tests.training.runs import TINY, grid_flags, losses, run, save

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
UNTIED: Values = {"untie_embeddings_and_output_weights": True}


def sharded(strategy: str, **values: Any) -> Values:
    return {"data_parallel_sharding_strategy": strategy, **values}


def _odd(rank: int, world_size: int, shape: dict[str, int], values: Values, packs: int) -> Any:
    return train(grid(**shape), config_of(values, shape), [step_batches(packs, seed) for seed in (1, 2)])


ODD_GRIDS = [
    ({"dp": 3}, {}),
    ({"cp": 3}, {"hidden_dropout": 0.1, "recompute_granularity": "full"}),
    pytest.param({"dp": 3, "tp": 2}, UNTIED, marks=pytest.mark.slow),
    pytest.param({"dp": 3, "cp": 2}, {}, marks=pytest.mark.slow),
    pytest.param({"cp": 3, "pp": 2}, {"num_virtual_stages_per_pipeline_rank": 2}, marks=pytest.mark.slow),
    pytest.param({"dp": 6}, {"num_distributed_optimizer_instances": 2, **UNTIED}, marks=pytest.mark.slow),
    pytest.param({"dp": 3, "cp": 2}, sharded("optim_grads", ddp_bucket_size=500), marks=pytest.mark.slow),
]
"""Widths of 32 and 48 and a vocabulary of 53 leave some ranks of 3 and 6 with fewer rows or none."""


@pytest.mark.parametrize(("shape", "values"), ODD_GRIDS, ids=str)
@pytest.mark.slow
def test_shards_of_uneven_rows_train_like_one_process(shape: dict[str, int], values: Values) -> None:
    values = {**values, "cp_layout": "balanced", "cp_comm_type": "kv_exchange", "attention_kernel": "math"}
    options = {**sharded("optim_grads_params"), **values}
    alone = {name: value for name, value in values.items() if not name.startswith(("num_", "cp_", "data_"))}
    reports, gradients, weights, validation = train(
        grid(), config_of(alone, {}), [step_batches(6, seed) for seed in (1, 2)]
    )
    found = run_ranks(_odd, int(np.prod(list(shape.values()))), shape, options, 6)
    for of_rank in found:
        np.testing.assert_allclose(of_rank[0], reports, rtol=1e-10)
        np.testing.assert_allclose(of_rank[3], validation, rtol=1e-10)
    for step in range(2):
        whole = assemble(of_rank[1][step] for of_rank in found)
        for name, value in assemble([gradients[step]]).items():
            np.testing.assert_allclose(whole[name], value, rtol=0, atol=1e-10 * np.abs(value).max(), err_msg=name)
    whole = assemble(of_rank[2] for of_rank in found)
    for name, value in assemble([weights]).items():
        np.testing.assert_allclose(whole[name], value, rtol=0, atol=1e-10 * np.abs(value).max(), err_msg=name)


def _between(rank: int, world_size: int, values: Values, shape: dict[str, int]) -> list[float]:
    """Losses of training and validation in turn."""
    place = grid(**shape)
    model = ParallelModel(config_of(values, shape), place)
    found = []
    for step in (1, 2, 3):
        batches = step_batches(4, step)
        weight, mine = sum(batch.weight_sum for batch in batches), batches[place.dp.rank :: place.dp.size]
        found += [model.train(mine, step, weight).loss, model.evaluate(mine, weight)]
        if world_size > 1:
            parts = [fully_shard.local_part(p) for chunk in model.chunks for p in chunk.parameters()]  # or it raises
            assert parts
    return found


@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.slow
def test_validation_between_steps_neither_sees_old_weights_nor_leaves_them_behind(shape: dict[str, int]) -> None:
    expected = _between(0, 1, UNTIED, {})
    for found in run_ranks(_between, int(np.prod(list(shape.values()))), sharded(STRATEGIES[2], **UNTIED), shape):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def _calls(rank: int, world_size: int, shape: dict[str, int], values: Values, packs: int) -> dict[str, int]:
    """Collectives over dp x cp in the second step, after everything has been made once."""
    place = grid(**shape)
    model = ParallelModel(config_of(values, shape), place)
    found: Counter[str] = Counter()
    real = {name: getattr(fully_shard, name) for name in ("gather_into", "reduce_scatter_into")}

    def counted(name: str) -> Any:
        def call(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Any:
            found[name] += 1
            return real[name](out, x, axis)

        return call

    try:
        for step in (1, 2):
            found.clear()
            for name in real:
                setattr(fully_shard, name, counted(name))
            batches = step_batches(packs, step)
            model.gradients(batches[place.dp.rank :: place.dp.size], step, 1.0)
            model.optimizer.step(1e-3)
    finally:
        for name, function in real.items():
            setattr(fully_shard, name, function)
    return dict(found)


LAYERS = 4


@pytest.mark.slow
def test_a_block_is_gathered_twice_a_microbatch_and_summed_once() -> None:
    microbatches = 3
    for granularity in ("none", "full"):
        options = sharded("optim_grads_params", **UNTIED, recompute_granularity=granularity)
        calls = run_ranks(_calls, 2, {"dp": 2}, options, 2 * microbatches)
        gathers = microbatches * (2 * LAYERS + 2)  # the embedding in forward, the head with its norm for both
        assert calls == [{"gather_into": gathers, "reduce_scatter_into": microbatches * (LAYERS + 2)}] * 2


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
    """Bytes of parameters, moments, master weights and gradients that this rank keeps; each storage once."""
    shards = model.parameters.shards
    kept = [s.values for s in shards] + [
        part.values for parts in model.optimizer.state_slices().values() for part in parts
    ]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(storages.values()) + sum(s.values.numel() * s.wide.itemsize for s in shards)


def _bytes(rank: int, world_size: int, dtype: str) -> tuple[int, int]:
    model = ParallelModel(
        config_of(sharded("optim_grads_params", dtype=dtype, hidden_size=192), {}), grid(dp=world_size)
    )
    whole = sum(int(np.prod(part.shape)) for part in model.parameters.parameters_held())
    return _state_bytes(model), whole


def test_state_is_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    for dtype in ("bfloat16", "float32"):
        found = run_ranks(_bytes, 4, dtype)
        whole = found[0][1]
        for held, _ in found:
            assert held == pytest.approx(16 * whole / 4, rel=0.02)


def _trained(rank: int, world_size: int, strategy: str, folder: str, again: str) -> int:
    """Two bfloat16 steps, saved; then read by `again` and saved from there."""
    values = sharded(strategy, dtype="bfloat16", clip_grad=0.0, hidden_dropout=0.1)
    config = with_values(config_of(values, {}), {"save": f"{folder}/{strategy}"})
    place = grid(dp=world_size)
    model = ParallelModel(config, place)
    for step in (1, 2):
        batches = step_batches(world_size, step)
        model.train(batches[place.dp.rank :: place.dp.size], step, sum(b.weight_sum for b in batches))
    save(model, RunState(step=2), config)
    other = with_values(
        config,
        {
            "data_parallel_sharding_strategy": again,
            "load": f"{folder}/{strategy}",
            "save": f"{folder}/{strategy}-{again}",
        },
    )
    model = ParallelModel(other, place)
    progress = load(model, RunState(), other).state
    save(model, progress, other)
    tuned = with_values(other, {"finetune": True, "save": f"{folder}/{strategy}-weights"})
    fresh = ParallelModel(tuned, place)
    load(fresh, RunState(), tuned)
    save(fresh, RunState(), tuned)
    return model.optimizer.updates


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    loaded = load_checkpoint(folder, single_axis("world"))
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.master")
    return {f"{kind}.{name}": tensor for kind in kinds for name, tensor in loaded.whole_tensors(kind)}


@pytest.mark.slow
def test_all_strategies_read_each_others_files_bit_for_bit(tmp_path: Path) -> None:
    """Weights, master weights, moments and updates of a bfloat16 model.

    Would catch master weights that are lost, rounded, or read from the rounded weights.
    """
    for strategy, again in zip(STRATEGIES, (*STRATEGIES[1:], STRATEGIES[0]), strict=True):
        assert run_ranks(_trained, 3, strategy, str(tmp_path), again) == [2] * 3
        expected, found = _tensors(tmp_path / strategy), _tensors(tmp_path / f"{strategy}-{again}")
        assert any(name.startswith("optimizer.master") for name in expected)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        tuned = _tensors(tmp_path / f"{strategy}-weights")  # read as weights alone, by the other strategy
        for name in (name for name in expected if name.startswith("model.")):
            assert torch.equal(tuned[name], expected[name]), name
            assert torch.equal(tuned[f"optimizer.master.{name[6:]}"], expected[name].float()), name
    first, *others = (_tensors(tmp_path / strategy) for strategy in STRATEGIES)
    for other in others:  # one microbatch a step: the sums have one order, and rounding is the optimizer's alone
        for name, tensor in first.items():
            assert torch.allclose(other[name].double(), tensor.double(), rtol=1e-2, atol=1e-6), name


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
