"""Which documents share a pack: best-fit decreasing for tokens, and first-fit with a second budget
for image crops.

Every item has one pack, and the result is deterministic. Lengths are padded ones. Items keep their
arrival order inside a pack. All items of one length that go to packs of one free space move in one
step.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Pack p holds the items `items[starts[p] : starts[p + 1]]`, ascending item numbers.

    items: int64 [n], each item number 0..n-1 exactly once. starts: int64 [packs + 1], rising from 0
    to n.
    """

    items: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.starts) - 1

    def pack(self, p: int) -> np.ndarray:
        """Item numbers of pack p, ascending, int64 [k]."""
        return self.items[self.starts[p] : self.starts[p + 1]]


def _packing(pack_of: np.ndarray) -> Packing:
    """A packing by the pack number of each item, int64 [n], numbers 0..packs-1 all present."""
    items = np.argsort(pack_of, kind="stable")  # [n]; stable: arrival order within a pack
    counts = np.bincount(pack_of) if len(pack_of) else np.zeros(0, np.int64)
    return Packing(
        items.astype(np.int64), np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    )


def cut_oversize(lengths: np.ndarray, longest: int, truncate: bool) -> np.ndarray:
    """Documents of `lengths` [d] >= 1 as pieces of at most `longest` tokens: int64 [n, 3],
    document, start and stop.

    Longer documents are cut from the front; with `truncate`, only their first piece is kept.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = (
        np.ones_like(lengths) if truncate else -(-lengths // longest)
    )  # [d]: pieces of each document
    document = np.repeat(np.arange(len(lengths)), counts)  # [n]
    firsts = np.cumsum(counts) - counts  # [d]: number of each document's first piece
    start = (np.arange(len(document)) - firsts[document]) * longest
    return np.stack([document, start, np.minimum(start + longest, lengths[document])], axis=1)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Packing:
    """Exact best-fit decreasing: longest item first, into the pack where least space is left over.

    lengths: integers [n], 1 <= length <= capacity. Equal items go in arrival order. Among packs of
    equal free space those that reached it last are filled as one group, in their order: `[6, 6, 3,
    3]` in 10 is `[6, 3], [6, 3]`. Packs are numbered by their longest item. Time: O(n) array work
    plus a bisection per step (at most a few per distinct length in practice).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    pack_of = np.empty(len(lengths), np.int64)  # [n]: the answer
    order = np.argsort(
        -lengths, kind="stable"
    )  # [n]: items, longest first, equal ones as they arrived
    values, counts = np.unique(lengths, return_counts=True)  # [distinct], rising
    free_spaces: list[int] = []  # rising; the values that some pack has left
    packs_with_free: dict[
        int, list[int]
    ] = {}  # the packs of each free space, last filled at the end

    def put(packs: list[int], free: int) -> None:
        if free and packs:
            if free not in packs_with_free:
                packs_with_free[free] = []
                bisect.insort(free_spaces, free)
            packs_with_free[free] += packs

    num_packs, done = 0, 0  # `order[:done]` has packs
    for length, remaining in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while remaining:
            best = bisect.bisect_left(free_spaces, length)
            if best == len(free_spaces):  # open all the packs this length can fill at once
                free, each = capacity, capacity // length
                needed = -(-remaining // each)
                packs = list(range(num_packs, num_packs + needed))
                num_packs += needed
            else:  # a pack that was the best fit stays it until the length no longer fits
                free = free_spaces[best]
                each, available = free // length, packs_with_free[free]
                needed = min(len(available), -(-remaining // each))
                packs = available[-needed:]
                del available[-needed:]
                if not available:
                    del packs_with_free[free]
                    del free_spaces[best]
            placed = min(
                remaining, needed * each
            )  # `each` items go to every pack, fewer to the last
            pack_of[order[done : done + placed]] = np.repeat(packs, each)[:placed]
            last = placed - (needed - 1) * each  # items in the last of these packs
            put(packs[:-1], free - each * length)
            put(packs[-1:], free - last * length)
            done, remaining = done + placed, remaining - placed
    return _packing(pack_of)


def two_budgets(
    tokens: np.ndarray,
    crops: np.ndarray,
    token_capacity: int,
    crop_capacity: int,
    window: int = 4096,
) -> Packing:
    """First fit under two budgets, tokens and image crops, for each window of consecutive items on
    its own.

    Three orders are tried per window: arrival, decreasing by the larger share of its budget,
    decreasing by tokens. The one with the fewest packs is kept, the earlier on a tie. Larger
    windows waste less.

    tokens: integers [n], 1 <= tokens <= token_capacity; crops: integers [n], 0 <= crops <=
    crop_capacity.
    """
    tokens, crops = np.asarray(tokens, dtype=np.int64), np.asarray(crops, dtype=np.int64)
    pack_of, num_packs = np.empty(len(tokens), np.int64), 0
    for begin in range(0, len(tokens), window):
        here = slice(begin, min(begin + window, len(tokens)))
        share = np.maximum(
            tokens[here] / token_capacity, crops[here] / max(crop_capacity, 1)
        )  # [items here]
        orders = (
            np.arange(here.stop - here.start),
            np.argsort(-share, kind="stable"),
            np.argsort(-tokens[here], kind="stable"),
        )
        tried = [
            _first_fit(tokens[here], crops[here], token_capacity, crop_capacity, order)
            for order in orders
        ]
        best = min(tried, key=lambda found: int(found.max()))  # min keeps the first of equals
        pack_of[here] = best + num_packs
        num_packs += int(best.max()) + 1
    return _packing(pack_of)


def _first_fit(
    tokens: np.ndarray,
    crops: np.ndarray,
    token_capacity: int,
    crop_capacity: int,
    order: np.ndarray,
) -> np.ndarray:
    """Pack number of each item, int64 [n]: the first opened pack with room in both budgets, items
    taken in `order`.
    """
    pack_of = np.empty(len(tokens), np.int64)
    free_tokens = np.full(
        len(tokens), token_capacity, np.int64
    )  # [packs at most]; a pack not yet opened has all
    free_crops = np.full(len(tokens), crop_capacity, np.int64)
    opened = 0
    for item in order.tolist():
        need_tokens, need_crops = tokens[item], crops[item]
        # the pack after the opened ones always fits, so argmax of the booleans finds the first True
        fits = (free_tokens[: opened + 1] >= need_tokens) & (free_crops[: opened + 1] >= need_crops)
        chosen = int(fits.argmax())
        opened = max(opened, chosen + 1)
        pack_of[item] = chosen
        free_tokens[chosen] -= need_tokens
        free_crops[chosen] -= need_crops
    return pack_of
