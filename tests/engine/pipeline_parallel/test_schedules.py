"""Simulation of every schedule: it finishes, respects its memory and bubble, and does all work once
and in order.

The partition of layers into virtual stages is compared with an exhaustive search.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.pipeline_parallel.partition import partition
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind, schedule
from megacp.engine.pipeline_parallel.timeline import bubble, timeline
from tests.reference.pipeline import every_partition
from tests.reference.schedule_simulator import hangs_where_computes_wait, in_flight_bound, simulate

times = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.5])


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw (stages, microbatches, chunks)."""
    num_stages = draw(st.integers(1, 9))
    return num_stages, draw(st.integers(1, 30)), draw(st.integers(1, 5)) if num_stages > 1 else 1


def lists_of(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, first_trained: int = 0
) -> list[list[Action]]:
    sizes = num_stages, num_microbatches, num_chunks
    return [
        schedule(name, stage, *sizes, first_trained=first_trained) for stage in range(num_stages)
    ]


training, zero_bubble, evaluation = (
    partial(lists_of, name) for name in ("1f1b", "zero_bubble", "forward_only")
)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=150)
@given(sizes(), st.sampled_from([None, 1, 2]))
def test_any_sizes_end_within_the_stated_memory(
    size: tuple[int, int, int], window: int | None
) -> None:
    """This holds for any durations; a window of one send is the strictest possible runtime."""
    num_stages, num_microbatches, num_chunks = size
    result = simulate(training(*size), num_chunks, send_window=window)
    for stage, peak in enumerate(result.peak_in_flight):
        assert peak <= in_flight_bound(stage, num_stages, num_microbatches, num_chunks)
    simulate(evaluation(*size), num_chunks, send_window=window)
    waiting = simulate(zero_bubble(*size), num_chunks, send_window=window)
    assert waiting.peak_in_flight <= result.peak_in_flight
    assert waiting.peak_put_off == tuple(
        min(s, num_microbatches * num_chunks - 1) for s in range(num_stages)
    )


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "first 1f1b", "first zero_bubble"])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_stages_before_the_first_trained_one_only_run_forwards(name: str, num_chunks: int) -> None:
    """No other stage waits for their gradients, even with the smallest send window."""
    for num_stages in (2, 3, 4):
        for microbatches in (1, 2, 3, 5, 8):
            for first in range(num_stages * num_chunks):
                lists = lists_of(name, num_stages, microbatches, num_chunks, first)
                simulate(lists, num_chunks, send_window=1, first_trained=first)
                backwards = sum(
                    action.kind is Kind.BACKWARD for actions in lists for action in actions
                )
                sent = sum(
                    action.kind is Kind.SEND_BACKWARD for actions in lists for action in actions
                )
                trained = num_stages * num_chunks - first
                assert (backwards, sent) == (trained * microbatches, (trained - 1) * microbatches)
                if num_chunks == 1:
                    assert not hangs_where_computes_wait(lists)


@pytest.mark.parametrize(
    ("name", "most_chunks"),
    [
        ("1f1b", 1),
        ("zero_bubble", 1),
        ("forward_only", 4),
        ("first 1f1b", 4),
        ("first zero_bubble", 4),
    ],
)
def test_stages_end_though_every_compute_waits_for_its_device(name: str, most_chunks: int) -> None:
    """Interleaved 1F1B would not finish.

    Its first step, which loads kernels, therefore uses the `first` schedule.
    """
    for chunks in range(1, most_chunks + 1):
        for stages in range(2, 9):
            for microbatches in (1, 2, 3, 5, 8):
                lists = lists_of(name, stages, microbatches, chunks)
                assert hangs_where_computes_wait(lists) == [], (
                    f"{stages} stages, {microbatches} microbatches"
                )
                if name.startswith("first"):
                    simulate(lists, chunks)
    assert hangs_where_computes_wait(lists_of("1f1b", 2, 4, 2)), "so it needs the first step"


