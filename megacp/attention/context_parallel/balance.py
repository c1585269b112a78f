"""The balanced layout: equal tokens and attention area on every rank, few ranks per document.

Documents are sorted by their mean cost per token (allowed keys per query). Rank r takes one stretch
from the light end and one from the heavy end. Together they contain T / cp tokens and 1 / (cp - r)
of the remaining area. Prefix sums give the area of every possible cut. A single causal document is
dealt as in the zigzag layout, a single bidirectional document as in the contiguous layout. A cut
close to the best one is preferred if it exchanges clearly fewer keys and costs little balance.

Example: eight causal tokens on two ranks attend to 1 to 8 keys, 36 in total. Rank 0 needs four
tokens with an area of 18, so it takes two from each end:

    light from the low end    4            3            2            1            0
    tokens of rank 0          0 1 2 3      0 1 2 7      0 1 6 7      0 5 6 7      4 5 6 7
    area                      10           14           18           22           26

Letters in shapes: `T` tokens of the row. A cut at index p is placed before token p.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megacp.attention.ops.mask import UNLIMITED, Metadata, Reach

AREA_SLACK = 0.01
"""Largest accepted error in a rank's area for a cheaper cut, as a share of the target area."""
WORTHWHILE = 0.75
"""Largest share of the best-balanced cut's keys that a cheaper cut may exchange."""


Mix = Mapping[Reach, int]
"""Number of layers for each reach."""
ALIKE: Mix = {UNLIMITED: 1}
"""A model whose layers all have unlimited reach."""


def row_area(metadata: Metadata, mix: Mix = ALIKE) -> np.ndarray:
    """Return the number of keys that each token of the row attends to, summed over all layers.

    int64 `[T]`.
    """
    area = np.zeros(len(metadata), int)
    for reach, layers in mix.items():
        area = area + metadata.cost_within(reach) * layers
    return area


def deal_balanced(metadata: Metadata, cp: int, mix: Mix = ALIKE) -> np.ndarray:
    """Return the tokens of each rank, `[cp, T / cp]`, as ascending indices into the row.

    Each rank takes one stretch from either end of the remaining tokens.
    """
    cost = row_area(metadata, mix)
    order = density_order(metadata, cost)
    keys_cut = keys_crossing(metadata.take(order))  # [T + 1]
    area = np.append(0, np.cumsum(cost[order]))  # [T + 1], of the first 0, 1, ..., T tokens
    low = 0  # the remaining tokens are order[low:high]
    high = len(order)
    share = len(order) // cp  # tokens per rank
    ranks = []
    # each rank aims at its part of the remaining area, so errors do not accumulate on the last one
    for left in range(cp, 0, -1):
        target = (area[high] - area[low]) / left
        light = _light_tokens(area, keys_cut, (low, high), share, target)
        heavy = high - (share - light)
        tokens = np.concatenate([order[low : low + light], order[heavy:high]])
        ranks.append(np.sort(tokens))
        low += light
        high = heavy
    return np.stack(ranks)


def density_order(metadata: Metadata, cost: np.ndarray) -> np.ndarray:
    """Return indices `[T]` that sort padding first, then documents by ascending mean `cost[T]`.

    The tokens of a document keep their order.
    """
    number = metadata.document + 1  # 0 for padding
    tokens = np.maximum(np.bincount(number), 1)
    mean = np.bincount(number, weights=cost) / tokens
    # lexsort uses the last key first; `number` separates documents with equal means
    return np.lexsort((metadata.order, number, mean[number], number > 0))


def keys_crossing(metadata: Metadata) -> np.ndarray:
    """Return, for a cut before each token, the number of K/V rows that two ranks would exchange.

    int64 `[T + 1]`. A key is exchanged if a query on the other side of the cut attends to it.
    Documents must be contiguous in `metadata[T]`, with tokens in the order of the row.
    """
    n = len(metadata)
    here = np.arange(n)  # [T], like all arrays except `steps`
    # last token that attends to the key; padding attends only to itself
    document = metadata.document
    stretch = np.cumsum(np.diff(document, prepend=document[:1]) != 0) * (n + 1)
    last = np.searchsorted(stretch + metadata.order, stretch + metadata.leave) - 1
    last = np.where(metadata.leave > 0, last, here)
    # first token that attends to the key: the beginning of its span, or the key itself
    _, begin, span = np.unique(metadata.span, return_index=True, return_inverse=True)
    first = np.where(metadata.span != 0, begin[span.reshape(-1)], here)
    # [T + 2]: +1 at the first cut that a key crosses, -1 after the last one; the running sum counts
    # the keys that cross each cut
    steps = np.bincount(here + 1, minlength=n + 2)  # cuts in (here, last]
    steps -= np.bincount(last + 1, minlength=n + 2)
    steps += np.bincount(first + 1, minlength=n + 2)  # cuts in (first, here]
    steps -= np.bincount(here + 1, minlength=n + 2)
    return np.cumsum(steps)[: n + 1]


def _light_tokens(
    area: np.ndarray, keys_cut: np.ndarray, ends: tuple[int, int], share: int, target: float
) -> int:
    """Return how many of a rank's `share` tokens come from the light end.

    The rank takes tokens from both ends of the stretch `ends`, with a total area near `target`.
    """
    low, high = ends
    # [share + 1]: all possible choices; a choice takes order[low:cut_low] and order[cut_high:high]
    light = np.arange(share + 1)
    cut_low = low + light
    cut_high = high - (share - light)
    light_area = area[cut_low] - area[low]
    heavy_area = area[high] - area[cut_high]
    error = np.abs(light_area + heavy_area - target)
    # on a tie, prefer one stretch over two
    best = share if error[share] <= error.min() else int(np.argmin(error))
    keys = keys_cut[cut_low] + keys_cut[cut_high]
    # a rank with a single stretch adds one cut; the other end was cut by an earlier rank
    keys[0] = keys_cut[high - share]
    keys[share] = keys_cut[low + share]
    near = np.flatnonzero(error <= max(AREA_SLACK * target, error.min()))
    cheap = int(near[np.argmin(keys[near])])
    return cheap if keys[cheap] <= WORTHWHILE * keys[best] else best
