"""The mask on a grid of fixed blocks: the blocks that hold allowed pairs, and how many each holds.

Pairs are counted exactly from the tiles of a table by arithmetic on arrays. Time (but for a sort)
and memory are proportional to the tiles and the non-empty blocks. An interval of keys is at most
three stretches of blocks with one number of keys each. So a tile of any length adds a few sums to a
line of blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from megacp.attention.ops.mask import CAUSAL, FULL, WINDOW, TileTable, allowed, expand

BLOCK = 128
"""Tokens along each side of a block: what FlexAttention's kernels are tuned for."""


@dataclass(frozen=True, eq=False)
class BlockCover:
    """The non-empty blocks of `table` on a grid of `size x size`: int64 arrays, by query block,
    then key block.

    Block `(i, j)` holds the queries `[i * size, (i + 1) * size)` and the keys `[j * size, (j + 1) *
    size)`; the last ones of a side may stick out of the table.
    """

    table: TileTable
    size: int
    q_block: np.ndarray
    k_block: np.ndarray
    area: np.ndarray
    """Allowed pairs of each block, at least 1."""

    @property
    def q_blocks(self) -> int:
        """Number of query blocks, empty ones counted."""
        return -(-self.table.queries // self.size)

    @property
    def k_blocks(self) -> int:
        """Number of key blocks, empty ones counted."""
        return -(-self.table.keys // self.size)

    @functools.cached_property
    def full(self) -> np.ndarray:
        """bool `[blocks]`: every one of the `size * size` pairs exists and is allowed.

        A block that sticks out is never full: a kernel that skips the mask in full blocks reads all
        of their rows.
        """
        return self.area == self.size**2

    def mask(self, number: int) -> np.ndarray:
        """bool `[queries, keys]` of block `number`, without what sticks out of the table."""
        sides = ((self.table.q, self.q_block), (self.table.k, self.k_block))
        q, k = (
            meta.take(
                np.arange(
                    blocks[number] * self.size, min((blocks[number] + 1) * self.size, len(meta))
                )
            )
            for meta, blocks in sides
        )
        return allowed(q, k, self.table.reach)


@dataclass(frozen=True)
class _Stretches:
    """Weights on lines of numbered positions: `weight` on each of `[start, stop)` of a line; int64
    arrays.
    """

    line: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    weight: np.ndarray

    def take(self, index: np.ndarray) -> _Stretches:
        return _Stretches(self.line[index], self.start[index], self.stop[index], self.weight[index])

    def summed(self, width: int) -> _Stretches:
        """The same sums by disjoint stretches of positive weight, sorted; positions lie in `[0,
        width)`, weights >= 0.

        On one line 2 on `[0, 3)` and 1 on `[2, 5)` become 2 on `[0, 2)`, 3 on `[2, 3)` and 1 on
        `[3, 5)`.
        """
        # [2 n]: where a weight begins and ends, as one number for (line, position); a line has
        # width + 1 for ends
        at = np.concatenate([self.line, self.line]) * (width + 1) + np.concatenate(
            [self.start, self.stop]
        )
        at, event = np.unique(at, return_inverse=True)
        change = np.zeros(len(at), np.int64)
        np.add.at(change, event, np.concatenate([self.weight, -self.weight]))
        total = np.cumsum(
            change
        )  # the weight from each position to the next; 0 at the end of every line
        kept = np.flatnonzero(total)
        line, start = np.divmod(at[kept], width + 1)
        # a stretch ends at the next event, which is on its line: the total is 0 at the end of each
        return _Stretches(line, start, at[kept + 1] - line * (width + 1), total[kept])


def _concatenated(parts: list[_Stretches]) -> _Stretches:
    columns = zip(*((part.line, part.start, part.stop, part.weight) for part in parts), strict=True)
    return _Stretches(*(np.concatenate(column) for column in columns))


def _in_blocks(line: np.ndarray, start: np.ndarray, stop: np.ndarray, size: int) -> _Stretches:
    """Tokens `[start, stop)` of each line counted per block: the block cut at the front, whole
    ones, the cut last.

    Tokens `[3, 14)` in blocks of 4 are 1 of block 0, 4 of each of blocks 1 and 2, and 2 of block 3.
    """
    low = -(-start // size)  # the whole blocks are [low, high)
    high = stop // size
    inside = low > high  # begins and ends inside one block
    whole = _Stretches(line, low, high, np.full(len(line), size))
    front = _Stretches(line, low - 1, low, np.where(inside, stop, low * size) - start)
    back = _Stretches(line, high, high + 1, stop - high * size)
    return _concatenated(
        [
            whole.take(np.flatnonzero(low < high)),
            front.take(np.flatnonzero(front.weight > 0)),
            back.take(np.flatnonzero((back.weight > 0) & ~inside)),
        ]
    )


def _of_full_tiles(table: TileTable, size: int) -> _Stretches:
    """Allowed pairs of the full tiles: lines are query blocks, positions key blocks.

    The keys of a row are summed first, so that a tall row of many tiles costs its blocks once.
    """
    rows = len(table.row_start)
    tile = np.flatnonzero(table.kind == FULL)
    keys = _in_blocks(table.row_of_tile[tile], table.k_start[tile], table.k_stop[tile], size)
    keys = keys.summed(
        -(-table.keys // size)
    )  # line: row, weight: keys that a query of the row sees
    queries = _in_blocks(np.arange(rows), table.row_start, table.row_stop, size)
    first = np.searchsorted(
        keys.line, np.arange(rows + 1)
    )  # [rows + 1]: where the stretches of a row begin
    stretch, part = expand(
        first[queries.line], first[queries.line + 1]
    )  # pairs of stretches of one row
    block, pair = expand(queries.start[part], queries.stop[part])  # and once for each query block
    height = queries.weight[
        part[pair]
    ]  # queries of the row in the block, each of which sees all of the row's keys
    seen = keys.take(stretch[pair])
    return _Stretches(block, seen.start, seen.stop, height * seen.weight)


def _of_triangles(table: TileTable, size: int, kind: int) -> _Stretches:
    """Allowed pairs of the triangles, likewise: on each query block a triangle, and what is left of
    a causal one's diagonal or right of a window's.
    """
    tile = np.flatnonzero(table.kind == kind)
    row = table.row_of_tile[tile]
    k_start = table.k_start[tile]
    q_start = table.row_start[row]
    q_stop = table.row_stop[row]
    block, owner = expand(q_start // size, -(-q_stop // size))
    # [tiles x their query blocks]: the part of a triangle in one query block, `height` queries from
    # `top` on
    top = np.maximum(block * size, q_start[owner])
    height = np.minimum((block + 1) * size, q_stop[owner]) - top
    corner = k_start[owner] + top - q_start[owner]  # the key at the index of the first query
    beside = (
        (k_start[owner], corner) if kind == CAUSAL else (corner + height, table.k_stop[tile][owner])
    )
    whole = _in_blocks(np.arange(len(block)), *beside, size)
    # a line was a part of a tile; from here on it is that part's query block
    whole = _Stretches(
        block[whole.line], whole.start, whole.stop, whole.weight * height[whole.line]
    )
    column = corner // size  # the triangle lies in this key block and perhaps the next
    near = np.minimum(height, (column + 1) * size - corner)  # its keys in the first one
    # its key j is seen by height - j queries of a causal one, and by j + 1 of a window's
    pairs = near * height - near * (near - 1) // 2 if kind == CAUSAL else near * (near + 1) // 2
    rest = height * (height + 1) // 2 - pairs
    parts = [
        _Stretches(block, column, column + 1, pairs),
        _Stretches(block, column + 1, column + 2, rest),
    ]
    return _concatenated([whole, *parts])


def block_cover(table: TileTable, size: int = BLOCK) -> BlockCover:
    """The blocks of `size x size` that hold an allowed pair of the table."""
    triangles = [_of_triangles(table, size, kind) for kind in (CAUSAL, WINDOW)]
    parts = _concatenated([_of_full_tiles(table, size), *triangles])
    sums = parts.summed(-(-table.keys // size))
    k_block, owner = expand(sums.start, sums.stop)
    return BlockCover(table, size, sums.line[owner], k_block, sums.weight[owner])
