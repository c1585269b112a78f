"""The least K/V rows that must travel between ranks under any layout with equal tokens and nearly equal area.

The bound holds for every layout and is found without searching for one, so it limits how far a layout is from the
best. The best layout itself would be bin packing with items that may be broken at a price.

Take any layout of T rows on R ranks. A rank has t = T / R rows and at most `cap` area (allowed pairs). Only the keys of
prefixes (branch 0) are counted. Let row i cost `area[i]` and see `prefix_keys[i]` keys of its prefix, of which document
d has p. On each rank take the row of d that sees most of them; x_0 >= x_1 >= ... are these numbers in descending order,
0 for ranks without rows of d. A rank needs x keys and all ranks together hold each of the p once; x_0 = p, since the
last row of a prefix sees all of it. So at least x_1 + x_2 + ... keys of d travel, and documents add up, as a key
belongs to one.

* One document. Rank its rows by keys seen. If the first j of them lie on k ranks, then j <= k t. The k t rows of these
  ranks have at most k cap area: the j rows have theirs, the k t - j others at least that of the lightest so many rows
  of the pack. For the first j that breaks either, some of the j rows lies on another rank: x_k is at least what the
  j-th sees. Call this w_k (0 where no j breaks).
* Some documents G together, with a number v <= p for each. Say n rows of G, of area a, see v keys of their document or
  more. The K ranks that hold them have K t >= n rows. Their area is at most K cap: a, and at least that of the lightest
  K t - n rows. Let K be the least number for which that is possible: the ranks counted for each document of G are
  together K or more, and the k-th of a document has x_k >= max(v, w_k). So the bound above grows by max(0, v - w_k) for
  K pairs (document, k), one of them free for each document (k = 0); by the K smallest, whichever they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""v as a share of p; every choice is a bound and the largest is taken."""
MOST_TOGETHER = 64
"""Documents with the most area that are looked at together."""


@dataclass(frozen=True)
class PackRows:
    """The columns of a pack that the bound needs: int arrays `[T]`."""

    document: np.ndarray
    """-1 is padding."""
    area: np.ndarray
    """Keys that the row's query sees."""
    prefix_keys: np.ndarray
    """Those of them that belong to branch 0."""


@dataclass(frozen=True)
class _Limits:
    """Room of a rank: `tokens` rows, `cap` area; `lightest[n]` is the area of the n lightest rows of the pack."""

    tokens: int
    cap: float
    lightest: np.ndarray

    def possible(self, rows: np.ndarray | int, area: np.ndarray | int, ranks: int) -> np.ndarray:
        """Whether that many rows of that area may lie on so many ranks."""
        room = ranks * self.tokens - np.asarray(rows)
        return (room >= 0) & (area + self.lightest[np.maximum(room, 0)] <= ranks * self.cap)


@dataclass(frozen=True)
class _Document:
    """PackRows of a document by descending prefix keys; `area[n]` is that of the first n; `least[k]` is w_k."""

    keys: np.ndarray
    area: np.ndarray
    least: tuple[int, ...]


def least_remote_rows(rows: PackRows, ranks: int, slack: float) -> int:
    """K/V rows, summed over ranks, under any layout with T / ranks rows and at most (1 + slack) of the mean area each.

    `ranks` must divide T.
    """
    tokens, mean = len(rows.area) // ranks, int(rows.area.sum()) / ranks
    limits = _Limits(tokens, mean * (1 + slack), np.concatenate([[0], np.cumsum(np.sort(rows.area))]))
    documents = [_document(rows, number, ranks, limits) for number in np.unique(rows.document[rows.document >= 0])]
    alone = sum(sum(document.least[1:]) for document in documents)
    together = (_together(documents, share, ranks, limits) for share in THRESHOLDS)
    return alone + max(together, default=0)


def _document(rows: PackRows, number: int, ranks: int, limits: _Limits) -> _Document:
    mine = rows.document == number
    keys, area = rows.prefix_keys[mine], rows.area[mine]
    order = np.lexsort((-area, -keys))
    keys, sums = keys[order], np.concatenate([[0], np.cumsum(area[order])])
    least = []
    for k in range(ranks):
        breaks = ~limits.possible(np.arange(len(sums)), sums, k)
        least.append(int(keys[max(int(np.argmax(breaks)) - 1, 0)]) if breaks.any() else 0)
    return _Document(keys, sums, tuple(least))


def _together(documents: list[_Document], share: float, ranks: int, limits: _Limits) -> int:
    """The most that a set of documents, those with most area, adds to the bounds of each alone."""
    found: list[tuple[int, int, list[int]]] = []  # area and number of rows that count, what each further rank adds
    for document in documents:
        v = int(np.ceil(share * document.keys[0]))
        count = int((document.keys >= v).sum())
        adds = [0, *(max(0, v - least) for least in document.least[1:])]
        found.append((int(document.area[count]), count, adds))
    best, area, count = 0, 0, 0
    adds = []
    for more_area, more_rows, more in sorted(found, key=lambda item: -item[0])[:MOST_TOGETHER]:
        area, count, adds = area + more_area, count + more_rows, [*adds, *more]
        needed = next((k for k in range(1, ranks) if limits.possible(count, area, k)), ranks)
        best = max(best, sum(sorted(adds)[:needed]))
    return best
