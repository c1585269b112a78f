"""The attention mask as data: four integers per token, and an exact cover of it by rectangles and triangles.

Key property: nothing of size S x S is ever made. Both sides are cut into runs of equal metadata whose places are
consecutive, cut again at each other's ends; two runs then either cover the same places or are disjoint, so
every pair of runs is empty, full, or one causal triangle. Rejected: boolean masks (10 GiB at 36,864 tokens in fp32 over
8 heads) and fixed-size blocks with partial masks (every document boundary pays for a masked block).

    allow(q, k) =  document[k] >= 0 and document[q] == document[k]
               and (branch[k] == 0 or branch[k] == branch[q])
               and (place[k] <= place[q] or (span[q] != 0 and span[q] == span[k]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FULL, CAUSAL = 1, 2
"""Kinds of tiles: every pair allowed, or `k_index - k_start <= q_index - q_start` on a square."""


@dataclass(frozen=True)
class Metadata:
    """What the mask must know of `n` tokens: int arrays `[n]`; document -1 is padding, place is the causal order."""

    document: np.ndarray
    branch: np.ndarray
    span: np.ndarray
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.place)

    def take(self, indices: np.ndarray) -> Metadata:
        """The metadata of some tokens, in the order of `indices[m]`."""
        return Metadata(self.document[indices], self.branch[indices], self.span[indices], self.place[indices])


@dataclass(frozen=True)
class Tile:
    """Keys `[k_start, k_stop)` that a row of query tokens sees."""

    k_start: int
    k_stop: int
    kind: int


@dataclass(frozen=True)
class Row:
    """Queries `[q_start, q_stop)` and every tile they see, in key order."""

    q_start: int
    q_stop: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class TileTable:
    """The non-empty part of a mask between `q` queries and `k` keys. Query ranges without a row see nothing."""

    queries: int
    keys: int
    rows: tuple[Row, ...]

    @property
    def area(self) -> int:
        """Number of allowed (query, key) pairs."""
        total = 0
        for row in self.rows:
            n = row.q_stop - row.q_start
            for tile in row.tiles:
                total += n * (n + 1) // 2 if tile.kind == CAUSAL else n * (tile.k_stop - tile.k_start)
        return total

    def to_dense(self) -> np.ndarray:
        """The mask as bool `[queries, keys]`; for tests and pictures of small tables."""
        dense = np.zeros((self.queries, self.keys), dtype=bool)
        for row in self.rows:
            for tile in row.tiles:
                block = dense[row.q_start : row.q_stop, tile.k_start : tile.k_stop]
                block |= np.tri(*block.shape).astype(bool) if tile.kind == CAUSAL else True
        return dense


def allowed(q: Metadata, k: Metadata) -> np.ndarray:
    """The rule itself, as bool `[len(q), len(k)]`: the obvious form, for references and tests only."""
    same_document = (k.document[None] >= 0) & (q.document[:, None] == k.document[None])
    same_branch = (k.branch[None] == 0) | (q.branch[:, None] == k.branch[None])
    causal = k.place[None] <= q.place[:, None]
    same_span = (q.span[:, None] != 0) & (q.span[:, None] == k.span[None])
    return same_document & same_branch & (causal | same_span)


@dataclass(frozen=True)
class _Runs:
    """Maximal stretches of local tokens with equal metadata and consecutive places; padding left out."""

    start: np.ndarray
    stop: np.ndarray
    place: np.ndarray
    document: np.ndarray
    branch: np.ndarray
    span: np.ndarray

    def take(self, index: np.ndarray) -> _Runs:
        fields = (self.start, self.stop, self.place, self.document, self.branch, self.span)
        return _Runs(*(values[index] for values in fields))


def _runs(meta: Metadata) -> _Runs:
    n = len(meta)
    change = np.ones(n, dtype=bool)
    change[1:] = meta.place[1:] != meta.place[:-1] + 1
    for values in (meta.document, meta.branch, meta.span):
        change[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(change)
    stop = np.append(start[1:], n)
    runs = _Runs(start, stop, meta.place[start], meta.document[start], meta.branch[start], meta.span[start])
    return runs.take(np.flatnonzero(runs.document >= 0))


def _cut(runs: _Runs, places: np.ndarray) -> _Runs:
    """Cut runs at every one of the sorted `places` that falls strictly inside them."""
    length = runs.stop - runs.start
    first = np.searchsorted(places, runs.place, side="right")
    last = np.searchsorted(places, runs.place + length, side="left")
    parts = last - first + 1
    if (parts == 1).all():
        return runs
    owner = np.repeat(np.arange(len(length)), parts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = runs.take(owner)
    begin = cut.place.copy()
    inner = within > 0
    begin[inner] = places[first[owner[inner]] + within[inner] - 1]
    end = (runs.place + length)[owner].copy()
    end[:-1][inner[1:]] = begin[1:][inner[1:]]
    start = cut.start + begin - cut.place
    return _Runs(start, start + end - begin, begin, cut.document, cut.branch, cut.span)


def _ends(runs: _Runs) -> np.ndarray:
    return np.unique(np.concatenate([runs.place, runs.place + runs.stop - runs.start]))


def _tiles_of_document(q: _Runs, k: _Runs) -> list[Row]:
    """Rows of one document: classify every pair of runs, then join full neighbours."""
    earlier = k.place[None] < q.place[:, None]
    same = k.place[None] == q.place[:, None]
    same_span = (q.span[:, None] != 0) & (q.span[:, None] == k.span[None])
    visible = (k.branch[None] == 0) | (k.branch[None] == q.branch[:, None])
    full = visible & (earlier | same_span)
    causal = visible & same & ~same_span
    rows = []
    for i in range(len(q.start)):
        tiles: list[Tile] = []
        for j in np.flatnonzero(full[i] | causal[i]):
            start, stop, kind = int(k.start[j]), int(k.stop[j]), FULL if full[i, j] else CAUSAL
            if tiles and kind == FULL == tiles[-1].kind and tiles[-1].k_stop == start:
                tiles[-1] = Tile(tiles[-1].k_start, stop, FULL)
            else:
                tiles.append(Tile(start, stop, kind))
        if tiles:
            rows.append(Row(int(q.start[i]), int(q.stop[i]), tuple(tiles)))
    return rows


def _join(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring query ranges that see exactly the same full tiles."""
    joined: list[Row] = []
    for row in rows:
        last = joined[-1] if joined else None
        full = all(tile.kind == FULL for tile in row.tiles)
        if last and full and last.q_stop == row.q_start and last.tiles == row.tiles:
            joined[-1] = Row(last.q_start, row.q_stop, row.tiles)
        else:
            joined.append(row)
    return joined


def tile_table(q: Metadata, k: Metadata) -> TileTable:
    """Exact cover of `allowed(q, k)` by disjoint tiles, in time and memory proportional to pairs of runs.

    Places must be unique on each side and hold equal metadata on both sides, as in any permutation of one row.
    """
    q_runs, k_runs = _runs(q), _runs(k)
    q_runs, k_runs = _cut(q_runs, _ends(k_runs)), _cut(k_runs, _ends(q_runs))
    k_runs = k_runs.take(np.argsort(k_runs.start, kind="stable"))
    rows: list[Row] = []
    for document in np.intersect1d(q_runs.document, k_runs.document):
        mine = q_runs.take(np.flatnonzero(q_runs.document == document))
        theirs = k_runs.take(np.flatnonzero(k_runs.document == document))
        rows += _tiles_of_document(mine, theirs)
    return TileTable(len(q), len(k), tuple(_join(sorted(rows, key=lambda row: row.q_start))))
