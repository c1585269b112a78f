"""Predicted seconds of core attention: courses of events worked out by hand, and what is chosen from them."""

from __future__ import annotations

import dataclasses

import pytest

from megacp.core.config.parallel import ParallelConfig
from megacp.core.context_parallel.auto.predict import (
    Candidate,
    KernelWork,
    Machine,
    PassSeconds,
    Predictor,
    RankWork,
    StageWork,
    candidates,
    choose,
    link_name,
    link_names,
)
from megacp.core.context_parallel.sizes import AttentionSizes
from tests.reference.machines import machine

SIZES = AttentionSizes(tokens=0, heads=1, groups=1, dim=1, element=4, wide=8)
"""K/V of one token are 8 bytes, their gradients 16; a pair takes `pair` seconds forward and 2.5 times as long back."""
RING, GATHER, SWAP = Candidate("p2p", "zigzag"), Candidate("all_gather", "zigzag"), Candidate("a2a", "zigzag")
EXCHANGE = Candidate("kv_exchange", "zigzag")


def pairs(*counts: int) -> tuple[KernelWork, ...]:
    return tuple(KernelWork(pairs=count) for count in counts)


def predict(
    ways: Machine, ranks: list[RankWork], candidate: Candidate, sizes: AttentionSizes = SIZES
) -> tuple[float, float]:
    seconds = Predictor(ways, sizes, ranks).seconds(candidate)
    return pytest.approx(seconds.forward, rel=1e-12), pytest.approx(seconds.backward, rel=1e-12)


def ring_ranks(*steps: tuple[int, ...]) -> list[RankWork]:
    """One token on each rank: K/V 8 bytes, gradients 16."""
    return [RankWork(1, KernelWork(pairs=row[0]), None, {1: pairs(*row)}, {}) for row in steps]


def test_a_ring_whose_links_are_slow_takes_all_its_messages() -> None:
    """cp - 1 times the keys, and backward cp - 1 times the gradients besides."""
    slow = machine(3, 1, per_byte=1.0, latency=0.5)
    ranks = ring_ranks((0, 0, 0), (0, 0, 0), (0, 0, 0))
    assert predict(slow, ranks, RING) == (2 * 8.5, 2 * 8.5 + 2 * 16.5)


def test_a_ring_hides_messages_behind_work_but_the_last_gradients() -> None:
    links = machine(2, 1, pair=1.0, per_byte=1.0)
    assert predict(links, ring_ranks((100, 50), (100, 50)), RING) == (150, 2.5 * 150 + 16)


def test_a_ring_waits_for_its_slowest_rank_step_by_step() -> None:
    """Ranks of equal sums wait for each other where their steps differ; free messages still hold them together."""
    free = machine(2, 1, pair=1.0, latency=1e-12)
    assert predict(free, ring_ranks((10, 0), (0, 10)), RING)[0] == pytest.approx(10, rel=1e-9)
    assert predict(free, ring_ranks((0, 10), (0, 10)), RING)[0] == pytest.approx(10, rel=1e-9)
    three = ring_ranks((10, 0, 0), (0, 0, 10), (0, 10, 0))
    assert predict(machine(3, 1, pair=1.0, latency=1e-12), three, RING)[0] == pytest.approx(20, rel=1e-9)


def test_what_does_not_overlap_adds_up() -> None:
    """On a CPU the message is carried by the cores that compute."""
    shared = machine(2, 1, pair=1.0, per_byte=1.0, overlap=0.25)
    assert predict(shared, ring_ranks((100, 50), (100, 50)), RING)[0] == 150 + 0.75 * 8


def test_gathering_hides_behind_own_keys_and_reducing_behind_nothing() -> None:
    links = machine(2, 1, pair=1.0, per_byte=1.0)
    ranks = [RankWork(1, KernelWork(pairs=own), KernelWork(pairs=5), {}, {}) for own in (3, 20)]
    assert predict(links, ranks, GATHER) == (20 + 5, 2.5 * 25 + 16)
    ranks = [RankWork(1, KernelWork(pairs=own), KernelWork(pairs=5), {}, {}) for own in (1, 2)]
    assert predict(links, ranks, GATHER)[0] == 8 + 5


def stages_of(own: int, *stages: tuple[int, int, int]) -> RankWork:
    found = tuple(StageWork(sent, received, KernelWork(pairs=count)) for sent, received, count in stages)
    return RankWork(4, KernelWork(pairs=own), None, {}, {1: found, 2: found})


def test_an_exchange_costs_the_rows_of_the_busiest_rank() -> None:
    links = machine(2, 1, pair=1.0, per_byte=1.0)
    ranks = [stages_of(1, (3, 0, 7)), stages_of(1, (0, 3, 2))]
    for order in (ranks, ranks[::-1]):
        assert predict(links, order, EXCHANGE) == (3 * 8 + 7, max(2.5, 3 * 8) + 2.5 * 7 + 3 * 16)


def test_an_exchange_without_rows_sends_no_message() -> None:
    links = machine(2, 1, pair=1.0, latency=1000.0)
    assert predict(links, [stages_of(5), stages_of(9)], EXCHANGE) == (9, 2.5 * 9)


def test_the_second_stage_of_an_exchange_travels_beside_the_work_on_the_first() -> None:
    """Own 10; rows of stage 1 come at 8, of stage 2 at 18 (posted after own work); work 6 and 5."""
    links = machine(4, 1, pair=1.0, per_byte=1.0)
    ranks = [stages_of(10, (1, 1, 6), (1, 1, 5)) for _ in range(4)]
    way = dataclasses.replace(EXCHANGE, stages=2)
    assert predict(links, ranks, way)[0] == max(10 + 6, 10 + 8) + 5


