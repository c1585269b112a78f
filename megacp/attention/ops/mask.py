"""The attention mask as data: a few integers per token, and an exact cover of it by rectangles and
triangles.

A row holds trees in depth-first order: a document is a tree whose root is its prefix, and any node
may branch. Of a token the rule knows its `order` in the row, and `leave`, the order at which the
subtree of its node ends:

    allow(q, k) = order[k] <= order[q] < leave[k]   or   span[q] == span[k] != 0

Padding has leave 0. A layer may look back a limited way along the path of the tree (`Reach`), where
a token stands `depth` tokens from its root.

Nothing of size S x S is ever made. Both sides are cut into runs of equal metadata and consecutive
order, cut again at each other's ends, and where a window begins. Two runs then cover the same
tokens or are disjoint, as are a run and another moved on by the window. So every pair of runs is
empty, full, or one triangle: no tile is ever partly masked. All of it is arithmetic on arrays,
without a loop over documents or tiles.

Letters: `T` tokens of a row, `n` of one side of a table, `m` chosen ones; `i` and `j` number runs
of queries and keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FULL = 1
"""A tile of which every pair is allowed."""
CAUSAL = 2
"""A square tile of which a triangle is allowed: `k_index - k_start <= q_index - q_start`."""
WINDOW = 3
"""A square tile of which the other triangle is allowed: `k_index - k_start >= q_index - q_start`.
"""

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


UNLIMITED = Reach()


@dataclass(frozen=True)
class Metadata:
    """What the mask must know of `n` tokens: int arrays `[n]`."""

    leave: np.ndarray
    span: np.ndarray
    order: np.ndarray
    depth: np.ndarray

    @staticmethod
    def of_row(leave: np.ndarray, span: np.ndarray) -> Metadata:
        """The metadata of a whole row in its own order, from `leave[T]` and `span[T]`."""
        real = leave > 0
        order = np.arange(len(leave))
        # the depth of a token: the real tokens before it, less those of nodes whose subtree has
        # ended by then
        left = np.cumsum(np.bincount(leave[real], minlength=len(leave) + 1))[: len(leave)]
        return Metadata(leave, span, order, np.cumsum(real) - real - left)

    @staticmethod
    def of_documents(
        document: np.ndarray, branch: np.ndarray | int = 0, span: np.ndarray | int = 0
    ) -> Metadata:
        """The metadata of a row of `document[T]` (-1: padding): prefixes, branch 0, and alternative
        endings 1, 2, ...

        Spans of one number in several documents or branches are several spans. ValueError for a
        document that stands in several places of the row; padding may lie in it.
        """
        columns = [np.broadcast_to(x, document.shape) for x in (document, branch, span)]
        # a span is one inside a branch; a node ends with its last token, a prefix with its
        # document's
        number = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1) + 1
        node = np.where(
            columns[1] == 0, _last(document), _last(_last(document) * len(document) + columns[1])
        )
        row = Metadata.of_row(
            np.where(document >= 0, node + 1, 0), np.where(columns[2] != 0, number, 0)
        )
        if row.document.max(initial=-1) + 1 != len(np.unique(document[document >= 0])):
            raise ValueError(
                "a document of this row stands in several places: its tokens must follow one another"
            )
        return row

    def __len__(self) -> int:
        return len(self.order)

    def take(self, indices: np.ndarray) -> Metadata:
        """The metadata of some tokens, in the order of `indices[m]`."""
        return Metadata(*(x[indices] for x in (self.leave, self.span, self.order, self.depth)))

    @functools.cached_property
    def document(self) -> np.ndarray:
        """int64 `[n]`: number of each token's tree in this row; -1 for padding."""
        by_order = np.argsort(self.order, kind="stable")
        end = np.empty(len(self), np.int64)
        end[by_order] = np.maximum.accumulate(
            self.leave[by_order]
        )  # no node of a tree ends later than its root
        real = self.leave > 0
        number = np.full(len(self), -1)
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

    @property
    def cost(self) -> np.ndarray:
        """`cost_within` for a layer that looks at all."""
        return self.cost_within(UNLIMITED)

    def cost_within(self, reach: Reach) -> np.ndarray:
        """int64 `[n]`: how many of these tokens each one sees; counted with types sorted, which
        needs fewer tiles.
        """
        cost = np.empty(len(self), np.int64)
        cost[text_before_images(self)] = tile_table(
            self.by_type, self.by_type, reach
        ).keys_per_query
        return cost


