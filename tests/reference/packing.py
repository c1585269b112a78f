"""Packing as the textbook says it: one item at a time, every open pack looked at. Slow and obvious."""

from __future__ import annotations


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Item numbers of each pack: longest first, into the pack with the least free space that still fits."""
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
    """Item numbers of each pack: items in `order`, into the first pack with room in both budgets."""
    packs: list[list[int]] = []
    for item in order:
        for pack in packs:
            used_tokens, used_crops = sum(tokens[i] for i in pack), sum(crops[i] for i in pack)
            if used_tokens + tokens[item] <= token_capacity and used_crops + crops[item] <= crop_capacity:
                pack.append(item)
                break
        else:
            packs.append([item])
    return packs
