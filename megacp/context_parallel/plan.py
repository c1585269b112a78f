"""The plan of one microbatch: the layout's indices and the tile tables, computed once and used by every layer.

Key property: integers on the host, a pure function of metadata that every rank of the group holds, so ranks agree
without a message. Rejected: deriving masks inside attention from `cu_seqlens`, which can say neither branches nor image
spans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from megacp.ops.mask import Metadata, TileTable, tile_table


class AttentionPlan:
    """What one cp rank must know to attend: `indices[cp, t]` into the row, metadata of all tokens, lazy tile tables."""

    def __init__(self, indices: np.ndarray, metadata: Metadata, cp_rank: int) -> None:
        self.indices = indices
        self.metadata = metadata
        self.cp_rank = cp_rank
        self._tables: dict[int, TileTable] = {}
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    @property
    def local(self) -> np.ndarray:
        """Indices `[t]` into the row of the tokens this rank holds."""
        return self.indices[self.cp_rank]

    def table(self, source: int) -> TileTable:
        """Tiles between this rank's queries and the keys of cp rank `source`, both in local order."""
        if source not in self._tables:
            keys = self.metadata.take(self.indices[source])
            self._tables[source] = tile_table(self.metadata.take(self.local), keys)
        return self._tables[source]

    @functools.cached_property
    def table_of_row(self) -> TileTable:
        """Tiles between this rank's queries and the whole row in its natural order."""
        return tile_table(self.metadata.take(self.local), self.metadata)

    def to_row_order(self, device: torch.device) -> torch.Tensor:
        """int64 `[T]` on `device`: `gathered[to_row_order]` puts tokens gathered in rank order back into the row's."""
        return self._on_device("row", device, lambda: np.argsort(self.indices.reshape(-1)))

    def to_rank_order(self, device: torch.device) -> torch.Tensor:
        """The inverse of `to_row_order`."""
        return self._on_device("rank", device, lambda: self.indices.reshape(-1))

    def _on_device(self, name: str, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        """Index arrays travel to the device once, not in every layer."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = torch.from_numpy(make()).to(device)
        return self._tensors[name, device]