def _last(values: np.ndarray) -> np.ndarray:
    """Index `[n]` of the last element that equals each one."""
    group = np.unique(values, return_inverse=True)[1].reshape(-1)
    found = np.zeros(len(values), np.int64)
    found[group] = np.arange(len(values))  # later elements overwrite earlier ones
    return found[group]


def text_before_images(metadata: Metadata) -> np.ndarray:
    """Indices `[n]` of a row with the text of each document before its images, otherwise in
    order.
    """
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
    """Queries `[q_start, q_stop)` and every tile they see, in key order; at most one of each
    triangle.
    """

    q_start: int
    q_stop: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class TileTable:
    """The non-empty part of a mask between queries `q` and keys `k`, as arrays over rows and tiles.

    Row i holds the queries `[row_start[i], row_stop[i])`, rows are disjoint and ascending; its
    tiles are numbered `first[i]` to `first[i + 1]` in key order. Queries without a row see nothing.
    """

    q: Metadata
    k: Metadata
    reach: Reach
    row_start: np.ndarray
    row_stop: np.ndarray
    first: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    kind: np.ndarray

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
        width = (
            bounds[self.first[1:]] - bounds[self.first[:-1]]
        )  # [rows]: keys of a row's full tiles
        causal, window = np.zeros((2, len(self.row_start)), bool)  # [rows]: those with such a tile
        causal[self.row_of_tile[self.kind == CAUSAL]] = True
        window[self.row_of_tile[self.kind == WINDOW]] = True
        seen = np.zeros(self.queries, np.int64)
        index, row = expand(self.row_start, self.row_stop)
        # of a causal triangle the first query sees one key and the last all, of a window's the
        # other way round
        seen[index] = width[row] + np.where(causal[row], index - self.row_start[row] + 1, 0)
        seen[index] += np.where(window[row], self.row_stop[row] - index, 0)
        return seen

    @functools.cached_property
    def needed_keys(self) -> np.ndarray:
        """bool `[keys]`: which keys some query sees."""
        # +1 where a tile begins, -1 behind it: the running sum counts the tiles over each key
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
        ends = zip(
            self.row_start.tolist(), self.row_stop.tolist(), bounds[:-1], bounds[1:], strict=True
        )
        return tuple(
            TileRow(start, stop, tuple(tiles[low:high])) for start, stop, low, high in ends
        )


def allowed(q: Metadata, k: Metadata, reach: Reach = UNLIMITED) -> np.ndarray:
    """The rule itself, as bool `[len(q), len(k)]`: the obvious form, for references, tests and
    single small tiles.
    """
    order = q.order[:, None]
    back = q.depth[:, None] - k.depth[None]  # tokens on the path from the key to the query
    on_path = (k.order[None] <= order) & (order < k.leave[None]) & (q.leave[:, None] > 0)
    seen = on_path | ((q.span[:, None] != 0) & (q.span[:, None] == k.span[None]))
    if reach.window:
        seen &= back < reach.window
    if reach.chunk:
        seen &= q.depth[:, None] // reach.chunk == k.depth[None] // reach.chunk
    return seen


