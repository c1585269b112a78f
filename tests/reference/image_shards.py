"""Image shards by trying every partition, and by a table of all of them: slow and obvious."""

from __future__ import annotations

import itertools

import numpy as np


def least_largest_cost(costs: list[int], ranks: int) -> int:
    """The optimum over all contiguous partitions into `ranks` parts, empty ones allowed."""
    n = len(costs)
    partitions = itertools.combinations_with_replacement(range(n + 1), ranks - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, n)))  # every choice of inner cuts
        for cuts in partitions
    )


def least_largest_costs(costs: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [packs]: the same for many packs of equally many units, costs [packs, u], by dynamic programming."""
    packs, units = costs.shape
    running = np.concatenate((np.zeros((packs, 1), np.int64), np.cumsum(costs, 1)), 1)
    best = running.copy()  # [packs, u + 1]: units 0..i on one rank
    for _ in range(ranks - 1):
        following = best.copy()
        for i in range(1, units + 1):
            last = running[:, i : i + 1] - running[:, : i + 1]  # cost of units j..i on the last rank
            following[:, i] = np.maximum(best[:, : i + 1], last).min(1)
        best = following
    return best[:, -1]
