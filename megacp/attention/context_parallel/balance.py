"""The balanced layout: equal tokens and equal attention area on every rank, while documents stay on
few ranks.

Documents are sorted by mean cost per token (allowed keys per query). Rank r takes a stretch from
the light end and one from the heavy end: T / cp tokens together, with 1 / (cp - r) of the remaining
area. Prefix sums give the area of every possible cut. One causal document comes out as zigzag, one
bidirectional document as contiguous. A cut near the best one is taken where it costs clearly fewer
exchanged keys and little balance.

Eight causal tokens over two ranks see 1 to 8 keys, 36 together. Rank 0 is to have four of them with
an area of 18:

    light from the low end    4            3            2            1            0
    tokens of rank 0          0 1 2 3      0 1 2 7      0 1 6 7      0 5 6 7      4 5 6 7
    area                      10           14           18           22           26

Letters: `T` tokens of the row; a cut at index p stands in front of that token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megacp.attention.ops.mask import UNLIMITED, Metadata, Reach

AREA_SLACK = 0.01
"""Most error of a rank's area, as a share of its target, for a cheaper cut."""
WORTHWHILE = 0.75
"""A cut besides the one of best balance must cost at most this share of its exchanged keys."""


Mix = Mapping[Reach, int]
"""Layers by how far they look."""
ALIKE: Mix = {UNLIMITED: 1}


def row_area(metadata: Metadata, mix: Mix = ALIKE) -> np.ndarray:
    """int64 `[T]`: how many tokens of the row each one sees, summed over the layers."""
    return sum(
        (metadata.cost_within(reach) * layers for reach, layers in mix.items()),
        np.zeros(len(metadata), int),
    )


def deal_balanced(metadata: Metadata, cp: int, mix: Mix = ALIKE) -> np.ndarray:
    """Indices `[cp, T / cp]` into the row, ascending on each rank: a stretch from either end of
    what is left.
    """
    cost = row_area(metadata, mix)
    order = density_order(metadata, cost)
    keys_cut = keys_crossing(metadata.take(order))  # [T + 1]
    area = np.concatenate(
        [[0], np.cumsum(cost[order])]
    )  # [T + 1], of the first 0, 1, ..., T tokens
    low = 0  # what is left is order[low:high]
    high = len(order)
    share = len(order) // cp  # tokens of a rank
    ranks = []
    for left in range(
        cp, 0, -1
    ):  # each aims at its part of what is left, so errors do not pile up on the last rank
        light = _light_tokens(area, keys_cut, (low, high), share, (area[high] - area[low]) / left)
        heavy = high - (share - light)
        ranks.append(np.sort(np.concatenate([order[low : low + light], order[heavy:high]])))
        low += light
        high = heavy
    return np.stack(ranks)


def density_order(metadata: Metadata, cost: np.ndarray) -> np.ndarray:
    """Indices `[T]`: padding, then documents by ascending mean of `cost[T]`, each in its own
    order.
    """
    number = metadata.document + 1  # padding is 0
    mean = np.bincount(number, weights=cost) / np.maximum(np.bincount(number), 1)
    # the last key counts most; `number` parts documents of one mean
    return np.lexsort((metadata.order, number, mean[number], number > 0))


def keys_crossing(metadata: Metadata) -> np.ndarray:
    """int64 `[T + 1]`: K/V rows that would travel if the tokens were cut in front of each token,
    for two ranks.

    Documents must be stretches of `metadata[T]`, in the row's order. A key travels if a query
    across the cut sees it.
    """
    n = len(metadata)
    here = np.arange(n)  # [T], as are all arrays but `steps`
    # the last and the first token that see the key; itself for padding
    stretch = np.cumsum(np.diff(metadata.document, prepend=metadata.document[:1]) != 0) * (n + 1)
    last = np.searchsorted(stretch + metadata.order, stretch + metadata.leave) - 1
    last = np.where(metadata.leave > 0, last, here)
    _, begin, span = np.unique(metadata.span, return_index=True, return_inverse=True)
    first = np.where(metadata.span != 0, begin[span.reshape(-1)], here)
    # [T + 2]: +1 where a key begins to cross cuts, -1 behind its last one; the running sum counts
    # crossing keys
    steps = np.bincount(here + 1, minlength=n + 2) - np.bincount(
        last + 1, minlength=n + 2
    )  # cuts in (here, last]
    steps += np.bincount(first + 1, minlength=n + 2) - np.bincount(
        here + 1, minlength=n + 2
    )  # cuts in (first, here]
    return np.cumsum(steps)[: n + 1]


def _light_tokens(
    area: np.ndarray, keys_cut: np.ndarray, ends: tuple[int, int], share: int, target: float
) -> int:
    """How many of a rank's `share` tokens come from the light end of the stretch `ends` for an area
    of `target`.
    """
    low, high = ends
    light = np.arange(share + 1)  # every choice; arrays below are [share + 1]
    cut_low = low + light  # it takes order[low:cut_low] and order[cut_high:high]
    cut_high = high - (share - light)
    error = np.abs(area[cut_low] - area[low] + area[high] - area[cut_high] - target)
    best = (
        share if error[share] <= error.min() else int(np.argmin(error))
    )  # a tie takes one stretch, not two
    keys = keys_cut[cut_low] + keys_cut[cut_high]
    # one stretch: the other end stays where it was cut before
    keys[0] = keys_cut[high - share]
    keys[share] = keys_cut[low + share]
    near = np.flatnonzero(error <= max(AREA_SLACK * target, error.min()))
    cheap = int(near[np.argmin(keys[near])])
    return cheap if keys[cheap] <= WORTHWHILE * keys[best] else best