@settings(deadline=None, derandomize=True)
@given(sizes())
def test_every_chunk_runs_each_microbatch_once_in_one_order(size: tuple[int, int, int]) -> None:
    _, num_microbatches, num_chunks = size
    trained = {Kind.FORWARD, Kind.BACKWARD}
    lists = [(actions, trained) for actions in training(*size)]
    lists += [(actions, {Kind.FORWARD}) for actions in evaluation(*size)]
    for stage, actions in enumerate(zero_bubble(*size)):
        lists.append(
            (actions, trained | {Kind.WEIGHTS} if stage > 0 or num_chunks > 1 else trained)
        )
    for actions, computes in lists:
        assert {a.kind for a in actions} & {Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS} == computes
        for chunk in range(num_chunks):
            for kind in computes:
                order = [a.microbatch for a in actions if a.kind is kind and a.chunk == chunk]
                assert order == list(range(num_microbatches))
    lists = training(*size)
    at_first = {a.kind for a in lists[0] if a.chunk == 0}
    at_last = {a.kind for a in lists[-1] if a.chunk == num_chunks - 1}
    assert not at_first & {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
    assert not at_last & {Kind.SEND_FORWARD, Kind.RECV_BACKWARD}


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 30), times, times)
def test_the_bubble_of_1f1b_is_the_formula(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    """The bubble is (pp - 1) / m of the ideal time for any ratio of backward to forward and m >= 1.

    Tolerance: float additions.
    """
    result = simulate(training(stages, microbatches, 1), 1, forward, backward)
    assert result.bubble == pytest.approx((stages - 1) / microbatches, abs=1e-9)


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 5), times, times)
def test_the_bubble_of_interleaved_is_the_formula(
    stages: int, groups: int, chunks: int, forward: float, backward: float
) -> None:
    """The bubble is (pp - 1) / (v m) if groups are full."""
    result = simulate(training(stages, groups * stages, chunks), chunks, forward, backward)
    assert result.bubble == pytest.approx((stages - 1) / (chunks * groups * stages), abs=1e-9)


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(
    st.integers(2, 8), st.integers(1, 3), st.integers(1, 3), times, st.sampled_from([1.0, 1.4, 2.0])
)
def test_the_bubble_of_zero_bubble_is_the_formula(
    stages: int, groups: int, chunks: int, weights: float, ratio: float
) -> None:
    """The bubble is (pp - 1) (f + b - w) / (v m) if groups are full and f and b are at least w."""
    forward = backward = weights * ratio
    lists = zero_bubble(stages, groups * stages, chunks)
    result = simulate(lists, chunks, forward, backward, weights_time=weights)
    saved = (forward + backward - weights) / (forward + backward + weights)
    assert result.bubble == pytest.approx(
        saved * (stages - 1) / (chunks * groups * stages), abs=1e-9
    )
    assert (
        result.makespan
        < simulate(
            training(stages, groups * stages, chunks), chunks, forward, backward + weights
        ).makespan
    )


def test_four_stages_keep_their_bubble_and_memory() -> None:
    """Check the formulas of the slow properties at one size each.

    A short last group of 1 would hang with this warm-up.
    """
    full, bounds = (
        simulate(training(4, 8, 3), 3),
        [in_flight_bound(stage, 4, 8, 3) for stage in range(4)],
    )
    assert (
        full.bubble == pytest.approx(3 / (3 * 8), abs=1e-9) and list(full.peak_in_flight) == bounds
    )
    simulate(training(4, 5, 3), 3, send_window=1)
    assert simulate(zero_bubble(4, 8, 1), 1, weights_time=1.0).peak_put_off == (0, 1, 2, 3)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    "size", [(1, 3, 1), (3, 2, 1), (4, 8, 1), (4, 8, 2), (3, 7, 3), (2, 1, 2)], ids=str
)
def test_times_of_the_dry_run_are_those_of_the_simulator(
    name: str, size: tuple[int, int, int]
) -> None:
    """This includes cases without a formula: a short group, or fewer microbatches than stages.

    Tolerance: float additions.
    """
    stages, _, chunks = size
    times = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.25, Kind.WEIGHTS: 0.75}
    spans = timeline(
        [SCHEDULES[name](stage, *size) for stage in range(stages)], chunks, [times] * stages
    )
    forward, backward, weights = (time / chunks for time in times.values())
    if name == "1f1b" or stages == 1:  # no list has an action for weights
        backward += weights
    expected = simulate(lists_of(name, *size), chunks, forward, backward, weights_time=weights)
    assert max(row[-1].stop for row in spans) == pytest.approx(expected.makespan, abs=1e-9)
    assert bubble(spans) == pytest.approx(expected.bubble, abs=1e-9)


def test_the_lists_of_two_stages_are_these() -> None:
    """Show a complete list: 1F1B of stage 0 of 2 with 3 microbatches."""
    shown = [f"{a.kind.value} {a.microbatch}" for a in schedule("1f1b", 0, 2, 3)]
    assert shown == [
        "forward 0", "send-forward 0",
        "forward 1", "send-forward 1", "recv-backward 0", "backward 0",
        "forward 2", "send-forward 2", "recv-backward 1", "backward 1",
        "recv-backward 2", "backward 2",
    ]  # fmt: skip


costs = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[float], float, float, int]:
    layers = draw(st.lists(costs, min_size=1, max_size=8))
    return layers, draw(costs), draw(costs), draw(st.integers(1, len(layers)))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(cuts())
def test_no_cut_is_cheaper_or_as_cheap_and_more_even(
    case: tuple[list[float], float, float, int],
) -> None:
    rated = [
        (
            max(parts),
            sum(c * c for c in parts),
            sum(len(r) ** 2 for r in ranges),
            [r.stop for r in ranges],
            ranges,
        )
        for ranges, parts in every_partition(*case)
    ]
    assert partition(*case) == min(rated, key=lambda row: row[:4])[-1]


def test_cuts_to_read() -> None:
    """Check partitions that can be verified by hand.

    A heavy head removes layers from the last stage. First stages, which keep the most activations,
    are lighter. The largest cost matters more than evenness. Many layers are partitioned quickly.
    """
    assert partition([1.0] * 8, 1.0, 3.0, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
    assert partition([0.1] * 7, 0.0, 0.0, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    assert partition([1.0, 6.0, 3.0, 3.0], 0.0, 0.0, 3) == [range(0, 1), range(1, 2), range(2, 4)]
    found = partition([1.0 + 0.01 * (i % 7) for i in range(160)], 2.5, 4.75, 64)
    assert len(found) == 64 and max(len(part) for part in found) <= 3
