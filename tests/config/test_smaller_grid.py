"""The largest grid for any number of ranks: replicas go first, then the axes of the model; nothing changes unasked."""

from __future__ import annotations

import pytest

from megacp.core.config.checks.check import check
from megacp.core.config.checks.smaller_grid import largest_grid
from megacp.core.config.cli import parse

MODEL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--num-query-groups", "4"),
    *("--ffn-hidden-size", "64", "--vocab-size", "64", "--seq-length", "64", "--allow-smaller-grid"),
]


def grid(world: int, tp: int, cp: int, pp: int, batch: int = 24) -> tuple[int, int, int, int]:
    """(ranks used, tp, cp, pp) of the grid that is taken."""
    sizes = ["--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp)]
    sizes += ["--pipeline-model-parallel-size", str(pp), "--global-batch-size", str(batch)]
    config, ranks = largest_grid(parse([*MODEL, *sizes]), world)
    assert check(config, ranks) == []
    assert config.training.global_batch_size == batch
    p = config.parallel
    return ranks, p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size


@pytest.mark.parametrize(
    ("world", "given", "batch", "taken"),
    [
        (8, (2, 2, 1), 24, (8, 2, 2, 1)),  # it fits as it is
        (7, (2, 1, 1), 24, (6, 2, 1, 1)),  # dp 4 to 3, one rank is left over
        (5, (2, 1, 1), 20, (4, 2, 1, 1)),  # tp as given, though five replicas without it would use one rank more
        (7, (1, 1, 1), 8, (4, 1, 1, 1)),  # 5, 6 and 7 replicas do not divide the batch of 8
        (6, (2, 2, 2), 24, (6, 2, 1, 1)),  # less than one model: most ranks, then the largest model
        (4, (2, 2, 2), 24, (4, 2, 2, 1)),  # 4 ranks of one model, tp and cp before pp
        (3, (4, 1, 1), 24, (3, 1, 1, 1)),
        (1, (4, 2, 2), 24, (1, 1, 1, 1)),
    ],
)
def test_the_largest_grid_that_fits_is_taken(
    world: int, given: tuple[int, int, int], batch: int, taken: tuple[int, int, int, int]
) -> None:
    assert grid(world, *given, batch=batch) == taken


def test_instances_of_the_optimizer_follow_the_replicas() -> None:
    """Would catch a run of 4 replicas in 2 instances that cannot go on with 3."""
    flags = ["--num-distributed-optimizer-instances", "2", "--global-batch-size", "12"]
    for world, replicas, instances in ((4, 4, 2), (3, 3, 1)):
        config, ranks = largest_grid(parse([*MODEL, *flags]), world)
        assert (ranks, config.parallel.num_distributed_optimizer_instances) == (replicas, instances)


def test_what_an_axis_of_one_rank_cannot_have_goes_with_it() -> None:
    """Would catch a run that cannot go on because one stage has no schedule, no chunks and one tp rank no messages."""
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--async-tensor-parallel"]
    asked = [*sizes, "--pipeline-schedule", "zero_bubble", "--num-virtual-stages-per-pipeline-rank", "2"]
    for world, taken in ((4, (2, True, "zero_bubble", 2)), (2, (1, True, "1f1b", 1)), (1, (1, False, "1f1b", 1))):
        config, ranks = largest_grid(parse([*MODEL, *asked, "--global-batch-size", "12"]), world)
        p = config.parallel
        stages, schedule = p.pipeline_model_parallel_size, p.pipeline_schedule
        assert (ranks, check(config, ranks)) == (world, [])
        assert (stages, p.async_tensor_parallel, schedule, p.num_virtual_stages_per_pipeline_rank) == taken


CP, STAGES, GROUPS = "--context-parallel-size", "--cp-exchange-stages", "--hierarchical-context-parallel-sizes"
KEYS, HEADS = ["--cp-comm-type", "kv_exchange"], ["--cp-comm-type", "a2a+p2p"]
DYNAMIC = [*KEYS, "--cp-layout", "balanced", "--dynamic-context-parallel"]


@pytest.mark.parametrize(
    ("flags", "world", "taken"),
    [
        ([*KEYS, STAGES, "3"], 4, (4, 4, 3, None)),
        ([*KEYS, STAGES, "3"], 2, (2, 2, 1, None)),
        ([*KEYS, STAGES, "3"], 1, (1, 1, 1, None)),
        ([*DYNAMIC, STAGES, "4"], 6, (4, 4, 3, None)),  # cp as given, though cp 2 x dp 3 would use two ranks more
        ([*DYNAMIC, STAGES, "4"], 4, (4, 4, 3, None)),
        ([*HEADS, GROUPS, "2", "2"], 4, (4, 4, 1, (2, 2))),
        ([*HEADS, GROUPS, "2", "2"], 2, (2, 2, 1, (2, 1))),
        ([*HEADS, GROUPS, "1", "4"], 2, (2, 2, 1, (1, 2))),
        ([*HEADS, GROUPS, "2", "2"], 1, (1, 1, 1, None)),
    ],
)
def test_groups_and_stages_of_a_transport_follow_the_context_axis(
    flags: list[str], world: int, taken: tuple[int, int, int, tuple[int, int] | None]
) -> None:
    """Would catch a run that cannot go on because fewer cp ranks have fewer messages, or smaller groups."""
    config, ranks = largest_grid(parse([*MODEL, CP, "4", "--global-batch-size", "12", *flags]), world)
    p = config.parallel
    assert check(config, ranks) == []
    found = (ranks, p.context_parallel_size, p.cp_exchange_stages, p.hierarchical_context_parallel_sizes)
    assert found == taken


@pytest.mark.parametrize("flags", [[*KEYS, STAGES, "5"], [*HEADS, GROUPS, "2", "3"], [*HEADS, STAGES, "2"]])
def test_sizes_of_a_transport_that_never_fitted_are_left_to_the_checks(flags: list[str]) -> None:
    """Would catch a mistyped size that is made right without a word."""
    config = parse([*MODEL, CP, "4", "--global-batch-size", "12", *flags])
    assert largest_grid(config, 4) == (config, 4)


@pytest.mark.slow
def test_every_world_has_a_grid_that_its_checks_accept() -> None:
    for world in range(1, 25):
        ranks, tp, cp, pp = grid(world, 2, 2, 2)
        assert ranks <= world and ranks % (tp * cp * pp) == 0


def test_a_mistyped_size_is_left_to_the_checks_at_once() -> None:
    """Would catch a walk over all numbers up to 2^40 before the message."""
    config = parse([*MODEL, "--tensor-model-parallel-size", str(2**40 - 1)])
    assert largest_grid(config, 0) == (config, 0)
    assert largest_grid(config, 2) == (config, 2)
    config = parse([*MODEL, "--dry-run", "--world-size", str(10**8), "--num-query-groups", "3"])
    assert largest_grid(config, 10**8) == (config, 10**8)


def test_without_the_flag_nothing_changes() -> None:
    flags = [flag for flag in MODEL if flag != "--allow-smaller-grid"]
    config = parse([*flags, "--tensor-model-parallel-size", "2"])
    assert largest_grid(config, 3) == (config, 3)


def test_what_no_grid_cures_is_left_to_the_checks() -> None:
    config = parse([*MODEL, "--num-query-groups", "3"])
    assert largest_grid(config, 2) == (config, 2)
    assert any("--num-query-groups 3" in reason for reason in check(config, 2))
