"""The attention mask as data: four integers per token, and an exact cover of it by rectangles and triangles.

Nothing of size S x S is ever made. Both sides are cut into runs of equal metadata and consecutive order,
cut again at each other's ends. Two runs then either cover the same tokens or are disjoint. So every pair of runs is
empty, full, or one causal triangle: no tile is ever partly masked. All of it is arithmetic on arrays, without a loop
over documents or tiles.

    allow(q, k) =  document[k] >= 0 and document[q] == document[k]
               and (branch[k] == 0 or branch[k] == branch[q])
               and (order[k] <= order[q] or (span[q] != 0 and span[q] == span[k]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

Part = TypeVar("Part")

FULL, CAUSAL = 1, 2
"""Kinds of tiles: every pair allowed, or `k_index - k_start <= q_index - q_start` on a square."""

_PAIRS_AT_ONCE = 1 << 20
"""Pairs of runs looked at together: bounds the memory of planning to some tens of MiB."""


@dataclass(frozen=True)
class Metadata:
    """What the mask must know of `n` tokens: int arrays `[n]`; document -1 is padding, order is the causal one."""

    document: np.ndarray
    branch: np.ndarray
    span: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def take(self, indices: np.ndarray) -> Metadata:
        """The metadata of some tokens, in the order of `indices[m]`."""
        return Metadata(self.document[indices], self.branch[indices], self.span[indices], self.order[indices])

    @functools.cached_property
    def own_table(self) -> TileTable:
        """Tiles between these tokens and themselves."""
        return tile_table(self, self)

    @functools.cached_property
    def by_type(self) -> Metadata:
        """These tokens in the order of `text_before_images`."""
        return self.take(text_before_images(self)) if self.span.any() else self

    @functools.cached_property
    def cost(self) -> np.ndarray:
        """int64 `[n]`: how many of these tokens each one sees; counted with types sorted, which needs fewer tiles."""
        cost = np.empty(len(self), np.int64)
        cost[text_before_images(self)] = self.by_type.own_table.keys_per_query
        return cost


def text_before_images(metadata: Metadata) -> np.ndarray:
    """Indices `[n]` of a row with the text of each document before its images, otherwise in order."""
    if not metadata.span.any():
        return np.arange(len(metadata))
    return np.lexsort((metadata.order, metadata.span != 0, metadata.document))


@dataclass(frozen=True)
class Tile:
    """Keys `[k_start, k_stop)` that a row of query tokens sees."""

    k_start: int
    k_stop: int
    kind: int


@dataclass(frozen=True)
class TileRow:
    """Queries `[q_start, q_stop)` and every tile they see, in key order; at most one is CAUSAL."""

    q_start: int
    q_stop: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class TileTable:
    """The non-empty part of a mask between queries `q` and keys `k`, as arrays over rows and tiles.

    Row i holds the queries `[row_start[i], row_stop[i])`, rows are disjoint and ascending; its tiles are numbered
    `first[i]` to `first[i + 1]` in key order. Queries without a row see nothing.
    """

    q: Metadata
    k: Metadata
    row_start: np.ndarray
    row_stop: np.ndarray
    first: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    kind: np.ndarray
    _parts: dict[object, object] = field(default_factory=dict, repr=False)

    def part(self, key: object, build: Callable[[], Part]) -> Part:
        """What a kernel derives from this table, built once for all layers."""
        if key not in self._parts:
            self._parts[key] = build()
        return self._parts[key]  # type: ignore[return-value]  # one type for each key

    @property
    def queries(self) -> int:
        """Number of query tokens, seen or not."""
        return len(self.q)

    @property
    def keys(self) -> int:
        """Number of key tokens."""
        return len(self.k)

    @property
    def num_tiles(self) -> int:
        """Number of tiles, all of them non-empty."""
        return len(self.kind)

    @functools.cached_property
    def row_of_tile(self) -> np.ndarray:
        """int64 `[tiles]`: the row of each tile."""
        return np.repeat(np.arange(len(self.row_start)), np.diff(self.first))

    @functools.cached_property
    def area(self) -> int:
        """Number of allowed (query, key) pairs."""
        n = (self.row_stop - self.row_start)[self.row_of_tile]
        pairs = np.where(self.kind == CAUSAL, n * (n + 1) // 2, n * (self.k_stop - self.k_start))
        return int(pairs.sum())

    @functools.cached_property
    def keys_per_query(self) -> np.ndarray:
        """int64 `[queries]`: how many keys each query token sees; the sum is `area`."""
        full = np.where(self.kind == FULL, self.k_stop - self.k_start, 0)  # [tiles]
        bounds = np.concatenate([[0], np.cumsum(full)])
        width = bounds[self.first[1:]] - bounds[self.first[:-1]]  # [rows]: keys of a row's full tiles
        rows = np.zeros(len(self.row_start), bool)  # [rows]: those with a causal tile
        rows[self.row_of_tile[self.kind == CAUSAL]] = True
        seen = np.zeros(self.queries, np.int64)
        index, row = expand(self.row_start, self.row_stop)
        seen[index] = width[row] + np.where(rows[row], index - self.row_start[row] + 1, 0)
        return seen

    @functools.cached_property
    def needed_keys(self) -> np.ndarray:
        """bool `[keys]`: which keys some query sees."""
        steps = np.zeros(self.keys + 1, np.int64)
        np.add.at(steps, self.k_start, 1)
        np.add.at(steps, self.k_stop, -1)
        return np.cumsum(steps[:-1]) > 0

    @functools.cached_property
    def rows(self) -> tuple[TileRow, ...]:
        """The table as objects, for kernels that walk it."""
        columns = (self.k_start.tolist(), self.k_stop.tolist(), self.kind.tolist())
        tiles = [Tile(*numbers) for numbers in zip(*columns, strict=True)]
        bounds = self.first.tolist()
        ends = zip(self.row_start.tolist(), self.row_stop.tolist(), bounds[:-1], bounds[1:], strict=True)
        return tuple(TileRow(start, stop, tuple(tiles[low:high])) for start, stop, low, high in ends)


def allowed(q: Metadata, k: Metadata) -> np.ndarray:
    """The rule itself, as bool `[len(q), len(k)]`: the obvious form, for references, tests and single small tiles."""
    same_document = (k.document[None] >= 0) & (q.document[:, None] == k.document[None])
    same_branch = (k.branch[None] == 0) | (q.branch[:, None] == k.branch[None])
    causal = k.order[None] <= q.order[:, None]
    same_span = (q.span[:, None] != 0) & (q.span[:, None] == k.span[None])
    return same_document & same_branch & (causal | same_span)


def expand(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers of the intervals `[start, stop)`, one interval after the other, and the interval of each."""
    count = stop - start
    owner = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return start[owner] + within, owner


