"""Ranges of numeric flags, declared on config fields: `lr: NotNegative[float] = 1e-3`.

To the type checker and tyro, the annotation is the plain type. `fields()` reads the range, and
`checks.py` reports values outside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeVar

T = TypeVar("T")

MAX_LAYERS = 4096
"""Maximum number of layers in a model. The search for pipeline stages takes quadratic time."""

# Every expert has named tensors, each with about 1 kB of metadata before any weight is allocated.
# The largest published models have 512 experts per layer and 31 thousand experts in total.
MAX_EXPERTS = 8192
"""Maximum number of experts in one layer."""
MAX_EXPERTS_IN_ALL = 1 << 16
"""Maximum number of experts in all layers together."""


@dataclass(frozen=True)
class Range:
    """Allowed range of a number: low <= value <= high. An open end excludes its bound."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Return whether the value is in the range. NaN and infinity never are."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        # NaN fails every comparison; infinity would pass if the range has no upper end
        return above and below and value < math.inf

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = f"{'below' if self.high_open else 'at most'} {self.high:.10g}"
        return low if self.high == math.inf else f"{low} and {high}"


@dataclass(frozen=True)
class IsPath:
    """Mark for fields with paths or URLs, in which a leading `~` means the home directory."""


PathOf = Annotated[T, IsPath()]
Positive = Annotated[T, Range(1)]
Count = Annotated[T, Range(1, 1_000_000)]
"""A number of ranks, or of packs per step. Each rank and each pack needs Python objects, so without
the limit a mistyped number could exhaust the memory before the checks report it.
"""
NotNegative = Annotated[T, Range(0)]
AboveZero = Annotated[T, Range(0, low_open=True)]
Fraction = Annotated[T, Range(0, 1, high_open=True)]
