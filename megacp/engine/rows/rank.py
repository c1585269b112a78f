"""The position of a process on the data-parallel axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRank:
    """Index of a process on the data-parallel axis, and the size of the axis; index < size."""

    index: int = 0
    size: int = 1