def test_swapped_heads_attend_to_whole_rows_between_two_exchanges() -> None:
    """Two heads over two ranks, 4 tokens each, 4 bytes: q, k, v of one head there, its output back. Its gradient comes
    with a number for each token and head.
    """
    sizes = dataclasses.replace(SIZES, heads=2, groups=2, wide=4)
    links = machine(2, 2, pair=1.0, per_byte=1.0)
    ranks = [RankWork(4, KernelWork(), None, {2: pairs(100)}, {}) for _ in range(2)]
    row = 4 * 4
    assert predict(links, ranks, SWAP, sizes) == (3 * row + 100 + row, 2 * row + 250 + 3 * row)


def test_a_ring_of_groups_carries_the_keys_of_a_whole_group() -> None:
    sizes = dataclasses.replace(SIZES, heads=2, groups=2, wide=4)
    links = machine(4, 2, pair=1.0, per_byte=1.0)
    ranks = [RankWork(4, KernelWork(), None, {2: pairs(0, 0)}, {}) for _ in range(4)]
    way = Candidate("a2a+p2p", "zigzag", (2, 2))
    row, ring = 4 * 4, 2 * 8 * 4  # one head of 4 tokens; K and V of one head of 8 tokens
    assert predict(links, ranks, way, sizes) == (3 * row + row + ring, 2 * row + 3 * row + ring + ring)


def test_uneven_heads_wait_for_the_rank_with_the_most() -> None:
    sizes = dataclasses.replace(SIZES, heads=3, groups=1)
    links = machine(2, 3, pair=1.0)
    ranks = [RankWork(4, KernelWork(), None, {2: pairs(100)}, {}) for _ in range(2)]
    assert predict(links, ranks, SWAP, sizes)[0] == 2 * 100


def test_a_rank_with_unequal_parts_of_two_groups_attends_to_one_after_the_other() -> None:
    """Eight heads in four groups over three ranks: 2, then 2 + 1, then 1 + 2 heads."""
    sizes = dataclasses.replace(SIZES, heads=8, groups=4)
    works = (pairs(100), pairs(100, 70), pairs(70, 90))
    ranks = [RankWork(4, KernelWork(), None, {3: work}, {}) for work in works]
    assert predict(machine(3, 8, pair=1.0), ranks, SWAP, sizes)[0] == 2 * 100 + 70


def test_calls_and_rows_cost_what_they_are_said_to() -> None:
    cost = dataclasses.replace(machine(2, 1).forward, pair=2.0, row=3.0, call=5.0)
    work = KernelWork(pairs=7, rows=11, calls=13)
    sizes = dataclasses.replace(SIZES, heads=2, dim=4)
    assert work.seconds(cost, sizes) == 8 * (2 * 7 + 3 * 11) + 5 * 13


def test_the_default_stays_unless_something_is_at_least_3_percent_faster() -> None:
    """Would catch a run that changes its transport over noise, and a choice that depends on the order of a dict."""
    default, other, third = RING, EXCHANGE, GATHER
    assert choose({default: 1.0, other: 0.9701}) == default
    assert choose({default: 1.0, other: 0.97}) == other
    assert choose({default: 1.0, other: 0.9, third: 0.9}) == other
    assert choose({default: 1.0, third: 0.9, other: 0.9}) == third
    assert choose({default: 1.0}) == default


def parallel(cp: int, **values: object) -> ParallelConfig:
    return ParallelConfig(context_parallel_size=cp, **{"cp_comm_type": "auto", "cp_layout": "auto", **values})  # type: ignore[arg-type]


def test_candidates_are_what_the_heads_allow_and_the_flags_leave_open() -> None:
    """Would catch a2a with more ranks than heads, and a flag of the user that is overruled."""
    ways = candidates(parallel(8), heads=6)
    assert ways[0] == Candidate("p2p", "zigzag")
    assert {way.hierarchy for way in ways if way.comm_type == "a2a+p2p"} == {(2, 4), (4, 2)}
    assert "a2a" not in {way.comm_type for way in ways}
    assert {way.stages for way in ways if way.comm_type == "kv_exchange"} == {1, 2}
    assert {way.layout for way in ways} == {"zigzag", "contiguous", "balanced"}
    assert len(ways) == len(set(ways))
    assert "a2a" in {way.comm_type for way in candidates(parallel(8), heads=8)}
    fixed = candidates(parallel(4, cp_layout="zigzag_document"), heads=4)
    assert {way.layout for way in fixed} == {"zigzag_document"} and fixed[0].comm_type == "p2p"
    hierarchy = parallel(4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2))
    assert {(way.comm_type, way.hierarchy) for way in candidates(hierarchy, heads=4)} == {("a2a+p2p", (2, 2))}
    staged = candidates(parallel(4, cp_comm_type="kv_exchange", cp_exchange_stages=3), heads=4)
    assert {(way.comm_type, way.stages) for way in staged} == {("kv_exchange", 3)}


@pytest.mark.parametrize(("cp", "heads"), [(2, 1), (2, 8), (6, 4), (8, 8)])
def test_every_candidate_finds_the_links_it_uses(cp: int, heads: int) -> None:
    names = link_names(cp, heads)
    assert len(names) == len(set(names)) and link_name("shift", 1) in names
    sizes = dataclasses.replace(SIZES, heads=heads)
    for way in candidates(parallel(cp), heads):
        joined = way.joined(cp)
        rings = {joined: pairs(*[1] * (cp // joined))} if joined else {}
        one = KernelWork(pairs=1)
        ranks = [RankWork(2, one, one, rings, {way.stages: (StageWork(1, 1, one),)})] * cp
        found = Predictor(machine(cp, heads, pair=1.0, latency=1.0), sizes, ranks).seconds(way)
        assert isinstance(found, PassSeconds) and found.forward > 1 and found.backward > found.forward
