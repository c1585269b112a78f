"""Our formulas compared with published runs of other frameworks: memory, time, fastest layout.

`pytest -s` prints the errors.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest

from megacp.dry_run.memory import stage_parameters, stage_state
from megacp.dry_run.packs import PackSample
from megacp.engine.config.run import RunConfig, with_values
from megacp.plan.hardware import hardware
from megacp.plan.search import TIGHT
from megacp.plan.times import step_time
from tests.plan.frameworks import Row, nominal, peak, published, step

H100 = hardware("h100", "infiniband")
REACHED, OUTSIDE = 0.48, 16e9
"""Fraction of peak FLOP/s, and bytes/s of a network adapter.

These two constants of nanotron's machines are fitted to every second row.
"""
FITTED = replace(H100, products=REACHED * H100.peak, outside=OUTSIDE)
NANOTRON = published("nanotron")
FIT, OTHER = ([row for row in NANOTRON if row.note == half] for half in ("fit", "other"))
SOME = [pytest.param(6, id="a sixth"), pytest.param(1, marks=pytest.mark.slow, id="all")]


@functools.cache
def planned(row: Row) -> tuple[float, float]:
    """Return the planned GiB and seconds of a nanotron run."""
    return peak(row, FITTED), step(row, FITTED)


def missed(ratios: Iterable[float]) -> float:
    """Return the median relative error."""
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def spearman(pairs: list[tuple[float, float]]) -> float:
    ranks = [[sorted(side).index(value) for value in side] for side in zip(*pairs, strict=True)]
    return statistics.correlation(*ranks)


def test_megatron_holds_between_steps_what_we_count() -> None:
    """The first rank uses some more MiB, for its context and its kernels' scratch space."""
    beyond = {}
    for row in published("megatron"):
        config = row.config
        state = stage_state(config, [range(config.model.num_layers // row.pp)], row.gpus, [])
        beyond[row.where] = (
            row.gib * 1024 - (state.weights + state.gradients + state.optimizer) / 2**20
        )
    assert len(beyond) == 52 and sum(abs(mib) < 150 for mib in beyond.values()) >= 50
    assert 90 < statistics.median(beyond.values()) < 120


@pytest.mark.parametrize("every", SOME)
def test_nanotron_fills_as_much_memory_as_is_planned(every: int) -> None:
    """For each model and microbatch size, planned and measured memory have the same order.

    Large models have two modes: the host is ahead of the device, or it is not.
    """
    alike = defaultdict(list)
    for row in NANOTRON[::every]:
        alike[row.model, row.mbs].append((planned(row)[0], row.gib))
    ratios = [ours / theirs for pairs in alike.values() for ours, theirs in pairs]
    assert missed(ratios) < 0.08
    orders = {key: spearman(pairs) for key, pairs in alike.items() if len(pairs) >= 8}
    for key, order in orders.items():
        print(
            *key,
            f"micro batch, {len(alike[key])} rows: {order:.2f}, "
            f"{missed(a / b for a, b in alike[key]):.1%} off",
        )
    assert not orders or statistics.median(orders.values()) > 0.9


@pytest.mark.parametrize("every", SOME)
def test_nanotron_takes_as_long_as_two_constants_of_its_machines_say(every: int) -> None:
    """Nothing is fitted to this half of the rows."""
    assert missed(planned(row)[1] / row.seconds for row in OTHER[::every]) < 0.12


@pytest.mark.slow
def test_two_constants_fit_the_other_half() -> None:
    """No neighbouring constants have a smaller mean error on these rows.

    Errors above 30 % count as 30 %, because some runs were slow.
    """

    def cost(reached: float, outside: float) -> float:
        here = replace(H100, products=reached * H100.peak, outside=outside)
        return statistics.mean(min(abs(step(row, here) / row.seconds - 1), 0.3) for row in FIT[::2])

    best = cost(REACHED, OUTSIDE)
    for factor in (0.8, 1.25):
        assert best < min(cost(REACHED * factor, OUTSIDE), cost(REACHED, OUTSIDE * factor))


def places(rows: Iterable[Row]) -> dict[tuple[str, int], int]:
    """Return the place of a plan's first choice among the measured layouts, by model and GPUs.

    The first choice is the fastest layout that fits well, by its planned time.
    """
    alike: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row.model, row.gpus].append(row)
    found = {}
    for key, rivals in alike.items():
        if len(rivals) <= 3:
            continue
        first = min(
            rivals, key=lambda row: (planned(row)[0] > TIGHT * H100.memory, planned(row)[1])
        )
        found[key] = sum(row.seconds < first.seconds for row in rivals) + 1
        print(
            *key,
            f"place {found[key]} of {len(rivals)}: dp {first.dp} tp {first.tp} pp {first.pp} "
            f"{first.shard}",
        )
    return found


@pytest.mark.slow
def test_the_first_choice_is_among_the_best_three() -> None:
    """The layouts ran twice, with and without ZeRO, in about the same time.

    Other layouts took up to 14 times longer in one of the two runs.
    """
    twins = defaultdict(list)
    for row in NANOTRON:
        twins[replace(row, shard="", tok_s_gpu=0.0, gib=0.0, note="", where="")].append(row)
    pairs = [pair for pair in twins.values() if len(pair) == 2]
    calm = [
        row
        for pair in pairs
        for row in pair
        if row.seconds <= 1.5 * min(twin.seconds for twin in pair)
    ]
    assert len(calm) > 0.8 * 2 * len(pairs)
    assert statistics.mean(place <= 3 for place in places(calm).values()) >= 0.8
    # Over all rows: on 64 machines every pipeline send waited a quarter of a second, which no
    # layout explains
    assert statistics.mean(place <= 3 for place in places(NANOTRON).values()) >= 6 / 9


@pytest.mark.parametrize(
    ("framework", "most", "gib"),
    [("bridge", 0.1, 0), pytest.param("torchtitan", 0.31, 0.15, marks=pytest.mark.slow)],
)
def test_nominal_plans_are_near_runs_of(framework: str, most: float, gib: float) -> None:
    times: dict[Row, float] = {}
    sizes: dict[Row, float] = {}
    for row in published(framework):
        # equal arguments for all releases of a layout, which is thus computed once
        seconds, memory = nominal(replace(row, tok_s_gpu=1.0, gib=1.0, where=""))
        times[row] = seconds / row.seconds
        if row.gib:
            sizes[row] = memory / row.gib
        layout = (
            f"{row.gpus} GPUs: tp {row.tp} pp {row.pp} cp {row.cp}, {row.seq} tokens, "
            f"{row.note}, {row.where}:"
        )
        print(
            row.model,
            layout,
            f"{times[row]:.2f} of {row.seconds:.2f} s, {sizes.get(row, 0):.2f} of {row.gib} GiB",
        )
    assert missed(times.values()) < most
    assert not sizes or missed(sizes.values()) < gib


def test_a_ring_over_machines_takes_all_their_adapters() -> None:
    """Computed by hand for the sums and parameters of 16 replicas, and eight messages of 16 tp
    ranks.

    Three quarters of these messages are waited for.
    """
    attention = dict.fromkeys(("fused", "flex"), (1e30, 1e30))
    here = replace(
        H100,
        inside=1e10,
        outside=1e9,
        latency=0.0,
        products=1e30,
        bandwidth=1e30,
        attention=attention,
    )
    assert [here.ring(*of) / 1e9 for of in ((8, 1), (16, 1), (16, 4), (2, 8), (2, 64))] == [
        10,
        8,
        2,
        1,
        1,
    ]
    assert here.link(16, 1) == 1e9
    sizes = {
        "vocab_size": 4096,
        "seq_length": 64,
        "num_layers": 4,
        "num_attention_heads": 16,
        "micro_batch_size": 1,
    }
    replicas = with_values(RunConfig(), {**sizes, "global_batch_size": 16})
    moved = stage_parameters(replicas, [range(4)]) * (4 + 4) * 15 / 16
    alike = [
        step_time(replicas, 16, replace(here, latency=seconds), PackSample()).dp
        for seconds in (0.0, 4e-3)
    ]
    # one bucket, 15 hops in each direction
    assert alike == pytest.approx([moved / 8e9, moved / 8e9 + 2 * 15 * 1e-3])
    sharers = with_values(
        RunConfig(), {**sizes, "global_batch_size": 1, "tensor_model_parallel_size": 16}
    )
    moved = 4 * 6 * 64 * sharers.model.hidden_size * 4 * 15 / 16
    assert step_time(sharers, 16, here, PackSample()).tp == pytest.approx(moved / 8e9)
