"""Assign documents to packs.

Best-fit decreasing considers only tokens; first fit considers tokens and image crops. The result is
deterministic. Each item is assigned to one pack, and the items of a pack keep their arrival order.
Lengths include padding.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Assignment of items to packs. Pack p contains `items[starts[p] : starts[p + 1]]`, ascending.

    items: int64 [n], each item number 0..n-1 exactly once. starts: int64 [packs + 1], ascending
    from 0 to n.
    """

    items: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.starts) - 1

    def pack(self, p: int) -> np.ndarray:
        """Return the item numbers of pack p, ascending, int64 [k]."""
        return self.items[self.starts[p] : self.starts[p + 1]]


def _packing(pack_of: np.ndarray) -> Packing:
    """Convert the pack number of each item, int64 [n], to a packing.

    Every pack number 0..packs-1 must occur.
    """
    # A stable sort keeps the arrival order within a pack.
    items = np.argsort(pack_of, kind="stable")  # [n]
    counts = np.bincount(pack_of) if len(pack_of) else np.zeros(0, np.int64)  # [packs]
    starts = np.concatenate(([0], np.cumsum(counts)))  # [packs + 1]
    return Packing(items.astype(np.int64), starts.astype(np.int64))


def cut_oversize(lengths: np.ndarray, longest: int, truncate: bool) -> np.ndarray:
    """Cut documents with `lengths` [d], each >= 1, into pieces of at most `longest` tokens.

    Return int64 [n, 3]: document, start and stop of each piece. All pieces of a document except the
    last have `longest` tokens. With `truncate`, only the first piece is kept.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = -(-lengths // longest)  # [d]: pieces of each document
    if truncate:
        counts = np.ones_like(lengths)
    document = np.repeat(np.arange(len(lengths)), counts)  # [n]
    firsts = np.cumsum(counts) - counts  # [d]: number of each document's first piece
    start = (np.arange(len(document)) - firsts[document]) * longest
    stop = np.minimum(start + longest, lengths[document])
    return np.stack([document, start, stop], axis=1)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Packing:
    """Return the exact best-fit decreasing packing.

    Items are packed from longest to shortest, each into the pack with the least free space in which
    it fits. lengths: integers [n], 1 <= length <= capacity. Items of equal length are packed in
    arrival order. Among packs with equal free space, the packs that reached it last are filled as
    one group, in their order: `[6, 6, 3, 3]` with capacity 10 gives `[6, 3], [6, 3]`. Packs are
    numbered in the order of their longest items.

    One step packs all items of one length that go to packs with the same free space. Time: O(n)
    array work plus a bisection per step (in practice at most a few steps per distinct length).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    pack_of = np.empty(len(lengths), np.int64)  # [n]: the result
    # Item numbers, longest first; items of equal length stay in arrival order.
    order = np.argsort(-lengths, kind="stable")  # [n]
    values, counts = np.unique(lengths, return_counts=True)  # [distinct], ascending
    free_spaces: list[int] = []  # the free spaces of all open packs, ascending
    # Pack numbers by free space; the most recently filled pack is at the end.
    packs_with_free: dict[int, list[int]] = {}

    def put(packs: list[int], free: int) -> None:
        """Store packs under their free space; omit full packs."""
        if free and packs:
            if free not in packs_with_free:
                packs_with_free[free] = []
                bisect.insort(free_spaces, free)
            packs_with_free[free] += packs

    num_packs = 0
    done = 0  # the items `order[:done]` are packed
    for length, remaining in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while remaining:
            best = bisect.bisect_left(free_spaces, length)
            if best == len(free_spaces):
                # No open pack has enough space: open packs for all remaining items of this length.
                free = capacity
                each = capacity // length
                needed = -(-remaining // each)
                packs = list(range(num_packs, num_packs + needed))
                num_packs += needed
            else:
                # The best-fitting pack remains the best fit until it has no space for this length,
                # so it gets all items that fit at once.
                free = free_spaces[best]
                each = free // length
                available = packs_with_free[free]
                needed = min(len(available), -(-remaining // each))
                packs = available[-needed:]
                del available[-needed:]
                if not available:
                    del packs_with_free[free]
                    del free_spaces[best]
            # Every pack gets `each` items; the last one may get fewer.
            placed = min(remaining, needed * each)
            pack_of[order[done : done + placed]] = np.repeat(packs, each)[:placed]
            last = placed - (needed - 1) * each  # items of the last pack
            put(packs[:-1], free - each * length)
            put(packs[-1:], free - last * length)
            done += placed
            remaining -= placed
    return _packing(pack_of)


def two_budgets(
    tokens: np.ndarray,
    crops: np.ndarray,
    token_capacity: int,
    crop_capacity: int,
    window: int = 4096,
) -> Packing:
    """Return a first-fit packing with two budgets per pack: tokens and image crops.

    Each window of consecutive items is packed separately. Three orders are tried: by arrival, by
    decreasing share of the scarcer budget, and by decreasing tokens. The order with the fewest
    packs is used; on a tie, the first such order. Larger windows waste less space.

    tokens: integers [n], 1 <= tokens <= token_capacity. crops: integers [n], 0 <= crops <=
    crop_capacity.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    crops = np.asarray(crops, dtype=np.int64)
    pack_of = np.empty(len(tokens), np.int64)
    num_packs = 0
    for begin in range(0, len(tokens), window):
        here = slice(begin, min(begin + window, len(tokens)))
        # Each item's share of a budget; the larger of its two shares counts.
        token_share = tokens[here] / token_capacity  # [items here]
        crop_share = crops[here] / max(crop_capacity, 1)  # [items here]
        share = np.maximum(token_share, crop_share)
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
    """Return the pack number of each item, int64 [n].

    Items are packed in `order`, each into the first pack in which both budgets suffice.
    """
    pack_of = np.empty(len(tokens), np.int64)
    # Free budgets of each pack, [n], because there are at most n packs. Packs that are not open are
    # empty.
    free_tokens = np.full(len(tokens), token_capacity, np.int64)
    free_crops = np.full(len(tokens), crop_capacity, np.int64)
    opened = 0
    for item in order.tolist():
        need_tokens, need_crops = tokens[item], crops[item]
        # The pack after the open ones always fits, so argmax finds the first True.
        fits = (free_tokens[: opened + 1] >= need_tokens) & (free_crops[: opened + 1] >= need_crops)
        chosen = int(fits.argmax())
        opened = max(opened, chosen + 1)
        pack_of[item] = chosen
        free_tokens[chosen] -= need_tokens
        free_crops[chosen] -= need_crops
    return pack_of
