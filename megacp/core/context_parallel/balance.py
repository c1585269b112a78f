"""The balanced layout: equal tokens and equal attention area on every rank, while documents stay on few ranks.

Documents are sorted by mean cost per token (allowed keys per query). Rank r takes a stretch from the light end and one
from the heavy end: T / cp tokens together, with 1 / (cp - r) of the remaining area. Prefix sums give the area of every
possible cut. One causal document comes out as zigzag, one bidirectional document as contiguous. A cut near the best one
is taken where it costs clearly fewer exchanged keys and little balance.
"""

from __future__ import annotations

import numpy as np

from megacp.core.ops.mask import Metadata

AREA_SLACK = 0.01
"""Most error of a rank's area, as a share of its target, for a cheaper cut."""
WORTHWHILE = 0.75
"""A cut besides the one of best balance must cost at most this share of its exchanged keys."""


def deal_balanced(metadata: Metadata, cp: int) -> np.ndarray:
    """Indices `[cp, T / cp]` into the row, ascending on each rank: a stretch from either end of what is left."""
    cost = metadata.cost
    order = density_order(metadata, cost)
    keys_cut = keys_crossing(metadata.take(order))  # [T + 1]
    area = np.concatenate([[0], np.cumsum(cost[order])])  # [T + 1], of the first 0, 1, ..., T tokens
    low, high, share = 0, len(order), len(order) // cp
    ranks = []
    for left in range(cp, 0, -1):  # each aims at its part of what is left, so errors do not pile up on the last rank
        light = _light_tokens(area, keys_cut, (low, high), share, (area[high] - area[low]) / left)
        heavy = high - (share - light)
        ranks.append(np.sort(np.concatenate([order[low : low + light], order[heavy:high]])))
        low, high = low + light, heavy
    return np.stack(ranks)


def density_order(metadata: Metadata, cost: np.ndarray) -> np.ndarray:
    """Indices `[T]`: padding, then documents by ascending mean of `cost[T]`, each in its own order."""
    number = metadata.document + 1  # padding is 0
    mean = np.bincount(number, weights=cost) / np.maximum(np.bincount(number), 1)
    # the last key counts most; `number` parts documents of one mean
    return np.lexsort((metadata.order, number, mean[number], number > 0))


def keys_crossing(metadata: Metadata) -> np.ndarray:
    """int64 `[T + 1]`: K/V rows that would travel if the tokens were cut in front of each place, for two ranks.

    Documents must be stretches of `metadata[T]`, each in place order. A key travels if a query across the cut sees it.
    """
    n = len(metadata)
    here = np.arange(n)  # [T], as are all arrays but `steps`
    real = metadata.document >= 0
    of_branch = _code(metadata.document, metadata.branch)
    last = np.where(metadata.branch == 0, _last(metadata.document), _last(of_branch))
    of_span = _code(metadata.document, metadata.span)
    first = np.where(metadata.branch == 0, _first(of_span), _first(_code(of_span, metadata.branch)))
    last = np.where(real, last, here)  # the last and the first token that see the key; itself for padding
    first = np.where(real & (metadata.span != 0), first, here)
    # [T + 2]: +1 where a key begins to cross cuts, -1 behind its last one; the running sum counts crossing keys
    steps = np.bincount(here + 1, minlength=n + 2) - np.bincount(last + 1, minlength=n + 2)  # cuts in (here, last]
    steps += np.bincount(first + 1, minlength=n + 2) - np.bincount(here + 1, minlength=n + 2)  # cuts in (first, here]
    return np.cumsum(steps)[: n + 1]


def _code(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = a.astype(np.int64)
    return (wide - wide.min()) * (int(b.max()) + 1) + b


def _groups(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _last(values: np.ndarray) -> np.ndarray:
    group = _groups(values)
    found = np.zeros(len(values), np.int64)
    found[group] = np.arange(len(values))  # later elements overwrite earlier ones
    return found[group]


def _first(values: np.ndarray) -> np.ndarray:
    n = len(values)
    return n - 1 - _last(values[::-1])[::-1]  # the last one of the row read backwards


def _light_tokens(area: np.ndarray, keys_cut: np.ndarray, ends: tuple[int, int], share: int, target: float) -> int:
    """How many of a rank's `share` tokens come from the light end of the stretch `ends` for an area of `target`."""
    low, high = ends
    light = np.arange(share + 1)  # every choice; arrays below are [share + 1]
    cut_low, cut_high = low + light, high - (share - light)  # it takes order[low:cut_low] and order[cut_high:high]
    error = np.abs(area[cut_low] - area[low] + area[high] - area[cut_high] - target)
    best = share if error[share] <= error.min() else int(np.argmin(error))  # a tie takes one stretch, not two
    keys = keys_cut[cut_low] + keys_cut[cut_high]
    keys[0], keys[share] = keys_cut[high - share], keys_cut[low + share]  # the other end stays where it was cut before
    near = np.flatnonzero(error <= max(AREA_SLACK * target, error.min()))
    cheap = int(near[np.argmin(keys[near])])
    return cheap if keys[cheap] <= WORTHWHILE * keys[best] else best
