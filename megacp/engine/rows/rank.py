"""The place of a process on the data-parallel axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRank:
    """The index of this process on the data-parallel axis, and the axis size; 0 <= index < size."""

    index: int = 0
    size: int = 1