@dataclass(frozen=True)
class _Runs:
    """Maximal stretches of local tokens with equal metadata and consecutive order; padding left out."""

    start: np.ndarray
    stop: np.ndarray
    order: np.ndarray
    document: np.ndarray
    branch: np.ndarray
    span: np.ndarray

    def take(self, index: np.ndarray) -> _Runs:
        fields = (self.start, self.stop, self.order, self.document, self.branch, self.span)
        return _Runs(*(values[index] for values in fields))


def _runs(meta: Metadata) -> _Runs:
    n = len(meta)
    change = np.ones(n, dtype=bool)
    change[1:] = meta.order[1:] != meta.order[:-1] + 1
    for values in (meta.document, meta.branch, meta.span):
        change[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(change)
    stop = np.append(start[1:], n)
    runs = _Runs(start, stop, meta.order[start], meta.document[start], meta.branch[start], meta.span[start])
    return runs.take(np.flatnonzero(runs.document >= 0))


def _cut(runs: _Runs, ends: np.ndarray) -> _Runs:
    """Cut runs at every one of the sorted `ends` that falls strictly inside them."""
    length = runs.stop - runs.start
    first = np.searchsorted(ends, runs.order, side="right")  # of each run, the cuts ends[first:last] are inside
    last = np.searchsorted(ends, runs.order + length, side="left")
    parts = last - first + 1
    if (parts == 1).all():
        return runs
    owner = np.repeat(np.arange(len(length)), parts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)  # number of a part in its run
    cut = runs.take(owner)
    begin = cut.order.copy()  # a part begins where its run does or at a cut, and ends where the next one begins
    inner = within > 0
    begin[inner] = ends[first[owner[inner]] + within[inner] - 1]
    end = (runs.order + length)[owner].copy()
    end[:-1][inner[1:]] = begin[1:][inner[1:]]
    start = cut.start + begin - cut.order
    return _Runs(start, start + end - begin, begin, cut.document, cut.branch, cut.span)


def _ends(runs: _Runs) -> np.ndarray:
    return np.unique(np.concatenate([runs.order, runs.order + runs.stop - runs.start]))


def _pairs(q: _Runs, k: _Runs, first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Non-empty pairs (run of q, run of k, kind); q's run i may see the `count[i]` runs of k from `first[i]` on."""
    j, i = expand(first, first + count)
    same_span = (q.span[i] != 0) & (q.span[i] == k.span[j])
    visible = (k.branch[j] == 0) | (k.branch[j] == q.branch[i])
    full = visible & ((k.order[j] < q.order[i]) | same_span)
    causal = visible & (k.order[j] == q.order[i]) & ~same_span
    kept = np.flatnonzero(full | causal)
    return i[kept], j[kept], np.where(full[kept], FULL, CAUSAL)


def _chunks(count: np.ndarray) -> list[slice]:
    """Slices of the q runs with at most about `_PAIRS_AT_ONCE` pairs each."""
    group = np.cumsum(count) // _PAIRS_AT_ONCE
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(count)]
    return [slice(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True) if high > low]


def _tiles(q: _Runs, k: _Runs) -> tuple[np.ndarray, ...]:
    """(run of q, k_start, k_stop, kind) of every tile: all pairs of runs, full neighbours joined.

    `q` is sorted by start, `k` by document, then start.
    """
    first = np.searchsorted(k.document, q.document, side="left")
    count = np.searchsorted(k.document, q.document, side="right") - first
    found: list[tuple[np.ndarray, ...]] = []
    for part in _chunks(count):
        i, j, kind = _pairs(q.take(np.arange(len(count))[part]), k, first[part], count[part])
        head = np.ones(len(i), bool)  # the first pair of each tile
        joins = (i[1:] == i[:-1]) & (kind[1:] == FULL) & (kind[:-1] == FULL) & (k.start[j[1:]] == k.stop[j[:-1]])
        head[1:] = ~joins
        heads = np.flatnonzero(head)
        tails = np.append(heads[1:], len(i))[: len(heads)] - 1
        found.append((i[heads] + part.start, k.start[j[heads]], k.stop[j[tails]], kind[heads]))
    if not found:
        return tuple(np.zeros(0, np.int64) for _ in range(4))
    return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))