def expand(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers of the intervals `[start, stop)`, one interval after the other, and the interval
    of each.
    """
    count = stop - start
    owner = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return start[owner] + within, owner


@dataclass(frozen=True)
class _Runs:
    """Maximal stretches of local tokens with equal metadata and consecutive order; padding left
    out.
    """

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
    change = np.ones(n, dtype=bool)  # where a run begins
    change[1:] = meta.order[1:] != meta.order[:-1] + 1
    for values in (meta.leave, meta.span):
        change[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(change)
    stop = np.append(start[1:], n)
    runs = _Runs(
        start, stop, *(values[start] for values in (meta.order, meta.leave, meta.span, meta.depth))
    )
    return runs.take(np.flatnonzero(runs.leave > 0))


def _cut(runs: _Runs, ends: np.ndarray) -> _Runs:
    """Cut runs at every one of the sorted `ends` that falls strictly inside them."""
    first = np.searchsorted(
        ends, runs.order, side="right"
    )  # of each run, the cuts ends[first:last] are inside
    last = np.searchsorted(ends, runs.order + runs.length, side="left")
    parts = last - first + 1  # [runs]
    if (parts == 1).all():
        return runs
    within, owner = expand(np.zeros_like(parts), parts)  # number of a part in its run, and the run
    cut = runs.take(owner)  # [parts], as are all arrays below
    begin = (
        cut.order.copy()
    )  # a part begins where its run does or at a cut, and ends where the next one begins
    inner = within > 0
    begin[inner] = ends[first[owner[inner]] + within[inner] - 1]
    end = (runs.order + runs.length)[owner]
    end[:-1][inner[1:]] = begin[1:][inner[1:]]
    moved = begin - cut.order  # from the first token of its run to that of the part
    start = cut.start + moved
    return _Runs(start, start + end - begin, begin, cut.leave, cut.span, cut.depth + moved)


def _window_cuts(q: _Runs, k: _Runs, window: int) -> np.ndarray:
    """Orders of queries that stand `window - 1` behind the beginning or the end of a run of keys on
    their path.

    Depths of all trees lie on one line: each tree has more than `wide` numbers, and no depth or
    edge has as many. So one search finds the edges in each run of queries, those of its own tree.
    """
    orders = np.concatenate([q.order, k.order])
    leaves = np.concatenate([q.leave, k.leave])
    by_order = np.argsort(orders, kind="stable")
    end = np.maximum.accumulate(leaves[by_order])  # of the tree, which it names
    wide = (
        int(max(q.depth.max(initial=0), k.depth.max(initial=0)))
        + int(k.length.max(initial=0))
        + window
    )
    trees = [
        end[np.searchsorted(orders[by_order], x.order, side="right") - 1] * (wide + 1)
        for x in (q, k)
    ]
    first = trees[1] + k.depth + window - 1  # [runs of k], on the line
    edges = np.unique(np.concatenate([first, first + k.length]))
    begin = trees[0] + q.depth  # [runs of q]
    edge, run = expand(np.searchsorted(edges, begin), np.searchsorted(edges, begin + q.length))
    return q.order[run] + edges[edge] - begin[run]


def _row_cuts(q: _Runs, k: _Runs, reach: Reach) -> np.ndarray:
    """Orders at which runs of queries are cut, so that a part sees of a run of keys at most a
    triangle of the tokens a window before it (W), keys that all of it sees (F), and a triangle of
    its own tokens (C).

    A window of 4 over one document cuts the queries every 3, as the W of a longer part would reach
    its C:

        key        0 1 2 3 4 5
        query 3    W W W C . .     part [3, 6)
        query 4    . W W C C .
        query 5    . . W C C C

    Where another rank holds keys [0, 5), queries [5, 12) are cut at 6 and 9 for that, and at 8, the
    first that is too far behind key 4. Part [6, 8) sees a W of keys 3 and 4: query 6 both, query 7
    the second.
    """
    # no run of keys begins or ends within a part: it holds the own tokens of all its queries, or of
    # none
    ends = [k.order, k.order + k.length]
    shift = reach.window - 1
    if reach.window:
        ends.append(_window_cuts(q, k, reach.window))
    # a kernel computes the squares of triangles: parts of an eighth of a window waste an eighth
    part = min(shift, -(-shift // (8 * _PART)) * _PART) if shift > 0 else reach.window
    # the third: from `shift` behind the beginning of a chunk on, a window lies in the chunk
    for period, place in ((part, 0), (reach.chunk, 0), (reach.chunk if part else 0, shift)):
        if period:
            ahead = (place - q.depth) % period  # from the beginning of each run to such a depth
            times, i = expand(0 * ahead, np.maximum(0, -((ahead - q.length) // period)))
            ends.append(q.order[i] + ahead[i] + times * period)
    return np.unique(np.concatenate(ends))


def _tiles_of_pairs(
    q: _Runs, k: _Runs, i: np.ndarray, j: np.ndarray, reach: Reach
) -> tuple[np.ndarray, ...]:
    """(run of q, k_start, k_stop, kind) of the tiles of the pairs (run i of q, run j of k): at most
    three of a pair.

    Places are counted from the first key of run j. Queries [6, 8) see of keys [0, 8) under a window
    of 6:

        0          edge = 1      low = 3       own = high = 6     8
        | unseen   | WINDOW      | FULL        | CAUSAL           |
                   |-- length ---|             |---- length ------|
    """
    length = q.length[
        i
    ]  # [pairs], as all arrays here; a single query has no triangles, all it sees is FULL
    keys = k.length[j]
    same_span = (q.span[i] != 0) & (q.span[i] == k.span[j])
    on_path = (k.order[j] <= q.order[i]) & (q.order[i] < k.leave[j])
    own = (
        q.order[i] - k.order[j]
    )  # where the queries' own tokens begin in the run of keys, if they are there
    holds = (
        on_path & (own < keys) & ~same_span & (length > 1)
    )  # else one query sees itself as it sees others
    # all queries see [low, high): a run of their span whole, a run of their path up to their own
    # tokens, others not
    low = 0 * own
    high = np.where(same_span, keys, np.where(on_path, np.minimum(keys, own + (length == 1)), 0))
    high = np.where(holds, own, high)
    back = q.depth[i] - k.depth[j]  # the key as deep as the first query
    edge = back - (
        reach.window - 1
    )  # the first key that the first query sees, where there is a window
    square = np.zeros(len(i), bool)
    if reach.window:
        square = (edge >= 0) & (edge < keys) & (length > 1) & (high > 0)
        low = np.maximum(low, edge + np.where(length > 1, length, 0))
    if reach.chunk:
        first = back - q.depth[i] % reach.chunk  # of the queries' chunk
        low = np.maximum(low, first)
        high = np.minimum(high, first + reach.chunk)
        square &= edge >= first
    found = [
        (
            i[kept],
            k.start[j[kept]] + begin[kept],
            k.start[j[kept]] + end[kept],
            np.full(len(kept), kind),
        )
        for kept, begin, end, kind in (
            (np.flatnonzero(high > low), low, high, FULL),
            (np.flatnonzero(holds), own, own + length, CAUSAL),
            (np.flatnonzero(square), edge, edge + length, WINDOW),
        )
    ]
    return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))


def _chunks(count: np.ndarray) -> list[slice]:
    """Slices of the q runs with at most about `_PAIRS_AT_ONCE` pairs each."""
    group = np.cumsum(count) // _PAIRS_AT_ONCE
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(count)]
    return [
        slice(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True) if high > low
    ]


def _tiles(q: _Runs, k: _Runs, reach: Reach) -> tuple[np.ndarray, ...]:
    """(run of q, k_start, k_stop, kind) of every tile: all pairs of runs, full neighbours joined.

    `q` is sorted by start, `k` by order.
    """
    found = []
    # a run of queries sees keys [first, last) by the path: they begin no later, and some of their
    # trees are not left
    last = np.searchsorted(k.order, q.order, side="right")
    first = np.minimum(last, np.searchsorted(np.maximum.accumulate(k.leave), q.order, side="right"))
    for part in _chunks(last - first):
        j, i = expand(first[part], last[part])
        i += part.start  # runs are numbered within the part
        apart = np.flatnonzero((q.span[i] == 0) | (q.span[i] != k.span[j]))
        found.append(_tiles_of_pairs(q, k, i[apart], j[apart], reach))
    # and the runs of its own span, wherever they stand
    images = np.flatnonzero(q.span)
    by_span = np.argsort(k.span, kind="stable")
    first, last = (
        np.searchsorted(k.span[by_span], q.span[images], side=side) for side in ("left", "right")
    )
    for part in _chunks(last - first):
        j, i = expand(first[part], last[part])
        found.append(_tiles_of_pairs(q, k, images[i + part.start], by_span[j], reach))
    if not found:
        return tuple(np.zeros(0, np.int64) for _ in range(4))
    row, start, stop, kind = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    in_key_order = np.lexsort((start, row))
    row, start, stop, kind = (array[in_key_order] for array in (row, start, stop, kind))
    # [tiles - 1]: a full tile goes on where the one before it ended
    joins = (
        (row[1:] == row[:-1]) & (kind[1:] == FULL) & (kind[:-1] == FULL) & (start[1:] == stop[:-1])
    )
    heads = np.flatnonzero(
        np.append(True, ~joins)[: len(row)]
    )  # the first of those that are one tile
    tails = np.append(heads[1:], len(row))[: len(heads)] - 1
    return row[heads], start[heads], stop[tails], kind[heads]


def _equal_to_previous(table: TileTable) -> np.ndarray:
    """bool `[rows]`: the row touches the one before and sees exactly the same tiles, all full."""
    count = np.diff(table.first)  # [rows]: tiles of each
    equal = np.zeros(len(count), bool)
    equal[1:] = (table.row_start[1:] == table.row_stop[:-1]) & (count[1:] == count[:-1])
    tile = np.flatnonzero(equal[table.row_of_tile])  # the tiles of rows that may be equal
    before = tile - count[table.row_of_tile[tile]]  # the tile of the same number in the row before
    same = (table.k_start[tile] == table.k_start[before]) & (
        table.k_stop[tile] == table.k_stop[before]
    )
    same &= (table.kind[tile] == FULL) & (table.kind[before] == FULL)
    equal[table.row_of_tile[tile[~same]]] = False
    return equal


def _join_rows(table: TileTable) -> TileTable:
    """Join neighbouring rows that see exactly the same full tiles."""
    equal = _equal_to_previous(table)
    if not equal.any():
        return table
    kept = np.flatnonzero(
        ~equal
    )  # the first row of each that becomes one, whose tiles are those of all
    last = np.append(kept[1:], len(equal)) - 1
    tiles = np.flatnonzero(~equal[table.row_of_tile])
    first = np.concatenate([[0], np.cumsum(np.diff(table.first)[kept])])
    return TileTable(
        table.q,
        table.k,
        table.reach,
        table.row_start[kept],
        table.row_stop[last],
        first,
        table.k_start[tiles],
        table.k_stop[tiles],
        table.kind[tiles],
    )


def tile_table(q: Metadata, k: Metadata, reach: Reach = UNLIMITED) -> TileTable:
    """Exact cover of `allowed(q, k, reach)` by disjoint tiles, in time and memory proportional to
    pairs of runs.

    Places must be unique on each side and hold equal metadata on both sides, as in any permutation
    of one row.
    """
    q_runs = _runs(q)
    k_runs = _runs(k)
    # keys are not cut: a tile may take a part of a run of theirs
    q_runs = _cut(q_runs, _row_cuts(q_runs, k_runs, reach))
    q_runs = q_runs.take(np.argsort(q_runs.start, kind="stable"))
    k_runs = k_runs.take(np.argsort(k_runs.order, kind="stable"))
    run, k_start, k_stop, kind = _tiles(q_runs, k_runs, reach)
    seen, first = np.unique(run, return_index=True)  # runs of queries with a tile become the rows
    bounds = np.append(first, len(run)).astype(np.int64)
    return _join_rows(
        TileTable(q, k, reach, q_runs.start[seen], q_runs.stop[seen], bounds, k_start, k_stop, kind)
    )
