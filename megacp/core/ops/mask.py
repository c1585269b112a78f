"""The attention mask as data: a few integers per token, and an exact cover of it by rectangles and triangles.

A row holds trees in depth-first order: a document is a tree whose root is its prefix, and any node may branch. Of a
token the rule knows its `order` in the row, and `leave`, the order at which the subtree of its node ends:

    allow(q, k) = order[k] <= order[q] < leave[k]   or   span[q] == span[k] != 0

Padding has leave 0. A layer may look back a limited way along the path of the tree (`Reach`), where a token stands
`depth` tokens from its root.

Nothing of size S x S is ever made. Both sides are cut into runs of equal metadata and consecutive order, cut again at
each other's ends, and where a window begins. Two runs then cover the same tokens or are disjoint, as are a run and
another moved on by the window. So every pair of runs is empty, full, or one triangle: no tile is ever partly masked.
All of it is arithmetic on arrays, without a loop over documents or tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

Part = TypeVar("Part")

FULL, CAUSAL, WINDOW = 1, 2, 3
"""Kinds of tiles: every pair allowed; a triangle of a square, `k_index - k_start <= q_index - q_start`; or `>=`."""

_PART = 64
"""Queries of a window's rows are cut to a multiple of it, which kernels like."""
_PAIRS_AT_ONCE = 1 << 20
"""Pairs of runs looked at together: bounds the memory of planning to some tens of MiB."""


class Reach(NamedTuple):
    """How far back a layer looks along a token's path; 0 is no limit."""

    window: int = 0
    """Tokens that a query sees at the most, itself included: those less than so many before it."""
    chunk: int = 0
    """Queries see keys of their own chunk; a path is cut into chunks of so many tokens."""


@dataclass(frozen=True)
class Metadata:
    """What the mask must know of `n` tokens: int arrays `[n]`, and how far the layer looks."""

    leave: np.ndarray
    span: np.ndarray
    order: np.ndarray
    depth: np.ndarray
    reach: Reach = Reach()

    @staticmethod
    def of_row(leave: np.ndarray, span: np.ndarray) -> Metadata:
        """The metadata of a whole row in its own order, from `leave[T]` and `span[T]`."""
        real, order = leave > 0, np.arange(len(leave))
        left = np.cumsum(np.bincount(leave[real], minlength=len(leave) + 1))[: len(leave)]  # tokens whose node is left
        return Metadata(leave, span, order, np.cumsum(real) - real - left)

    @staticmethod
    def of_documents(document: np.ndarray, branch: np.ndarray | int = 0, span: np.ndarray | int = 0) -> Metadata:
        """The metadata of a row of `document[T]` (-1: padding): prefixes, branch 0, and alternative endings 1, 2, ...

        Spans of one number in several documents or branches are several spans. ValueError for a document that stands in
        several places of the row; padding may lie in it.
        """
        columns = [np.broadcast_to(x, document.shape) for x in (document, branch, span)]
        number = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1) + 1
        node = np.where(columns[1] == 0, _last(document), _last(_last(document) * len(document) + columns[1]))
        row = Metadata.of_row(np.where(document >= 0, node + 1, 0), np.where(columns[2] != 0, number, 0))
        if row.document.max(initial=-1) + 1 != len(np.unique(document[document >= 0])):
            raise ValueError("a document of this row stands in several places: its tokens must follow one another")
        return row

    def __len__(self) -> int:
        return len(self.order)

    def take(self, indices: np.ndarray) -> Metadata:
        """The metadata of some tokens, in the order of `indices[m]`."""
        leave, span, order, depth = (x[indices] for x in (self.leave, self.span, self.order, self.depth))
        return Metadata(leave, span, order, depth, self.reach)

    def within(self, reach: Reach) -> Metadata:
        """The same tokens for a layer that looks so far."""
        return dataclasses.replace(self, reach=reach)

    @functools.cached_property
    def document(self) -> np.ndarray:
        """int64 `[n]`: number of each token's tree in this row; -1 for padding."""
        by_order, end = np.argsort(self.order, kind="stable"), np.empty(len(self), np.int64)
        end[by_order] = np.maximum.accumulate(self.leave[by_order])  # no node of a tree ends later than its root
        real, number = self.leave > 0, np.full(len(self), -1)
        number[real] = np.unique(end[real], return_inverse=True)[1]
        return number

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


