"""The place of a process on the data-parallel axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRank:
    """Place of this process on the data-parallel axis: 0 <= index < size."""

    index: int = 0
    size: int = 1
