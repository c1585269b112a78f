"""Packing one item at a time, and image shards by trying every partition: slow and obvious."""

from __future__ import annotations

import itertools


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the item numbers of each pack.

    Items are placed longest first, each in the pack with the least free space that still fits.
    """
    packs: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p in range(len(packs)) if free[p] >= lengths[item]]
        if fitting:
            best = min(fitting, key=lambda p: free[p])
        else:
            best = len(packs)
            packs.append([])
            free.append(capacity)
        packs[best].append(item)
        free[best] -= lengths[item]
    return packs


def first_fit(
    tokens: list[int], crops: list[int], token_capacity: int, crop_capacity: int, order: list[int]
) -> list[list[int]]:
    """Return the item numbers of each pack.

    Items are placed in `order`, each in the first pack with room in both budgets.
    """
    packs: list[list[int]] = []
    for item in order:
        for pack in packs:
            used_tokens, used_crops = sum(tokens[i] for i in pack), sum(crops[i] for i in pack)
            if (
                used_tokens + tokens[item] <= token_capacity
                and used_crops + crops[item] <= crop_capacity
            ):
                pack.append(item)
                break
        else:
            packs.append([item])
    return packs


def least_largest_cost(costs: list[int], ranks: int) -> int:
    """Return the optimum over all contiguous partitions into `ranks` parts; parts may be empty."""
    n = len(costs)
    partitions = itertools.combinations_with_replacement(range(n + 1), ranks - 1)
    return min(
        max(
            sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, n))
        )  # every choice of inner cuts
        for cuts in partitions
    )