def _last(values: np.ndarray) -> np.ndarray:
    """Index `[n]` of the last element that equals each one."""
    group = np.unique(values, return_inverse=True)[1].reshape(-1)
    found = np.zeros(len(values), np.int64)
    found[group] = np.arange(len(values))  # later elements overwrite earlier ones
    return found[group]


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
    """Queries `[q_start, q_stop)` and every tile they see, in key order; at most one of each triangle."""

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
        pairs = np.where(self.kind == FULL, n * (self.k_stop - self.k_start), n * (n + 1) // 2)
        return int(pairs.sum())

    @functools.cached_property
    def keys_per_query(self) -> np.ndarray:
        """int64 `[queries]`: how many keys each query token sees; the sum is `area`."""
        full = np.where(self.kind == FULL, self.k_stop - self.k_start, 0)  # [tiles]
        bounds = np.concatenate([[0], np.cumsum(full)])
        width = bounds[self.first[1:]] - bounds[self.first[:-1]]  # [rows]: keys of a row's full tiles
        causal, window = np.zeros((2, len(self.row_start)), bool)  # [rows]: those with such a tile
        causal[self.row_of_tile[self.kind == CAUSAL]] = window[self.row_of_tile[self.kind == WINDOW]] = True
        seen = np.zeros(self.queries, np.int64)
        index, row = expand(self.row_start, self.row_stop)
        seen[index] = width[row] + np.where(causal[row], index - self.row_start[row] + 1, 0)
        seen[index] += np.where(window[row], self.row_stop[row] - index, 0)
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
    order, back = q.order[:, None], q.depth[:, None] - k.depth[None]
    on_path = (k.order[None] <= order) & (order < k.leave[None]) & (q.leave[:, None] > 0)
    seen = on_path | ((q.span[:, None] != 0) & (q.span[:, None] == k.span[None]))
    if q.reach.window:
        seen &= back < q.reach.window
    if q.reach.chunk:
        seen &= q.depth[:, None] // q.reach.chunk == k.depth[None] // q.reach.chunk
    return seen


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
    leave: np.ndarray
    span: np.ndarray
    depth: np.ndarray

    @property
    def length(self) -> np.ndarray:
        return self.stop - self.start

    def take(self, index: np.ndarray) -> _Runs:
        fields = (self.start, self.stop, self.order, self.leave, self.span, self.depth)
        return _Runs(*(values[index] for values in fields))


def _runs(meta: Metadata) -> _Runs:
    n = len(meta)
    change = np.ones(n, dtype=bool)
    change[1:] = meta.order[1:] != meta.order[:-1] + 1
    for values in (meta.leave, meta.span):
        change[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(change)
    stop = np.append(start[1:], n)
    runs = _Runs(start, stop, *(values[start] for values in (meta.order, meta.leave, meta.span, meta.depth)))
    return runs.take(np.flatnonzero(runs.leave > 0))


def _cut(runs: _Runs, ends: np.ndarray) -> _Runs:
    """Cut runs at every one of the sorted `ends` that falls strictly inside them."""
    first = np.searchsorted(ends, runs.order, side="right")  # of each run, the cuts ends[first:last] are inside
    last = np.searchsorted(ends, runs.order + runs.length, side="left")
    parts = last - first + 1
    if (parts == 1).all():
        return runs
    owner = np.repeat(np.arange(len(parts)), parts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)  # number of a part in its run
    cut = runs.take(owner)
    begin = cut.order.copy()  # a part begins where its run does or at a cut, and ends where the next one begins
    inner = within > 0
    begin[inner] = ends[first[owner[inner]] + within[inner] - 1]
    end = (runs.order + runs.length)[owner]
    end[:-1][inner[1:]] = begin[1:][inner[1:]]
    start, moved = cut.start + begin - cut.order, begin - cut.order
    return _Runs(start, start + end - begin, begin, cut.leave, cut.span, cut.depth + moved)


def _row_cuts(q: _Runs, k: _Runs, reach: Reach) -> np.ndarray:
    """Orders at which runs of queries are cut, so that a run of keys is one of three things to each part: seen by all
    of its queries or by none, or, clipped, a square of it is their own tokens, or those a window before them.
    """
    ends = [k.order, k.order + k.length]
    shift = reach.window - 1
    if reach.window:
        orders, leaves = np.concatenate([q.order, k.order]), np.concatenate([q.leave, k.leave])
        by_order = np.argsort(orders, kind="stable")
        end = np.maximum.accumulate(leaves[by_order])  # of the tree, which it names
        wide = int(max(q.depth.max(initial=0), k.depth.max(initial=0))) + int(k.length.max(initial=0)) + reach.window
        trees = [end[np.searchsorted(orders[by_order], x.order, side="right") - 1] * (wide + 1) for x in (q, k)]
        edges = np.unique(np.concatenate([trees[1] + k.depth + shift, trees[1] + k.depth + k.length + shift]))
        begin = trees[0] + q.depth
        j, i = expand(np.searchsorted(edges, begin), np.searchsorted(edges, begin + q.length))
        ends.append(q.order[i] + edges[j] - begin[i])
    # a kernel computes the squares of triangles: parts of an eighth of a window waste an eighth
    part = min(shift, -(-shift // (8 * _PART)) * _PART) if shift > 0 else reach.window
    for period, place in ((part, 0), (reach.chunk, 0), (reach.chunk if part else 0, shift)):
        if period:
            ahead = (place - q.depth) % period  # from the beginning of each run to such a depth
            times, i = expand(0 * ahead, np.maximum(0, -((ahead - q.length) // period)))
            ends.append(q.order[i] + ahead[i] + times * period)
    return np.unique(np.concatenate(ends))


def _tiles_of_pairs(q: _Runs, k: _Runs, i: np.ndarray, j: np.ndarray, reach: Reach) -> tuple[np.ndarray, ...]:
    """(run of q, k_start, k_stop, kind) of the tiles of the pairs (run i of q, run j of k)."""
    length, keys = q.length[i], k.length[j]
    same_span = (q.span[i] != 0) & (q.span[i] == k.span[j])
    on_path = (k.order[j] <= q.order[i]) & (q.order[i] < k.leave[j])
    own = q.order[i] - k.order[j]  # where the queries' own tokens begin in the run of keys, if they are there
    holds = on_path & (own < keys) & ~same_span & (length > 1)  # else one query sees itself as it sees others
    low, high = 0 * own, np.where(same_span, keys, np.where(on_path, np.minimum(keys, own + (length == 1)), 0))
    high = np.where(holds, own, high)
    back = q.depth[i] - k.depth[j]
    square = np.zeros(len(i), bool)
    if reach.window:
        edge = back - (reach.window - 1)  # the first key that the first query sees
        square = (edge >= 0) & (edge < keys) & (length > 1) & (high > 0)
        low = np.maximum(low, edge + np.where(length > 1, length, 0))
    if reach.chunk:
        first = back - q.depth[i] % reach.chunk  # of the queries' chunk
        low, high = np.maximum(low, first), np.minimum(high, first + reach.chunk)
        square &= (edge >= first) if reach.window else False
    found = [
        (i[kept], k.start[j[kept]] + begin[kept], k.start[j[kept]] + end[kept], np.full(len(kept), kind))
        for kept, begin, end, kind in (
            (np.flatnonzero(high > low), low, high, FULL),
            (np.flatnonzero(holds), own, own + length, CAUSAL),
            (np.flatnonzero(square), back - (reach.window - 1), back - (reach.window - 1) + length, WINDOW),
        )
    ]
    return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))


def _chunks(count: np.ndarray) -> list[slice]:
    """Slices of the q runs with at most about `_PAIRS_AT_ONCE` pairs each."""
    group = np.cumsum(count) // _PAIRS_AT_ONCE
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(count)]
    return [slice(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True) if high > low]


def _tiles(q: _Runs, k: _Runs, reach: Reach) -> tuple[np.ndarray, ...]:
    """(run of q, k_start, k_stop, kind) of every tile: all pairs of runs, full neighbours joined.

    `q` is sorted by start, `k` by order.
    """
    found = []
    last = np.searchsorted(k.order, q.order, side="right")
    first = np.minimum(last, np.searchsorted(np.maximum.accumulate(k.leave), q.order, side="right"))
    for part in _chunks(last - first):  # runs that begin no later, and whose trees are not left
        j, i = expand(first[part], last[part])
        i += part.start
        apart = np.flatnonzero((q.span[i] == 0) | (q.span[i] != k.span[j]))
        found.append(_tiles_of_pairs(q, k, i[apart], j[apart], reach))
    images, by_span = np.flatnonzero(q.span), np.argsort(k.span, kind="stable")
    first, last = (np.searchsorted(k.span[by_span], q.span[images], side=side) for side in ("left", "right"))
    for part in _chunks(last - first):  # runs of the same span, wherever they stand
        j, i = expand(first[part], last[part])
        found.append(_tiles_of_pairs(q, k, images[i + part.start], by_span[j], reach))
    if not found:
        return tuple(np.zeros(0, np.int64) for _ in range(4))
    row, start, stop, kind = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    in_key_order = np.lexsort((start, row))
    row, start, stop, kind = row[in_key_order], start[in_key_order], stop[in_key_order], kind[in_key_order]
    joins = (row[1:] == row[:-1]) & (kind[1:] == FULL) & (kind[:-1] == FULL) & (start[1:] == stop[:-1])
    heads = np.flatnonzero(np.append(True, ~joins)[: len(row)])  # the first of those that are one tile
    tails = np.append(heads[1:], len(row))[: len(heads)] - 1
    return row[heads], start[heads], stop[tails], kind[heads]


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
    q_runs = _cut(q_runs, _row_cuts(q_runs, k_runs, q.reach))
    q_runs = q_runs.take(np.argsort(q_runs.start, kind="stable"))
    k_runs = k_runs.take(np.argsort(k_runs.order, kind="stable"))
    run, k_start, k_stop, kind = _tiles(q_runs, k_runs, q.reach)
    seen, first = np.unique(run, return_index=True)
    bounds = np.append(first, len(run)).astype(np.int64)
    return _join_rows(TileTable(q, k, q_runs.start[seen], q_runs.stop[seen], bounds, k_start, k_stop, kind))
