"""The mask on a grid of fixed blocks: which blocks contain allowed pairs, and how many.

Pairs are counted exactly from the tiles of a table, with array arithmetic. Apart from a sort, time
and memory are proportional to the number of tiles and non-empty blocks. An interval of keys covers
at most three stretches of blocks with an equal number of keys per block. A tile of any length
therefore adds only a few sums to a line of blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from megacp.attention.ops.mask import CAUSAL, FULL, WINDOW, Metadata, TileTable, allowed, expand

BLOCK = 128
"""Tokens along each side of a block; FlexAttention's kernels are tuned for this size."""


@dataclass(frozen=True, eq=False)
class BlockCover:
    """The non-empty blocks of `table` on a grid of `size x size`.

    All arrays are int64 `[blocks]`, sorted by query block, then by key block. Block `(i, j)`
    contains the queries `[i * size, (i + 1) * size)` and the keys `[j * size, (j + 1) * size)`. The
    last blocks of a side may extend past the end of the table.
    """

    table: TileTable
    size: int
    q_block: np.ndarray
    k_block: np.ndarray
    area: np.ndarray
    """Number of allowed pairs in each block, at least 1."""

    @property
    def q_blocks(self) -> int:
        """Number of query blocks, including empty ones."""
        return -(-self.table.queries // self.size)

    @property
    def k_blocks(self) -> int:
        """Number of key blocks, including empty ones."""
        return -(-self.table.keys // self.size)

    @functools.cached_property
    def full(self) -> np.ndarray:
        """bool `[blocks]`: whether all `size * size` pairs exist and are allowed.

        A block that extends past the end of the table is never full, because a kernel reads all
        rows of a full block without checking the mask.
        """
        return self.area == self.size**2

    def mask(self, number: int) -> np.ndarray:
        """Return the mask of a block as bool `[queries, keys]`, up to the end of the table."""
        q = self._tokens(self.table.q, self.q_block[number])
        k = self._tokens(self.table.k, self.k_block[number])
        return allowed(q, k, self.table.reach)

    def _tokens(self, side: Metadata, block: int) -> Metadata:
        """Return the tokens of one block of queries or keys."""
        stop = min((block + 1) * self.size, len(side))
        return side.take(np.arange(block * self.size, stop))


@dataclass(frozen=True)
class _Stretches:
    """Weights on lines of numbered positions: `weight` on positions `[start, stop)` of a `line`.

    All arrays are int64 `[stretches]`.
    """

    line: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    weight: np.ndarray

    def take(self, index: np.ndarray) -> _Stretches:
        """Return the stretches at `index`."""
        return _Stretches(self.line[index], self.start[index], self.stop[index], self.weight[index])

    def summed(self, width: int) -> _Stretches:
        """Return the sums of all weights as sorted disjoint stretches of positive weight.

        Positions must be in `[0, width)`, and weights must not be negative. For example, 2 on
        `[0, 3)` and 1 on `[2, 5)` of a line become 2 on `[0, 2)`, 3 on `[2, 3)` and 1 on `[3, 5)`.
        """
        # (line, position) as one number, at which a weight begins or ends: [2 n]; each line has one
        # more position for ends
        line = np.concatenate([self.line, self.line])
        position = np.concatenate([self.start, self.stop])
        at, event = np.unique(line * (width + 1) + position, return_inverse=True)
        change = np.zeros(len(at), np.int64)
        np.add.at(change, event, np.concatenate([self.weight, -self.weight]))
        # weight from each event to the next one; 0 after the last event of a line
        total = np.cumsum(change)
        kept = np.flatnonzero(total)
        line, start = np.divmod(at[kept], width + 1)
        # a kept stretch ends at the next event, which is on the same line
        stop = at[kept + 1] - line * (width + 1)
        return _Stretches(line, start, stop, total[kept])


def _concatenated(parts: list[_Stretches]) -> _Stretches:
    """Return the stretches of all parts."""
    return _Stretches(
        line=np.concatenate([part.line for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        stop=np.concatenate([part.stop for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
    )


def _in_blocks(line: np.ndarray, start: np.ndarray, stop: np.ndarray, size: int) -> _Stretches:
    """Return the number of tokens `[start, stop)` of each line in each block.

    Every interval is split into a partial block, whole blocks, and another partial block. For
    example, tokens `[3, 14)` in blocks of 4 are 1 token of block 0, 4 tokens each of blocks 1 and
    2, and 2 tokens of block 3.
    """
    low = -(-start // size)  # the whole blocks are [low, high)
    high = stop // size
    inside = low > high  # begins and ends inside the same block
    whole = _Stretches(line, low, high, np.full(len(line), size))
    front_end = np.where(inside, stop, low * size)
    front = _Stretches(line, low - 1, low, front_end - start)
    back = _Stretches(line, high, high + 1, stop - high * size)
    has_whole = np.flatnonzero(low < high)
    has_front = np.flatnonzero(front.weight > 0)
    has_back = np.flatnonzero((back.weight > 0) & ~inside)
    return _concatenated([whole.take(has_whole), front.take(has_front), back.take(has_back)])


def _of_full_tiles(table: TileTable, size: int) -> _Stretches:
    """Return the allowed pairs in full tiles; lines are query blocks, positions are key blocks.

    The keys of each row are summed first. A tall row with many tiles then adds to each of its
    blocks only once.
    """
    rows = len(table.row_start)
    tile = np.flatnonzero(table.kind == FULL)
    keys = _in_blocks(table.row_of_tile[tile], table.k_start[tile], table.k_stop[tile], size)
    # line: row, position: key block, weight: keys per query of the row
    keys = keys.summed(-(-table.keys // size))
    # line: row, position: query block, weight: queries of the row
    queries = _in_blocks(np.arange(rows), table.row_start, table.row_stop, size)
    # combine every stretch of queries with every stretch of keys of the same row
    first = np.searchsorted(keys.line, np.arange(rows + 1))  # [rows + 1], first stretch of a row
    stretch, part = expand(first[queries.line], first[queries.line + 1])
    # and once more for every query block of the stretch of queries
    block, pair = expand(queries.start[part], queries.stop[part])
    height = queries.weight[part[pair]]  # queries in the block
    seen = keys.take(stretch[pair])
    return _Stretches(block, seen.start, seen.stop, height * seen.weight)


def _of_triangles(table: TileTable, size: int, kind: int) -> _Stretches:
    """Return the allowed pairs in triangles of one kind; lines are query blocks.

    The part of a tile in one query block is a smaller triangle and a rectangle. The rectangle is to
    the left of a causal triangle, and to the right of a window triangle.
    """
    tile = np.flatnonzero(table.kind == kind)
    row = table.row_of_tile[tile]
    k_start = table.k_start[tile]
    q_start = table.row_start[row]
    q_stop = table.row_stop[row]
    # one part per tile and query block, with `height` queries from `top`; arrays are [parts]
    block, owner = expand(q_start // size, -(-q_stop // size))
    top = np.maximum(block * size, q_start[owner])
    height = np.minimum((block + 1) * size, q_stop[owner]) - top
    corner = k_start[owner] + top - q_start[owner]  # first key of the small triangle
    number = np.arange(len(block))
    if kind == CAUSAL:
        whole = _in_blocks(number, k_start[owner], corner, size)
    else:
        whole = _in_blocks(number, corner + height, table.k_stop[tile][owner], size)
    # replace the line, so far the number of a part, by the query block of the part
    weight = whole.weight * height[whole.line]
    whole = _Stretches(block[whole.line], whole.start, whole.stop, weight)

    # the small triangle is in one key block, or in this one and the next
    column = corner // size
    near = np.minimum(height, (column + 1) * size - corner)  # keys in the first key block
    if kind == CAUSAL:  # height - j queries attend to key j
        pairs = near * height - near * (near - 1) // 2
    else:  # j + 1 queries attend to key j
        pairs = near * (near + 1) // 2
    rest = height * (height + 1) // 2 - pairs
    parts = [
        _Stretches(block, column, column + 1, pairs),
        _Stretches(block, column + 1, column + 2, rest),
    ]
    return _concatenated([whole, *parts])


def block_cover(table: TileTable, size: int = BLOCK) -> BlockCover:
    """Return the blocks of `size x size` pairs that contain an allowed pair of the table."""
    triangles = [_of_triangles(table, size, kind) for kind in (CAUSAL, WINDOW)]
    parts = _concatenated([_of_full_tiles(table, size), *triangles])
    sums = parts.summed(-(-table.keys // size))
    k_block, owner = expand(sums.start, sums.stop)
    return BlockCover(table, size, sums.line[owner], k_block, sums.weight[owner])
