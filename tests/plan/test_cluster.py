"""Drawn steps of a cluster: beside a plain loop over one pipeline, by hand, and as troubles come and go."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from megacp.attention.ops.mask import Metadata
from megacp.dry_run.packs import PackSample, sample_of
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.models.costs import stage_layers
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Kind
from megacp.plan.cluster import Trouble, simulate
from megacp.plan.hardware import Hardware
from megacp.plan.times import kind_seconds, stage_parts, step_time

PP, CP, KV = "pipeline_model_parallel_size", "context_parallel_size", {"cp_comm_type": "kv_exchange"}
SMALL = {"vocab_size": 4096, "seq_length": 1024, "num_layers": 4, "global_batch_size": 8}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
DYNAMIC = {**KV, "cp_layout": "balanced", "dynamic_context_parallel": True}
HERE = Hardware(1.0, 1e12, dict.fromkeys(("fused", "flex"), (5e11, 2e11)), 1e12, 1e30, 1e9, 1e30, 0, 1e12, "")


def sizes(**values: object) -> RunConfig:
    return with_values(RunConfig(), {**SMALL, **values})


def documents(*lengths: int) -> Metadata:
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths))


UNEVEN = sample_of(sizes(), [documents(1024), documents(*[64] * 16)])


@pytest.mark.parametrize("more", [{}, {PP: 2}, {PP: 2, "pipeline_schedule": "zero_bubble"}, SHARDED, {CP: 2}, DYNAMIC])
def test_equal_packs_without_trouble_take_the_time_of_the_plan(more: dict) -> None:
    config = sizes(**more)
    expected = step_time(config, 4, HERE, PackSample()).total
    assert simulate(config, 4, HERE, PackSample(), Trouble(steps=3)) == pytest.approx([expected] * 3, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_a_step_is_that_of_a_plain_loop_over_one_of_the_draws(name: str) -> None:
    """Two stages, three microbatches of two packs: all eight draws, each by the wait of every compute."""
    config = sizes(**{PP: 2, "global_batch_size": 3, "pipeline_schedule": name})
    lists = [SCHEDULES[name](stage, 2, 3, 1) for stage in range(2)]
    samples, layers = [*UNEVEN.each(), UNEVEN.mean()], stage_layers(config, 2)
    parts = [[kind_seconds(config, *part) for part in stage_parts(config, 2, HERE, one, layers)[0]] for one in samples]

    def end_of(draw: tuple[int, ...]) -> float:
        @functools.cache
        def end(stage: int, place: int) -> float:
            action, own = lists[stage][place], parts[draw[lists[stage][place].microbatch]][stage]
            before = [end(stage, place - 1)] if place else [0.0]
            source = {Kind.FORWARD: stage - 1, Kind.BACKWARD: stage + 1}.get(action.kind, -1)
            if source in (0, 1):
                before.append(end(source, lists[source].index(action)))
            inside = action.kind is Kind.BACKWARD and all(one.kind is not Kind.WEIGHTS for one in lists[stage])
            return max(before) + own[action.kind] + own[Kind.WEIGHTS] * inside

        return max(end(stage, len(lists[stage]) - 1) for stage in range(2))

    after = simulate(config, 2, HERE, UNEVEN, Trouble(steps=1, uneven=False))[0] - end_of((2, 2, 2))
    plain = {round(end_of(draw) + after, 12) for draw in itertools.product((0, 1), repeat=3)}
    assert {*np.round(simulate(config, 2, HERE, UNEVEN, Trouble(steps=100)), 12)} == plain


def test_a_slow_rank_makes_a_step_as_slow_as_it_computes_and_groups_have_as_many_as_their_ranks() -> None:
    config, usual = sizes(), step_time(sizes(), 1, HERE, PackSample()).total
    assert simulate(config, 1, HERE, PackSample(), Trouble(2, 1.0, 1.5)) == pytest.approx([1.5 * usual] * 2, rel=1e-9)
    tensor = sizes(tensor_model_parallel_size=4)
    seconds = simulate(tensor, 8, HERE, PackSample(), Trouble(1000, 0.05, 2.0))
    assert np.mean(seconds > seconds.min()) == pytest.approx(1 - 0.95**8, abs=0.05)  # three deviations of 1,000 draws
    late = simulate(
        sizes(tensor_model_parallel_size=4, global_batch_size=1), 4, HERE, PackSample(), Trouble(4000, jitter=0.1)
    )
    steady = step_time(sizes(tensor_model_parallel_size=4, global_batch_size=1), 4, HERE, PackSample())
    # the latest of four exponential delays is 1 + 1/2 + 1/3 + 1/4 of the mean one
    assert late.mean() / steady.total - 1 == pytest.approx(0.1 * 25 / 12, rel=0.05)


def test_more_trouble_never_makes_a_step_shorter() -> None:
    config, here = sizes(**{PP: 2, CP: 2, "global_batch_size": 64}), replace(HERE, inside=1e9)
    less = Trouble(50, 0.1, 1.2, 0.01, 1.1)
    base = simulate(config, 32, here, UNEVEN, less)
    for more in ({"slow_ranks": 0.3}, {"slow_factor": 2.0}, {"jitter": 0.1}, {"contention": 9.0}):
        seconds = simulate(config, 32, here, UNEVEN, replace(less, **more))
        assert (seconds >= base).all() and seconds.mean() > base.mean()
    # replicas that gather parameters together wait in every microbatch; those that gather alone do not
    free, sharded = replace(HERE, outside=1e30), sizes(**SHARDED, global_batch_size=16)
    together, alone = (
        simulate(with_values(sharded, {"num_distributed_optimizer_instances": n}), 4, free, UNEVEN, Trouble(50))
        for n in (1, 4)
    )
    assert together.mean() > 1.1 * alone.mean()


def test_what_ranks_of_a_row_have_by_hand() -> None:
    """Contiguous halves of a causal document have 1 and 3 of 4 parts of its area; the second needs all other keys."""
    halves, spans = sizes(**{CP: 2, **KV, "cp_layout": "contiguous"}), documents(256, 256, 512)
    assert PackSample().shared(halves) == (pytest.approx(1.5, rel=1e-3), 1.0)
    assert PackSample().shared(with_values(halves, {"cp_layout": "zigzag"})) == (1.0, 1.0)
    assert PackSample().shared(with_values(halves, {"cp_comm_type": "a2a"})) == (1.0, 0.0)
    swapped = {CP: 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
    assert PackSample().shared(with_values(halves, swapped)) == (pytest.approx(1.5, rel=1e-3), 0.0)
    assert sample_of(halves, [spans]).shared(halves) == (pytest.approx(8 / 6, rel=1e-2), 0.0)
    rows = sample_of(sizes(), [documents(1024), spans]).joined(2)
    assert rows.areas == (pytest.approx((1 + 3 / 8) / 2, rel=1e-2),)
    assert np.bincount(rows.rows[0].document).tolist() == [1024, 256, 256, 512]
