"""The range of a number, written on its field: `lr: NotNegative[float] = 1e-3`.

The type checker and tyro see the plain type. `fields()` reads the range, and the checks report a
value outside of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeVar

T = TypeVar("T")

MAX_LAYERS = 4096
"""Layers of a model: pipelines are cut exactly, in a time that grows with the square of them."""

MAX_EXPERTS, MAX_EXPERTS_IN_ALL = 8192, 1 << 16
"""Experts of a layer, and of all layers: each has tensors with names of their own, a kilobyte
before any weight. The largest published models have 512 and 31 thousand.
"""


@dataclass(frozen=True)
class Range:
    """Allowed values of a number: low <= value <= high, an end left out where it is open."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is inside; NaN and infinity never are."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and value < math.inf

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = f"{'below' if self.high_open else 'at most'} {self.high:.10g}"
        return low if self.high == math.inf else f"{low} and {high}"


@dataclass(frozen=True)
class IsPath:
    """The mark of a field that holds a path or a URL, or several: `~` in it is the user's
    folder.
    """


PathOf = Annotated[T, IsPath()]
Positive = Annotated[T, Range(1)]
Count = Annotated[T, Range(1, 1_000_000)]
"""Ranks, or packs of a step: each has objects of its own, and more would fill the memory before a
message.
"""
NotNegative = Annotated[T, Range(0)]
AboveZero = Annotated[T, Range(0, low_open=True)]
Fraction = Annotated[T, Range(0, 1, high_open=True)]
