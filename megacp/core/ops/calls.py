"""How a table of tiles becomes kernel calls: small tiles of neighbouring rows are computed together under a mask.

Key property: a call costs as much as some thousand pairs. So rows of short documents and branches are joined while
their masked block is cheaper than calls of their own. Pairs that are computed in vain stay few. Rejected: a call per
tile, hundreds of them for a row of short records. Rejected: one masked call for a whole row, which computes S x S
pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megacp.core.ops.mask import CAUSAL, FULL, TileRow, TileTable
from megacp.core.ops.to_device import to_device

CALL = 300_000
"""What a call costs beside its pairs, in pairs times elements of a query: half as much or twice as much is slower on a
CPU, for rows of 1,024 tokens and elements from 32 to 2,048."""
GATHERED_ELEMENTS = 16_384
"""Elements of K up to which a tile is copied beside others into one kernel call (about 30 microseconds either way)."""


MOST_PAIRS = 1 << 17
"""Pairs of a masked call: bounds the memory of masks, and keeps blocks of long documents without one."""


class Widths(NamedTuple):
    """Elements of a query (heads x dim) and of a key (groups x dim)."""

    query: int
    key: int


class Allowed(NamedTuple):
    """Which pairs of a block of `n` queries and `m` keys are allowed: all of them, a triangle, or what `bias` says."""

    causal: bool = False
    bias: torch.Tensor | None = None
    """fp16 `[n, m]`, to be added to the scores: 0 for an allowed pair, else -inf; every query sees a key."""

    def pairs(self, n: int, m: int) -> int:
        """How many of the `n * m` pairs."""
        if self.causal:
            return n * (n + 1) // 2
        return n * m if self.bias is None else int((self.bias == 0).sum())


@dataclass(frozen=True, eq=False)
class KernelCall:
    """Queries and keys that a kernel computes at once: `n` queries, and `m` keys in ascending disjoint slices."""

    rows: slice
    keys: tuple[slice, ...]
    causal: bool
    """The keys are a causal triangle."""
    bias: np.ndarray | None
    """fp16 `[n, m]` of a masked call, see `Allowed`."""
    first: bool
    """No earlier call of the table has these queries."""

    @property
    def queries(self) -> int:
        """`n`."""
        return self.rows.stop - self.rows.start

    @property
    def num_keys(self) -> int:
        """`m`."""
        return _length(self.keys)

    def allowed(self, device: torch.device) -> Allowed:
        """What a kernel on the device must know of the mask."""
        return Allowed(self.causal, None if self.bias is None else to_device(self.bias, device))


def table_calls(table: TileTable, widths: Widths) -> tuple[KernelCall, ...]:
    """The calls of one pass over `table`, which compute every allowed pair once. Made once, and kept with the table."""
    return table.part(
        widths, lambda: tuple(call for group in _groups(table.rows, widths) for call in _calls(group, widths))
    )


@dataclass(frozen=True)
class _RowGroup:
    """Rows that touch, the union of their keys, and the cost of the cheapest way to compute them."""

    rows: tuple[TileRow, ...]
    keys: tuple[slice, ...]
    cost: int

    @property
    def queries(self) -> slice:
        return slice(self.rows[0].q_start, self.rows[-1].q_stop)


def _groups(rows: Iterable[TileRow], widths: Widths) -> Iterator[_RowGroup]:
    """Rows in order, each joined to the group before it where that costs no more."""
    group: _RowGroup | None = None
    for row in rows:
        keys = tuple(slice(tile.k_start, tile.k_stop) for tile in row.tiles)
        block = _block((row,), _union(keys), widths)
        alone = block if block.cost < (apart := _apart(row, widths)) else _RowGroup((row,), block.keys, apart)
        if group is not None and group.queries.stop == row.q_start:
            joined = _block((*group.rows, row), _union((*group.keys, *keys)), widths)
            if joined.cost <= group.cost + alone.cost:
                group = joined
                continue
        if group is not None:
            yield group
        group = alone
    if group is not None:
        yield group


def _block(rows: tuple[TileRow, ...], keys: tuple[slice, ...], widths: Widths) -> _RowGroup:
    """The rows as one masked call; one of too many pairs is dearer than anything."""
    pairs = (rows[-1].q_stop - rows[0].q_start) * _length(keys)
    return _RowGroup(rows, keys, CALL + pairs * widths.query if pairs <= MOST_PAIRS else sys.maxsize)


def _apart(row: TileRow, widths: Widths) -> int:
    """What the calls of a row cost without a mask."""
    height = row.q_stop - row.q_start
    sources = key_sources(row, widths.key)
    return sum(CALL + height * _length(keys) * widths.query // (2 if causal else 1) for keys, causal in sources)


def _calls(group: _RowGroup, widths: Widths) -> Iterator[KernelCall]:
    if len(group.rows) == 1 and group.cost == _apart(group.rows[0], widths):
        for number, (keys, causal) in enumerate(key_sources(group.rows[0], widths.key)):
            yield KernelCall(group.queries, keys, causal, None, number == 0)
    else:
        yield KernelCall(group.queries, group.keys, False, _bias(group), True)


def _bias(group: _RowGroup) -> np.ndarray:
    """fp16 `[n, m]` of a masked call, which kernels turn into their dtype faster than a bool mask into a bias."""
    # [slices]: key k of a slice stands in column k + offset, as the slices lie side by side
    starts = np.array([part.start for part in group.keys])
    offsets = np.cumsum([0, *(part.stop - part.start for part in group.keys)])[:-1] - starts
    bias = np.full((group.queries.stop - group.queries.start, _length(group.keys)), -np.inf, np.float16)
    for row in group.rows:
        rows = bias[row.q_start - group.queries.start : row.q_stop - group.queries.start]
        for tile in row.tiles:
            offset = offsets[np.searchsorted(starts, tile.k_start, side="right") - 1]
            pairs = rows[:, tile.k_start + offset : tile.k_stop + offset]  # a view [row's queries, tile's keys]
            pairs[np.tri(*pairs.shape) > 0 if tile.kind == CAUSAL else ...] = 0.0
    return bias


KeySource = tuple[tuple[slice, ...], bool]
"""Slices of keys that one call sees together, and whether they are a causal triangle."""


def key_sources(row: TileRow, width: int) -> list[KeySource]:
    """How the tiles of a row become calls without a mask; `width` is the number of elements of a key.

    Small full tiles are copied together, as a call costs more than the copy; large ones are used where they are.
    """
    sources: list[KeySource] = []
    small: list[slice] = []
    for tile in row.tiles:
        keys = slice(tile.k_start, tile.k_stop)
        if tile.kind == FULL and (tile.k_stop - tile.k_start) * width <= GATHERED_ELEMENTS:
            small.append(keys)
        else:
            sources.append(((keys,), tile.kind == CAUSAL))
    if small:
        sources.append((tuple(small), False))
    return sources


def _length(keys: tuple[slice, ...]) -> int:
    return sum(part.stop - part.start for part in keys)


def _union(keys: Iterable[slice]) -> tuple[slice, ...]:
    """The same keys as ascending slices that do not touch."""
    found: list[slice] = []
    for part in sorted(keys, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return tuple(found)
