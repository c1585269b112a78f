"""The attention mask as data: a few integers per token, and its exact cover with rectangles and
triangles.

A row contains trees in depth-first order. Each document is a tree whose root is its prefix, and any
node may branch. Three numbers per token define the mask. `order` is the token's position in the
row. `leave` is the first position after the subtree of the token's node. `span` is the number of
the token's span, or 0 outside spans.

    allow(q, k) = order[k] <= order[q] < leave[k]   or   span[q] == span[k] != 0

Padding has leave 0. A layer may limit how far a query looks back along its path in the tree (see
`Reach`). `depth` is the number of tokens before a token on this path.

No array of all (query, key) pairs is ever built. Queries and keys are cut into runs with equal
metadata and consecutive orders. Query runs are cut again where key runs end and where windows
begin. A key run then contains either all tokens of a query run or none of them, even after the
query run is shifted by the window. The allowed pairs of two runs therefore form at most one
rectangle and two triangles, and no tile is partly masked. The computation uses array arithmetic
without a loop over documents or tiles.

Letters in shapes: `T` tokens in a row, `n` tokens on one side of a table, `m` selected tokens. `i`
and `j` number the runs of queries and keys.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

FULL = 1
"""A tile in which every pair is allowed."""
CAUSAL = 2
"""A square tile whose lower triangle is allowed: `k_index - k_start <= q_index - q_start`."""
WINDOW = 3
"""A square tile whose upper triangle is allowed: `k_index - k_start >= q_index - q_start`."""

_PART = 64
"""The parts of windowed queries have a multiple of this length, which suits the kernels."""
_PAIRS_AT_ONCE = 1 << 20
"""Maximum number of run pairs compared at once; keeps planning memory at a few tens of MiB."""


class Reach(NamedTuple):
    """Limits on how far back a layer looks along a token's path; 0 means no limit."""

    window: int = 0
    """Number of most recent tokens that a query attends to, including itself."""
    chunk: int = 0
    """Chunk length: paths are cut into chunks, and queries attend only within their own chunk."""


UNLIMITED = Reach()


@dataclass(frozen=True)
class Metadata:
    """Mask metadata of `n` tokens: int arrays `[n]`."""

    leave: np.ndarray
    span: np.ndarray
    order: np.ndarray
    depth: np.ndarray

    @staticmethod
    def of_row(leave: np.ndarray, span: np.ndarray) -> Metadata:
        """Return the metadata of a whole row in natural order, given `leave[T]` and `span[T]`."""
        real = leave > 0
        order = np.arange(len(leave))
        # depth = real tokens before the token, minus the tokens of nodes whose subtree has ended
        ends = np.bincount(leave[real], minlength=len(leave) + 1)
        left = np.cumsum(ends)[: len(leave)]
        return Metadata(leave, span, order, np.cumsum(real) - real - left)

    @staticmethod
    def of_documents(
        document: np.ndarray, branch: np.ndarray | int = 0, span: np.ndarray | int = 0
    ) -> Metadata:
        """Return a row's metadata from each token's document (-1 for padding), branch and span.

        Arrays are `[T]`. Branch 0 is the prefix of a document; branches 1, 2, ... are alternative
        endings. Equal span numbers in different documents or branches denote separate spans.

        Raise ValueError if the tokens of a document are not contiguous (padding may be in between).
        """
        branch = np.broadcast_to(branch, document.shape)
        span = np.broadcast_to(span, document.shape)
        # number spans by (document, branch, span), so that a span never leaves its branch
        columns = np.stack([document, branch, span])
        number = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1) + 1
        # a prefix ends with the last token of its document, a branch with its own last token
        document_end = _last(document)
        branch_end = _last(document_end * len(document) + branch)
        end = np.where(branch == 0, document_end, branch_end)
        leave = np.where(document >= 0, end + 1, 0)
        row = Metadata.of_row(leave, np.where(span != 0, number, 0))
        if row.document.max(initial=-1) + 1 != len(np.unique(document[document >= 0])):
            raise ValueError(
                "a document is split into several parts of this row; make its tokens contiguous"
            )
        return row

    def __len__(self) -> int:
        return len(self.order)

    def take(self, indices: np.ndarray) -> Metadata:
        """Return the metadata of the tokens `indices[m]`, in that order."""
        leave = self.leave[indices]
        span = self.span[indices]
        return Metadata(leave, span, self.order[indices], self.depth[indices])

    @functools.cached_property
    def document(self) -> np.ndarray:
        """int64 `[n]`: each token's document number within this row; -1 for padding."""
        by_order = np.argsort(self.order, kind="stable")
        # no node of a tree ends after its root, so the running maximum is the end of the tree
        end = np.empty(len(self), np.int64)
        end[by_order] = np.maximum.accumulate(self.leave[by_order])
        real = self.leave > 0
        number = np.full(len(self), -1)
        number[real] = np.unique(end[real], return_inverse=True)[1]
        return number

    @functools.cached_property
    def own_table(self) -> TileTable:
        """Tile table with these tokens as both queries and keys."""
        return tile_table(self, self)

    @functools.cached_property
    def by_type(self) -> Metadata:
        """The same tokens in the order of `text_before_images`."""
        return self.take(text_before_images(self)) if self.span.any() else self

    @property
    def cost(self) -> np.ndarray:
        """`cost_within` for a layer with unlimited reach."""
        return self.cost_within(UNLIMITED)

    def cost_within(self, reach: Reach) -> np.ndarray:
        """Return how many of these tokens each token attends to, int64 `[n]`.

        Tokens are sorted by type before counting, because this order needs fewer tiles.
        """
        table = tile_table(self.by_type, self.by_type, reach)
        cost = np.empty(len(self), np.int64)
        cost[text_before_images(self)] = table.keys_per_query
        return cost


