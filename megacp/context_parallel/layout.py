"""Layouts: which tokens of a padded row each cp rank holds, as a table of pure functions.

Key property: a layout is a permutation of the row dealt in equal parts; any permutation is exact, because position ids,
labels and mask metadata move by the same indices. Rejected: layouts implied by rank arithmetic inside attention, which
only work for the one mask they were derived for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """`deal(tokens, cp) -> [cp, tokens / cp]` indices; `chunks` is the number of equal pieces a rank holds."""

    name: str
    chunks: int
    deal: Callable[[int, int], np.ndarray]

    def multiple(self, cp: int, tp: int) -> int:
        """Row lengths must be a multiple of this; `tp` > 1 only with sequence parallelism."""
        return math.lcm(self.chunks * cp, cp * tp)


def _contiguous(tokens: int, cp: int) -> np.ndarray:
    return np.arange(tokens).reshape(cp, -1)


def _zigzag(tokens: int, cp: int) -> np.ndarray:
    """Rank r holds chunks r and 2cp - 1 - r of 2cp: equal causal area for one long document."""
    chunks = np.arange(tokens).reshape(2 * cp, -1)
    return np.stack([np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]]) for rank in range(cp)])


LAYOUTS = {layout.name: layout for layout in (Layout("contiguous", 1, _contiguous), Layout("zigzag", 2, _zigzag))}


def select_layout(name: str) -> Layout:
    """The layout of a `--cp-layout` value; raises ValueError for an unknown one."""
    if name not in LAYOUTS:
        raise ValueError(f"--cp-layout {name} is unknown; choose {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
