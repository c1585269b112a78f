"""Fewer documents over several ranks: two ranks at a time deal out their documents anew.

Key property: tokens stay equal and no rank gets more area than the limit, because only such moves are made. Of the
documents of two ranks some go to each whole, and one or two are cut so that both sums come out. All subsets of a few
documents are tried together. Moves that cost keys are made too, dearer ones at the start (simulated annealing,
Kirkpatrick et al., 1983). The cheapest deal on the way is kept. Rejected: an integer program, which takes seconds to
save a tenth more. Rejected: filling one rank after another, which leaves the last ones with what fits nowhere.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")

ATTEMPTS = 300
"""Most attempts, half a millisecond each."""
TOKENS_OF_AN_ATTEMPT = 128
"""Tokens of the row for each attempt: planning stays small beside the row's attention."""
FREE = 9
"""Documents of two ranks that may move at once: 2^9 subsets."""
WARMTH = 0.3
"""Keys that a move may cost at the start, as a share of the dearest document's price; falls to 0."""
WARM_ATTEMPTS = 0.8
"""Share of the attempts until it is 0."""
RELATED = 0.8
"""Share of the attempts on two ranks with a document in common; the rest mix in other documents."""


@dataclass(frozen=True, eq=False)
class Held:
    """Tokens of one document on one rank, ascending, and the area of the first 0, 1, ..., n of them (`[n + 1]`)."""

    indices: np.ndarray
    area: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> Held:
        """Some neighbouring tokens."""
        return Held(self.indices[start:stop], self.area[start : stop + 1] - self.area[start])


Rank = dict[int, Held]
"""The parts of a rank, by document."""


@dataclass(frozen=True)
class Share:
    """The share of the first of two ranks: documents whole, and tokens from the ends of one or two.

    These are the first `light` tokens of document `first` and the last `tokens - light` of `last`, perhaps the same.
    """

    whole: frozenset[int]
    first: int
    last: int
    tokens: int
    light: int