def _equal_to_previous(table: TileTable) -> np.ndarray:
    """bool `[rows]`: the row touches the one before and sees exactly the same tiles, all full."""
    rows, count = len(table.row_start), np.diff(table.first)
    equal = np.zeros(rows, bool)
    equal[1:] = (table.row_start[1:] == table.row_stop[:-1]) & (count[1:] == count[:-1])
    tile = np.flatnonzero(equal[table.row_of_tile])  # the tiles of rows that may be equal
    before = tile - count[table.row_of_tile[tile]]  # the tile of the same number in the row before
    same = (table.k_start[tile] == table.k_start[before]) & (table.k_stop[tile] == table.k_stop[before])
    same &= (table.kind[tile] == FULL) & (table.kind[before] == FULL)
    equal[table.row_of_tile[tile[~same]]] = False
    return equal


def _join_rows(table: TileTable) -> TileTable:
    """Join neighbouring rows that see exactly the same full tiles."""
    equal = _equal_to_previous(table)
    if not equal.any():
        return table
    kept = np.flatnonzero(~equal)
    last = np.append(kept[1:], len(equal)) - 1
    tiles = np.flatnonzero(~equal[table.row_of_tile])
    first = np.concatenate([[0], np.cumsum(np.diff(table.first)[kept])])
    return TileTable(
        table.q,
        table.k,
        table.row_start[kept],
        table.row_stop[last],
        first,
        table.k_start[tiles],
        table.k_stop[tiles],
        table.kind[tiles],
    )


def tile_table(q: Metadata, k: Metadata) -> TileTable:
    """Exact cover of `allowed(q, k)` by disjoint tiles, in time and memory proportional to pairs of runs.

    Places must be unique on each side and hold equal metadata on both sides, as in any permutation of one row.
    """
    q_runs, k_runs = _runs(q), _runs(k)
    q_runs, k_runs = _cut(q_runs, _ends(k_runs)), _cut(k_runs, _ends(q_runs))
    q_runs = q_runs.take(np.argsort(q_runs.start, kind="stable"))
    k_runs = k_runs.take(np.lexsort((k_runs.start, k_runs.document)))
    run, k_start, k_stop, kind = _tiles(q_runs, k_runs)
    seen, first = np.unique(run, return_index=True)
    bounds = np.append(first, len(run)).astype(np.int64)
    return _join_rows(TileTable(q, k, q_runs.start[seen], q_runs.stop[seen], bounds, k_start, k_stop, kind))
