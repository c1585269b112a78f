"""Heads for sequence: how heads are dealt, and that any deal is exact."""

from __future__ import annotations

import itertools

import pytest

from megacp.context_parallel.layout import LAYOUTS
from megacp.context_parallel.sizes import head_shares
from tests.context_parallel.test_attention import Case, compare, on_ranks
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("world_size", "heads", "hierarchies"),
    [
        (3, (6, 2), [(3, 1)]),  # the middle rank has a head of either group
        (3, (8, 4), [(3, 1)]),  # two and one head of neighbouring groups: two runs on a rank
        (4, (6, 2), [(2, 2), (4, 1), (1, 4)]),  # three heads of a group over two ranks
        (4, (6, 6), [(2, 2)]),  # six groups over four ranks
        (6, (8, 2), [(2, 3), (3, 2), (6, 1)]),  # four heads of a group over three ranks
        (6, (28, 4), [(3, 2)]),  # 7 + 2, 5 + 5, 2 + 7 heads: a ring for each run
        pytest.param(8, (8, 1), [(2, 4), (4, 2), (8, 1)], marks=pytest.mark.slow),  # one K/V head for all
    ],
    ids=str,
)
def test_heads_that_do_not_divide_by_the_ranks_are_dealt_unevenly(
    world_size: int, heads: tuple[int, int], hierarchies: list[tuple[int, int]]
) -> None:
    """Would catch K/V heads that go to the wrong rank, and replicated ones whose gradients are not summed."""
    cases = [Case("a2a", "balanced", mask, heads=heads) for mask in ("holes", "causal")]
    cases += [Case("a2a+p2p", layout, "holes", heads=heads, hierarchy=h) for h in hierarchies for layout in LAYOUTS]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (5, 5), (28, 4)], ids=str)
def test_every_head_is_dealt_once_beside_its_group(heads: tuple[int, int]) -> None:
    """Runs lie in order, and each of a run's groups serves equally many of its heads."""
    count, groups = heads
    for ranks in range(1, count + 1):
        shares = head_shares(count, groups, ranks)
        assert [h for share in shares for h in range(count)[share.heads]] == list(range(count))
        for share in shares:
            served = [run.heads // run.groups for run in share.runs for _ in range(run.groups)]
            found = [g for g, times in zip(range(groups)[share.groups], served, strict=True) for _ in range(times)]
            assert found == [h // (count // groups) for h in range(count)[share.heads]]
    with pytest.raises(ValueError, match=rf"{count + 1} ranks a head of its own, there are {count} heads"):
        head_shares(count, groups, count + 1)


def best_deal(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """Brute force over all ways to cut the heads: the least largest share, and then the fewest K/V heads on ranks."""
    deals = []
    for inner in itertools.combinations(range(1, heads), ranks - 1):
        cuts = list(itertools.pairwise((0, *inner, heads)))
        copies = sum(len({head // (heads // groups) for head in range(*cut)}) for cut in cuts)
        deals.append((max(high - low for low, high in cuts), copies))
    return min(deals)


SMALL = [(groups * each, groups) for groups in range(1, 5) for each in range(1, 5) if groups * each <= 12]


@pytest.mark.parametrize("heads", SMALL, ids=str)
def test_no_deal_has_a_smaller_largest_share_or_as_small_a_one_with_fewer_keys(heads: tuple[int, int]) -> None:
    for ranks in range(1, heads[0] + 1):
        shares = head_shares(*heads, ranks)
        most = max(len(range(heads[0])[share.heads]) for share in shares)
        copies = sum(len(range(heads[1])[share.groups]) for share in shares)
        assert (most, copies) == best_deal(*heads, ranks)


@pytest.mark.parametrize(
    ("heads", "ranks", "shares", "over_mean"),
    [
        ((6, 2), 3, [2, 2, 2], 1.0),
        ((28, 4), 6, [5, 4, 5, 5, 4, 5], 1.08),
        ((28, 4), 3, [10, 9, 9], 1.08),
        ((40, 8), 6, [7, 7, 7, 7, 6, 6], 1.05),
        ((32, 8), 8, [4] * 8, 1.0),
    ],
    ids=str,
)
def test_the_slowest_rank_has_little_more_than_the_mean(
    heads: tuple[int, int], ranks: int, shares: list[int], over_mean: float
) -> None:
    """Whole groups would give 6/2 over 3 ranks as 3, 1, 2 and 28/4 over 6 as 7, 3, 4, 7, 3, 4: 1.5 times the mean."""
    found = [len(range(heads[0])[share.heads]) for share in head_shares(*heads, ranks)]
    assert sorted(found) == sorted(shares)
    assert max(found) / (heads[0] / ranks) <= over_mean
