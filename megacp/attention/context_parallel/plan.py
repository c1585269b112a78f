"""The plan of one microbatch: the layout's indices and the tile tables, computed once and used by
every layer.

A plan is a function of metadata that every rank of the group holds: integers on the host, equal on
all ranks without a message. Its permutations index a row of `T` tokens, of which a rank holds `t`:

    name          shape     what x[name] is, of a row x                    used by indices
    [cp, t]   what each rank holds                           kv_exchange, states, vision: who has
    what local         [t]       what this rank holds, `indices[cp_rank]`       shard: tokens,
    labels, positions order         [T]       the row as its keys stand side by side         one
    rank, all_gather, kv_exchange _position     [T]       (the inverse of `order`: a token's place)
    here, to stand a rank's tokens in `order`
                            what x[name] is, of x gathered over n ranks
    arrival(n)    [n * t]   as `grouped(n).local`                          a2a, states by heads:
    after the first message departure(n)  [n * t]   (its inverse: rank by rank again)
    and before the second

Text at 0, 2, 4, 6 and a video at 1, 3, 5, 7, zigzag on two ranks: `order` is 0 2 4 6 1 3 5 7 and
`_position` 0 4 1 5 2 6 3 7. Rank 0 holds 0 6 1 7, rank 1 holds 2 4 3 5. With n = 2 these eight come
as 0 6 1 7 2 4 3 5; `arrival` 0 4 5 1 2 6 7 3 makes `order` of them again, and `departure` 0 3 4 7 1
2 5 6 undoes it.
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
    """The order `[T]` in which tokens of a row stand side by side: as they are, or sorted by type
    inside documents.

    Sorted when that makes fewer tiles. Images that see each other across text, such as frames of a
    video, then are one stretch of keys instead of many.
    """
    natural = np.arange(len(metadata))
    if not metadata.span.any():
        return natural
    order = text_before_images(metadata)
    tiles = metadata.by_type.own_table.num_tiles
    # the bound costs a few counts, the table of the natural order many tiles where it is the worse
    fewer = tiles < _least_tiles(metadata) or tiles < metadata.own_table.num_tiles
    return order if fewer else natural


def _least_tiles(metadata: Metadata) -> int:
    """Tiles that the natural order has at the least: the stretches of a span see each other pair by
    pair.
    """
    span = metadata.span
    # a stretch sees each later one of its span by a tile; earlier ones may join with the text
    # between them
    opens = (span != 0) & (np.diff(span, prepend=0) != 0)
    stretches = (
        np.bincount(np.unique(span[opens], return_inverse=True)[1])
        if opens.any()
        else np.zeros(1, np.int64)
    )
    return int((stretches * (stretches - 1) // 2).sum())


class AttentionPlan:
    """What one cp rank must know to attend: `indices[cp, t]` into the row, metadata of all tokens,
    how far the layers look, lazy tile tables.

    `order[T]` is how a whole row stands once it is gathered; each rank's tokens follow the same
    order unless the layout's own is kept because `order` is the natural one.
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
        # a rank's own keys are to be few stretches too; a natural `order` leaves a layout's own,
        # such as zigzag's
        self.indices = (
            np.stack([self._arranged(tokens) for tokens in indices]) if self._by_type else indices
        )

    def _arranged(self, tokens: np.ndarray) -> np.ndarray:
        """The same tokens as they stand in `order`."""
        return tokens[np.argsort(self._position[tokens])]

    @property
    def cp(self) -> int:
        """Number of ranks."""
        return len(self.indices)

    @property
    def local(self) -> np.ndarray:
        """Indices `[t]` into the row of the tokens this rank holds."""
        return self.indices[self.cp_rank]

    def tiles(self, queries: np.ndarray, keys: np.ndarray) -> TileTable:
        """Tiles between tokens of the row, by their indices."""
        return tile_table(self.metadata.take(queries), self.metadata.take(keys), self.reach)

    @once
    def table(self, source: int) -> TileTable:
        """Tiles between this rank's queries and the keys of cp rank `source`, both in local
        order.
        """
        return self.tiles(self.local, self.indices[source])

    @functools.cached_property
    def table_of_row(self) -> TileTable:
        """Tiles between this rank's queries and the whole row in the order `order`."""
        if np.array_equal(self.local, self.order) and self.reach == UNLIMITED:
            # one rank holds the row: the table by which `order` was chosen
            return (self.metadata.by_type if self._by_type else self.metadata).own_table
        return self.tiles(self.local, self.order)

    def within(self, reach: Reach) -> AttentionPlan:
        """The plan of layers that look so far: the same tokens on every rank, in the same order."""
        return self if reach == self.reach else self._within(reach)

    @once
    def _within(self, reach: Reach) -> AttentionPlan:
        return AttentionPlan(self.indices, self.metadata, self.cp_rank, self.order, reach)

    @once
    def grouped(self, size: int) -> AttentionPlan:
        """The plan of groups of `size` neighbouring ranks that hold their tokens together."""
        together = self.indices.reshape(self.cp // size, -1)  # [cp, t] -> [cp / size, size * t]
        arranged = np.stack([self._arranged(tokens) for tokens in together])
        return AttentionPlan(arranged, self.metadata, self.cp_rank // size, self.order, self.reach)

    @once
    def arrival(self, size: int, device: torch.device) -> torch.Tensor:
        """int64 `[size * t]`: puts tokens gathered over this rank's group in rank order into
        `grouped(size)`'s.
        """
        return to_device(self._arrival(size), device)

    @once
    def departure(self, size: int, device: torch.device) -> torch.Tensor:
        """The inverse of `arrival`."""
        return to_device(np.argsort(self._arrival(size)), device)

    def _arrival(self, size: int) -> np.ndarray:
        first = self.cp_rank // size * size  # rank of the group
        # as `_arranged` sorts tokens, but the places that they have in the message
        return np.argsort(self._position[self.indices[first : first + size].reshape(-1)])