def _last(values: np.ndarray) -> np.ndarray:
    """Return, for each element, the index of the last element with the same value, int64 `[n]`."""
    group = np.unique(values, return_inverse=True)[1].reshape(-1)
    found = np.zeros(len(values), np.int64)
    found[group] = np.arange(len(values))  # later elements overwrite earlier ones
    return found[group]


def text_before_images(metadata: Metadata) -> np.ndarray:
    """Return indices `[n]` that move each document's text before its images.

    The text and the images of a document each keep their order.
    """
    if not metadata.span.any():
        return np.arange(len(metadata))
    return np.lexsort((metadata.order, metadata.span != 0, metadata.document))


@dataclass(frozen=True)
class Tile:
    """Keys `[k_start, k_stop)` that a row of queries attends to."""

    k_start: int
    k_stop: int
    kind: int


@dataclass(frozen=True)
class TileRow:
    """Queries `[q_start, q_stop)` and all of their tiles, in key order.

    A row has at most one triangle of each kind.
    """

    q_start: int
    q_stop: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class TileTable:
    """The non-empty part of the mask between queries `q` and keys `k`, as arrays of rows and tiles.

    Row i contains the queries `[row_start[i], row_stop[i])`. Rows are disjoint and ascending. The
    tiles of row i have the numbers `first[i]` to `first[i + 1]`, in key order. Queries without a
    row attend to no key.
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
        """Number of query tokens, including queries without keys."""
        return len(self.q)

    @property
    def keys(self) -> int:
        """Number of key tokens."""
        return len(self.k)

    @property
    def num_tiles(self) -> int:
        """Number of tiles; none of them is empty."""
        return len(self.kind)

    @functools.cached_property
    def row_of_tile(self) -> np.ndarray:
        """int64 `[tiles]`: row number of each tile."""
        return np.repeat(np.arange(len(self.row_start)), np.diff(self.first))

    @functools.cached_property
    def area(self) -> int:
        """Number of allowed (query, key) pairs."""
        n = (self.row_stop - self.row_start)[self.row_of_tile]  # [tiles], side of a triangle
        triangle = n * (n + 1) // 2
        rectangle = n * (self.k_stop - self.k_start)
        return int(np.where(self.kind == FULL, rectangle, triangle).sum())

    @functools.cached_property
    def keys_per_query(self) -> np.ndarray:
        """int64 `[queries]`: number of keys that each query attends to; the sum is `area`."""
        # every query of a row attends to all keys of the row's full tiles
        full = np.where(self.kind == FULL, self.k_stop - self.k_start, 0)  # [tiles]
        bounds = np.concatenate([[0], np.cumsum(full)])
        width = np.diff(bounds[self.first])  # [rows]
        # [rows]: whether the row has a triangle of this kind
        causal = np.zeros(len(self.row_start), bool)
        causal[self.row_of_tile[self.kind == CAUSAL]] = True
        window = np.zeros(len(self.row_start), bool)
        window[self.row_of_tile[self.kind == WINDOW]] = True

        seen = np.zeros(self.queries, np.int64)
        index, row = expand(self.row_start, self.row_stop)
        # queries attend to 1, 2, ..., n keys in a causal triangle, to n, ..., 2, 1 in a window's
        in_causal = index - self.row_start[row] + 1
        in_window = self.row_stop[row] - index
        seen[index] = width[row] + np.where(causal[row], in_causal, 0)
        seen[index] += np.where(window[row], in_window, 0)
        return seen

    @functools.cached_property
    def needed_keys(self) -> np.ndarray:
        """bool `[keys]`: whether any query attends to the key."""
        # +1 where a tile begins, -1 where it ends: the running sum counts the tiles over each key
        steps = np.zeros(self.keys + 1, np.int64)
        np.add.at(steps, self.k_start, 1)
        np.add.at(steps, self.k_stop, -1)
        return np.cumsum(steps[:-1]) > 0

    @functools.cached_property
    def rows(self) -> tuple[TileRow, ...]:
        """The table as objects, for kernels that iterate over it."""
        columns = (self.k_start.tolist(), self.k_stop.tolist(), self.kind.tolist())
        tiles = [Tile(*numbers) for numbers in zip(*columns, strict=True)]
        bounds = self.first.tolist()
        starts = self.row_start.tolist()
        stops = self.row_stop.tolist()
        rows = []
        for start, stop, low, high in zip(starts, stops, bounds[:-1], bounds[1:], strict=True):
            rows.append(TileRow(start, stop, tuple(tiles[low:high])))
        return tuple(rows)


def allowed(q: Metadata, k: Metadata, reach: Reach = UNLIMITED) -> np.ndarray:
    """Return the mask as bool `[len(q), len(k)]`.

    This function is the definition that all tiles must reproduce. References, tests and single
    small tiles use it.
    """
    order = q.order[:, None]
    depth = q.depth[:, None]
    span = q.span[:, None]
    real = q.leave[:, None] > 0
    on_path = (k.order <= order) & (order < k.leave) & real
    seen = on_path | ((span != 0) & (span == k.span))
    if reach.window:
        seen &= depth - k.depth < reach.window
    if reach.chunk:
        seen &= depth // reach.chunk == k.depth // reach.chunk
    return seen


def expand(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all integers in the intervals `[start, stop)`, and the interval number of each.

    Intervals keep their order.
    """
    count = stop - start
    owner = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count) - count  # integers of all earlier intervals
    within = np.arange(len(owner)) - before[owner]  # 0, 1, ... in each interval
    return start[owner] + within, owner


