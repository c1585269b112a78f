"""The attention plan of one microbatch: the layout's indices and the tile tables.

A plan is computed once and used by every layer. It depends only on metadata that every rank of the
group has, so all ranks compute the same host integers without communication. Its permutations index
a row of `T` tokens, `t` of which are local to a rank:

    name          shape     x[name], for a row x                     used by
    indices       [cp, t]   tokens of every rank                     kv_exchange, states, vision
    local         [t]       tokens of this rank                      sharding of tokens and labels
    order         [T]       the row, sorted as its keys are stored   one rank, all_gather,
                                                                     kv_exchange
    _position     [T]       (inverse of `order`)                     sorting tokens by `order`

                            x[name], for x gathered over n ranks
    arrival(n)    [n * t]   tokens in the order of                   a2a and states by heads, after
                            `grouped(n).local`                       the first message
    departure(n)  [n * t]   tokens rank by rank again (inverse)      and before the second message

Example: text at 0, 2, 4, 6 and a video at 1, 3, 5, 7, zigzag on two ranks.

* `order` is 0 2 4 6 1 3 5 7 and `_position` is 0 4 1 5 2 6 3 7.
* Rank 0 gets tokens 0 6 1 7, rank 1 gets tokens 2 4 3 5.
* With n = 2 the tokens arrive as 0 6 1 7 2 4 3 5. `arrival` 0 4 5 1 2 6 7 3 sorts them by `order`
  again, and `departure` 0 3 4 7 1 2 5 6 is its inverse.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from megacp.attention.ops.device import to_device
from megacp.attention.ops.mask import (
    UNLIMITED,
    Metadata,
    Reach,
    TileTable,
    text_before_images,
    tile_table,
)
from megacp.attention.ops.once import once


def key_order(metadata: Metadata) -> np.ndarray:
    """Return the order `[T]` in which keys are stored: natural, or sorted by type in each document.

    Tokens are sorted if that reduces the number of tiles. Images that attend to each
    other across text, such as frames of a video, then form one stretch of keys instead of many.
    """
    natural = np.arange(len(metadata))
    if not metadata.span.any():
        return natural
    order = text_before_images(metadata)
    tiles = metadata.by_type.own_table.num_tiles
    # try the cheap lower bound first: the natural order's own table is large when it is worse
    fewer = tiles < _least_tiles(metadata) or tiles < metadata.own_table.num_tiles
    return order if fewer else natural


def _least_tiles(metadata: Metadata) -> int:
    """Return a lower bound for the number of tiles in natural order.

    The bound counts only pairs of different stretches of the same span.
    """
    span = metadata.span
    opens = (span != 0) & (np.diff(span, prepend=0) != 0)  # [T], first token of each stretch
    if not opens.any():
        return 0
    # each stretch needs a tile for every later stretch of its span; tiles for earlier stretches may
    # be joined with the text in between
    stretches = np.bincount(np.unique(span[opens], return_inverse=True)[1])  # [spans]
    return int((stretches * (stretches - 1) // 2).sum())


class AttentionPlan:
    """Token indices, metadata, reach and tile tables that one cp rank needs for attention.

    `indices[cp, t]` index the row, `metadata` describes all its tokens, and `reach` limits how far
    the layers look back. Tile tables are built when they are first used.

    `order[T]` is the storage order of a gathered row. Each rank's tokens are sorted by it too,
    unless `order` is natural: each rank then keeps the order of the layout.
    """

    def __init__(
        self,
        indices: np.ndarray,
        metadata: Metadata,
        cp_rank: int,
        order: np.ndarray | None = None,
        reach: Reach = UNLIMITED,
    ) -> None:
        self.metadata = metadata
        self.reach = reach
        self.cp_rank = cp_rank
        self.order = key_order(metadata) if order is None else order
        self._by_type = bool((np.diff(self.order) < 0).any())
        self._position = np.argsort(self.order)
        # few stretches of keys per rank mean few tiles; a natural `order` leaves the order of a
        # layout such as zigzag unchanged
        if self._by_type:
            indices = np.stack([self._arranged(tokens) for tokens in indices])
        self.indices = indices

    def _arranged(self, tokens: np.ndarray) -> np.ndarray:
        """Return the same tokens sorted by `order`."""
        return tokens[np.argsort(self._position[tokens])]

    @property
    def cp(self) -> int:
        """Number of ranks."""
        return len(self.indices)

    @property
    def local(self) -> np.ndarray:
        """This rank's tokens, as indices `[t]` into the row."""
        return self.indices[self.cp_rank]

    def tiles(self, queries: np.ndarray, keys: np.ndarray) -> TileTable:
        """Return the tiles between two sets of tokens, given as indices into the row."""
        return tile_table(self.metadata.take(queries), self.metadata.take(keys), self.reach)

    @once
    def table(self, source: int) -> TileTable:
        """Return the tiles between this rank's queries and the keys of cp rank `source`.

        Both sides are in local order.
        """
        return self.tiles(self.local, self.indices[source])

    @functools.cached_property
    def table_of_row(self) -> TileTable:
        """Tiles between this rank's queries and the keys of the whole row, in `order`."""
        if np.array_equal(self.local, self.order) and self.reach == UNLIMITED:
            # a single rank has the whole row: reuse the table that `key_order` has built
            metadata = self.metadata.by_type if self._by_type else self.metadata
            return metadata.own_table
        return self.tiles(self.local, self.order)

    def within(self, reach: Reach) -> AttentionPlan:
        """Return the plan for layers with this reach; ranks keep their tokens and order."""
        return self if reach == self.reach else self._within(reach)

    @once
    def _within(self, reach: Reach) -> AttentionPlan:
        return AttentionPlan(self.indices, self.metadata, self.cp_rank, self.order, reach)

    @once
    def grouped(self, size: int) -> AttentionPlan:
        """Return the plan for groups of `size` neighbouring ranks that pool their tokens."""
        together = self.indices.reshape(self.cp // size, -1)  # [cp, t] -> [cp / size, size * t]
        arranged = np.stack([self._arranged(tokens) for tokens in together])
        return AttentionPlan(arranged, self.metadata, self.cp_rank // size, self.order, self.reach)

    @once
    def arrival(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the indices that sort gathered tokens into the order of `grouped(size).local`.

        int64 `[size * t]`; the tokens are gathered across this rank's group, rank by rank.
        """
        return to_device(self._arrival(size), device)

    @once
    def departure(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the inverse of `arrival`, int64 `[size * t]`."""
        return to_device(np.argsort(self._arrival(size)), device)

    def _arrival(self, size: int) -> np.ndarray:
        first = self.cp_rank // size * size  # first rank of the group
        # like `_arranged`, but returns positions in the message instead of tokens
        gathered = self.indices[first : first + size].reshape(-1)
        return np.argsort(self._position[gathered])