class Regrouping:
    """Documents `document[T]` dealt to ranks as `indices[cp, T / cp]`, changed in place.

    `cost[T]` is the area of each token, `limit` the most area of a rank. `prices[document]` are the keys that travel
    for each rank of a document after the first. The result is equal on every machine: prices are integers, and the
    random numbers are Python's.
    """

    def __init__(
        self, document: np.ndarray, indices: np.ndarray, cost: np.ndarray, prices: dict[int, int], limit: float
    ) -> None:
        self.cost = cost
        self.prices = prices
        self.limit = limit
        self.ranks = [self._rank(document[tokens], tokens) for tokens in indices]
        self._random = random.Random(0)

    def _rank(self, document: np.ndarray, indices: np.ndarray) -> Rank:
        order = np.argsort(document, kind="stable")  # [t], documents side by side, tokens still ascending
        cuts = np.flatnonzero(np.diff(document[order])) + 1  # [documents - 1]: where the next one begins
        return {int(document[part[0]]): self.held(indices[part]) for part in np.split(order, cuts)}

    def held(self, indices: np.ndarray) -> Held:
        """Some tokens of a document, as a rank holds them."""
        return Held(indices, np.concatenate([[0], np.cumsum(self.cost[indices])]))

    def run(self) -> np.ndarray:
        """The cheapest deal found, indices `[cp, T / cp]`, ascending on each rank; the given one if none is."""
        cheapest, kept = self._price(self._holders()), list(self.ranks)
        attempts = min(ATTEMPTS, len(self.cost) // TOKENS_OF_AN_ATTEMPT)
        for attempt in range(attempts):
            holders = self._holders()
            cut = [ranks for document, ranks in holders.items() if len(ranks) > 1 and self.prices[document]]
            if not cut:
                break
            ranks = self._one_of(cut) if self._random.random() < RELATED else range(len(self.ranks))
            one = self._one_of(ranks)
            two = self._one_of([rank for rank in ranks if rank != one])
            left = max(0.0, 1 - attempt / (WARM_ATTEMPTS * attempts))  # from 1 to 0; its square is the warmth left
            self._attempt(one, two, WARMTH * max(self.prices.values()) * left * left)
            price = self._price(self._holders())
            if price < cheapest:
                cheapest, kept = price, list(self.ranks)
        return np.stack([np.sort(np.concatenate([part.indices for part in rank.values()])) for rank in kept])

    def _holders(self) -> dict[int, list[int]]:
        """The ranks of each document."""
        holders: dict[int, list[int]] = {}
        for rank, held in enumerate(self.ranks):
            for document in held:
                holders.setdefault(document, []).append(rank)
        return holders

    def _price(self, holders: dict[int, list[int]]) -> int:
        return sum((len(ranks) - 1) * self.prices[document] for document, ranks in holders.items())

    def _one_of(self, choices: Sequence[_T]) -> _T:
        return choices[int(self._random.random() * len(choices))]

    def _attempt(self, one: int, two: int, heat: float) -> None:
        """Deal the documents of two ranks anew, for a lower price or one up to `heat` keys higher."""
        a, b = self.ranks[one], self.ranks[two]
        shared = sorted(a.keys() & b.keys(), key=lambda document: (-self.prices[document], document))
        pool = {**a, **b}
        for document in shared:
            both = np.concatenate([a[document].indices, b[document].indices])
            pool[document] = self.held(np.sort(both, kind="stable"))  # timsort merges the two ascending parts
        others = [document for document in pool if document not in shared]
        while len(shared) + len(others) > FREE and others:
            others.pop(int(self._random.random() * len(others)))
        free = [*shared[:FREE], *others]
        fixed = frozenset(document for document in a if document not in free)
        most = sum(self.prices[document] for document in shared) + heat * self._random.random()
        share = self._share(pool, fixed, free, sum(map(len, a.values())), self._options(free, most, heat))
        if share is not None:
            self.ranks[one], self.ranks[two] = divided(pool, share)

    def _options(self, free: Sequence[int], most: float, heat: float) -> list[tuple[int, int]]:
        """Pairs of free documents to cut for less than `most` (i = j: one document): their numbers, cheapest first."""
        found = []
        for i, j in itertools.combinations_with_replacement(range(len(free)), 2):
            price = self.prices[free[i]] + (self.prices[free[j]] if i != j else 0)
            if price < most:
                found.append((price + heat * self._random.random(), i, j))
        return [(i, j) for _, i, j in sorted(found)]

    def _share(
        self, pool: Rank, fixed: frozenset[int], free: Sequence[int], tokens: int, options: Sequence[tuple[int, int]]
    ) -> Share | None:
        """A share of so many tokens with `fixed` in it that leaves both ranks within the limit, by the first option."""
        total = sum(int(part.area[-1]) for part in pool.values())
        least, most = total - self.limit, self.limit  # of the first rank: the second has the rest, within the limit too
        # [2^free]: tokens and area of each subset of the free documents, which would go to the first rank whole
        whole, area = subset_sums([pool[document] for document in free])
        # [2^free]: tokens that the first rank then lacks, which must come from the cuts
        missing = tokens - sum(len(pool[document]) for document in fixed) - whole
        area = area + sum(int(pool[document].area[-1]) for document in fixed)
        subset = np.flatnonzero((missing >= 0) & (area <= most))
        missing, area = missing[subset], area[subset]
        for i, j in options:
            first, last = pool[free[i]], pool[free[j]]
            room = len(first) + (len(last) if i != j else 0)
            fits = np.flatnonzero((subset & (1 << i | 1 << j) == 0) & (missing <= room))  # neither i nor j goes whole
            need, base = missing[fits], area[fits]
            # the most tokens from the end of `last` and the fewest: extremes of the area that a cut can give
            heavy = ends_area(first, last, np.maximum(0, need - len(last)), need) + base
            light = ends_area(first, last, np.minimum(len(first), need), need) + base
            fits = fits[(np.minimum(heavy, light) <= most) & (np.maximum(heavy, light) >= least)]
            if not len(fits):
                continue
            chosen = int(self._one_of(fits))
            count = int(missing[chosen])
            lights = np.arange(max(0, count - len(last)), min(len(first), count) + 1)  # every cut of the chosen subset
            areas = ends_area(first, last, lights, count) + area[chosen]
            lights = lights[(areas >= least) & (areas <= most)]
            if not len(lights):
                continue
            # one stretch rather than two, and no cut where a document fits whole
            ends = [n for n in (count, len(first), 0, count - len(last)) if n in lights]
            mine = frozenset(document for bit, document in enumerate(free) if subset[chosen] >> bit & 1)
            return Share(fixed | mine, free[i], free[j], count, int(ends[0] if ends else self._one_of(lights)))
        return None


def ends_area(first: Held, last: Held, light: np.ndarray, tokens: np.ndarray | int) -> np.ndarray:
    """Area of the first `light` tokens of one part and the last `tokens - light` of another, or of the same."""
    # areas are sums from the front: that of the last n tokens is the whole less that of the others
    return first.area[light] + last.area[-1] - last.area[len(last) - (tokens - light)]


def subset_sums(parts: Sequence[Held]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and area of every subset of a few parts, int64 `[2^n]`; bit i of the index stands for part i."""
    tokens, area = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for part in parts:  # [2^i] -> [2^(i + 1)]: the subsets without this part, then the same ones with it
        tokens = np.concatenate([tokens, tokens + len(part)])
        area = np.concatenate([area, area + part.area[-1]])
    return tokens, area


def divided(pool: Rank, share: Share) -> tuple[Rank, Rank]:
    """The parts in `pool` dealt to two ranks: the first gets its share, the second the rest."""
    first, last = pool[share.first], pool[share.last]
    stop = len(last) - (share.tokens - share.light)  # `last` up to here is the second rank's
    if share.first == share.last:
        head, tail = first.part(0, share.light), first.part(stop, len(first))
        area = np.concatenate([head.area, tail.area[1:] + head.area[-1]])  # without the tail's leading 0: [n + 1]
        both = Held(np.concatenate([head.indices, tail.indices]), area)
        cut = {share.first: (both, first.part(share.light, stop))}
    else:
        cut = {
            share.first: (first.part(0, share.light), first.part(share.light, len(first))),
            share.last: (last.part(stop, len(last)), last.part(0, stop)),
        }
    one = {document: part for document, part in pool.items() if document in share.whole}
    two = {document: part for document, part in pool.items() if document not in share.whole and document not in cut}
    for document, (mine, theirs) in cut.items():
        if len(mine):
            one[document] = mine
        if len(theirs):
            two[document] = theirs
    return one, two