@dataclass(frozen=True)
class _Runs:
    """Maximal runs of local tokens with equal metadata and consecutive orders, without padding.

    All arrays are `[runs]`. A run's metadata is the metadata of its first token.
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
    """Return the runs of these tokens, in local order."""
    n = len(meta)
    change = np.ones(n, dtype=bool)  # True where a run begins
    change[1:] = meta.order[1:] != meta.order[:-1] + 1
    for values in (meta.leave, meta.span):
        change[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(change)
    stop = np.append(start[1:], n)
    first = meta.take(start)  # metadata of the first token of each run
    runs = _Runs(start, stop, first.order, first.leave, first.span, first.depth)
    return runs.take(np.flatnonzero(runs.leave > 0))


def _cut(runs: _Runs, ends: np.ndarray) -> _Runs:
    """Return the runs, cut at each of the sorted `ends` that is strictly inside a run."""
    # the cuts inside a run are ends[first:last]
    first = np.searchsorted(ends, runs.order, side="right")
    last = np.searchsorted(ends, runs.order + runs.length, side="left")
    parts = last - first + 1  # [runs]
    if (parts == 1).all():
        return runs
    # from here on, arrays are [parts]: `within` numbers the parts of a run, `owner` is the run
    within, owner = expand(np.zeros_like(parts), parts)
    cut = runs.take(owner)
    # a part begins with its run or at a cut, and ends where the next part begins
    begin = cut.order.copy()
    inner = within > 0
    cut_before = first[owner] + within - 1  # valid for inner parts only
    begin[inner] = ends[cut_before[inner]]
    end = (runs.order + runs.length)[owner]
    followed = np.flatnonzero(inner) - 1  # parts before an inner part, always of the same run
    end[followed] = begin[followed + 1]
    moved = begin - cut.order  # distance from the first token of the run
    start = cut.start + moved
    stop = start + end - begin
    return _Runs(start, stop, begin, cut.leave, cut.span, cut.depth + moved)


def _window_cuts(q: _Runs, k: _Runs, window: int) -> np.ndarray:
    """Return the query orders at which the window reaches the beginning or end of a key run.

    These queries are `window - 1` tokens deeper than this edge, on the path of the key run.

    The depths of all trees are mapped to separate ranges of one number line. Each range has more
    than `wide` numbers, and no depth or edge exceeds `wide`. A single search therefore finds the
    edges in the tree of each query run.
    """
    # the order at which a tree ends identifies the tree
    orders = np.concatenate([q.order, k.order])
    leaves = np.concatenate([q.leave, k.leave])
    by_order = np.argsort(orders, kind="stable")
    end = np.maximum.accumulate(leaves[by_order])
    deepest = int(max(q.depth.max(initial=0), k.depth.max(initial=0)))
    wide = deepest + int(k.length.max(initial=0)) + window

    def tree_offset(runs: _Runs) -> np.ndarray:
        """Return where the tree of each run begins on the line."""
        tree = np.searchsorted(orders[by_order], runs.order, side="right") - 1
        return end[tree] * (wide + 1)

    first = tree_offset(k) + k.depth + window - 1  # [key runs], place on the line
    edges = np.unique(np.concatenate([first, first + k.length]))
    begin = tree_offset(q) + q.depth  # [query runs]
    first_edge = np.searchsorted(edges, begin)
    last_edge = np.searchsorted(edges, begin + q.length)
    edge, run = expand(first_edge, last_edge)
    return q.order[run] + edges[edge] - begin[run]


def _row_cuts(q: _Runs, k: _Runs, reach: Reach) -> np.ndarray:
    """Return the orders at which query runs are cut.

    A part of a query run then attends to at most three pieces of a key run: a triangle one window
    back (W), keys common to all its queries (F), and a triangle of its own tokens (C).

    With a window of 4, the queries of a single document are cut every 3 tokens. In a longer part, W
    would overlap C:

        key        0 1 2 3 4 5
        query 3    W W W C . .     part [3, 6)
        query 4    . W W C C .
        query 5    . . W C C C

    If another rank has keys [0, 5), queries [5, 12) are cut at 6 and 9 for this reason. They are
    also cut at 8, the first query too far from key 4. Part [6, 8) has a W of keys 3 and 4: query 6
    attends to both keys, query 7 only to the second.
    """
    # key runs begin and end only between parts, so a key run contains either all of a part's
    # tokens or none of them
    ends = [k.order, k.order + k.length]
    shift = reach.window - 1
    if reach.window:
        ends.append(_window_cuts(q, k, reach.window))
    # kernels compute triangles as squares: with parts of an eighth of a window, an eighth is wasted
    part = reach.window
    if shift > 0:
        part = min(shift, -(-shift // (8 * _PART)) * _PART)
    # cut at every depth of the form place + n * period
    cuts = [(part, 0), (reach.chunk, 0)]
    if part:
        cuts.append((reach.chunk, shift))  # deeper in a chunk, the window is inside the chunk
    for period, place in cuts:
        if period:
            ahead = (place - q.depth) % period  # distance from the run's beginning to the first cut
            count = np.maximum(0, -((ahead - q.length) // period))
            times, i = expand(np.zeros_like(ahead), count)
            ends.append(q.order[i] + ahead[i] + times * period)
    return np.unique(np.concatenate(ends))


def _tiles_of_pairs(
    q: _Runs, k: _Runs, i: np.ndarray, j: np.ndarray, reach: Reach
) -> tuple[np.ndarray, ...]:
    """Return (run of q, k_start, k_stop, kind) for the tiles of each pair (run i of q, run j of k).

    A pair has at most three tiles. Positions are relative to the first key of run j. For example,
    with a window of 6, queries [6, 8) have these tiles in keys [0, 8):

        0          edge = 1      low = 3       own = high = 6     8
        | masked   | WINDOW      | FULL        | CAUSAL           |
                   |-- length ---|             |---- length ------|
    """
    # all arrays are [pairs]; a single query has no triangles, and all its keys are FULL
    length = q.length[i]
    keys = k.length[j]
    span = q.span[i]
    order = q.order[i]
    same_span = (span != 0) & (span == k.span[j])
    on_path = (k.order[j] <= order) & (order < k.leave[j])
    own = order - k.order[j]  # where the queries' own tokens begin, if the key run has them
    # for a single query, its own key is like any other key and needs no triangle
    causal = on_path & (own < keys) & ~same_span & (length > 1)

    # all queries attend to [low, high): a whole run of their span, or a run of their path up to
    # their own tokens
    low = np.zeros_like(own)
    path_end = np.minimum(keys, own + (length == 1))
    high = np.where(same_span, keys, np.where(on_path, path_end, 0))
    high = np.where(causal, own, high)
    back = q.depth[i] - k.depth[j]  # the key at the depth of the first query
    edge = back - (reach.window - 1)  # the first key within the first query's window
    square = np.zeros(len(i), bool)
    if reach.window:
        square = (edge >= 0) & (edge < keys) & (length > 1) & (high > 0)
        low = np.maximum(low, edge + np.where(length > 1, length, 0))
    if reach.chunk:
        first = back - q.depth[i] % reach.chunk  # the first key of the queries' chunk
        low = np.maximum(low, first)
        high = np.minimum(high, first + reach.chunk)
        square &= edge >= first

    found = []
    for present, begin, end, kind in (
        (high > low, low, high, FULL),
        (causal, own, own + length, CAUSAL),
        (square, edge, edge + length, WINDOW),
    ):
        kept = np.flatnonzero(present)
        first_key = k.start[j[kept]]
        k_start = first_key + begin[kept]
        k_stop = first_key + end[kept]
        found.append((i[kept], k_start, k_stop, np.full(len(kept), kind)))
    return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))


def _chunks(count: np.ndarray) -> list[slice]:
    """Return slices of the query runs with at most about `_PAIRS_AT_ONCE` pairs each.

    `count` is the number of key runs for each query run.
    """
    group = np.cumsum(count) // _PAIRS_AT_ONCE
    inner = np.flatnonzero(np.diff(group)) + 1
    bounds = [0, *inner.tolist(), len(count)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds) if high > low]


def _tiles(q: _Runs, k: _Runs, reach: Reach) -> tuple[np.ndarray, ...]:
    """Return (run of q, k_start, k_stop, kind) for every tile, with adjacent full tiles joined.

    `q` must be sorted by start, `k` by order.
    """
    found = []
    # candidates by path are key runs [first, last): they begin no later than the queries, and the
    # subtree of at least one of them is still open
    last = np.searchsorted(k.order, q.order, side="right")
    open_until = np.maximum.accumulate(k.leave)
    first = np.minimum(last, np.searchsorted(open_until, q.order, side="right"))
    for part in _chunks(last - first):
        j, i = expand(first[part], last[part])
        i += part.start  # `expand` numbers the runs within the part
        span = q.span[i]
        apart = np.flatnonzero((span == 0) | (span != k.span[j]))
        found.append(_tiles_of_pairs(q, k, i[apart], j[apart], reach))

    # candidates by span: all key runs of the query's span, anywhere in the row
    images = np.flatnonzero(q.span)
    by_span = np.argsort(k.span, kind="stable")
    sorted_spans = k.span[by_span]
    first = np.searchsorted(sorted_spans, q.span[images], side="left")
    last = np.searchsorted(sorted_spans, q.span[images], side="right")
    for part in _chunks(last - first):
        j, i = expand(first[part], last[part])
        found.append(_tiles_of_pairs(q, k, images[i + part.start], by_span[j], reach))
    if not found:
        return tuple(np.zeros(0, np.int64) for _ in range(4))

    row, start, stop, kind = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    in_key_order = np.lexsort((start, row))
    row, start, stop, kind = (array[in_key_order] for array in (row, start, stop, kind))
    # [tiles - 1]: whether a full tile continues the previous one
    both_full = (kind[1:] == FULL) & (kind[:-1] == FULL)
    joins = both_full & (row[1:] == row[:-1])
    joins &= start[1:] == stop[:-1]
    # first and last tile of each joined group
    heads = np.flatnonzero(np.append(True, ~joins)[: len(row)])
    tails = np.append(heads[1:], len(row))[: len(heads)] - 1
    return row[heads], start[heads], stop[tails], kind[heads]


def _equal_to_previous(table: TileTable) -> np.ndarray:
    """Return bool `[rows]`: whether a row continues the previous row and has the same full tiles.

    The result is False for rows with a triangle.
    """
    count = np.diff(table.first)  # [rows], number of tiles
    equal = np.zeros(len(count), bool)
    equal[1:] = table.row_start[1:] == table.row_stop[:-1]
    equal[1:] &= count[1:] == count[:-1]
    # compare each tile of a candidate row with the tile of the same number in the previous row
    tile = np.flatnonzero(equal[table.row_of_tile])
    before = tile - count[table.row_of_tile[tile]]
    same = table.k_start[tile] == table.k_start[before]
    same &= table.k_stop[tile] == table.k_stop[before]
    same &= (table.kind[tile] == FULL) & (table.kind[before] == FULL)
    equal[table.row_of_tile[tile[~same]]] = False
    return equal


def _join_rows(table: TileTable) -> TileTable:
    """Return the table with adjacent rows joined if they have exactly the same full tiles."""
    equal = _equal_to_previous(table)
    if not equal.any():
        return table
    # keep the first row of each group with its tiles, and extend it to the end of the last row
    kept = np.flatnonzero(~equal)
    last = np.append(kept[1:], len(equal)) - 1
    tiles = np.flatnonzero(~equal[table.row_of_tile])
    count = np.diff(table.first)[kept]
    return replace(
        table,
        row_start=table.row_start[kept],
        row_stop=table.row_stop[last],
        first=np.concatenate([[0], np.cumsum(count)]),
        k_start=table.k_start[tiles],
        k_stop=table.k_stop[tiles],
        kind=table.kind[tiles],
    )


def tile_table(q: Metadata, k: Metadata, reach: Reach = UNLIMITED) -> TileTable:
    """Return an exact cover of `allowed(q, k, reach)` with disjoint tiles.

    Time and memory are proportional to the number of run pairs. Orders must be unique within `q`
    and within `k`, and tokens that occur in both must have the same metadata. Any permutation of
    one row meets these conditions.
    """
    # only queries are cut: a tile may cover part of a key run
    q_runs = _runs(q)
    k_runs = _runs(k)
    q_runs = _cut(q_runs, _row_cuts(q_runs, k_runs, reach))
    q_runs = q_runs.take(np.argsort(q_runs.start, kind="stable"))
    k_runs = k_runs.take(np.argsort(k_runs.order, kind="stable"))
    run, k_start, k_stop, kind = _tiles(q_runs, k_runs, reach)
    # query runs with at least one tile become the rows of the table
    seen, first = np.unique(run, return_index=True)
    bounds = np.append(first, len(run)).astype(np.int64)
    starts = q_runs.start[seen]
    stops = q_runs.stop[seen]
    return _join_rows(TileTable(q, k, reach, starts, stops, bounds, k_start, k_stop, kind))
