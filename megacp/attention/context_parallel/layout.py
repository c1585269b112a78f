"""Layouts: which tokens of a row each cp rank holds, as a table of pure functions of the mask.

A layout is a permutation of the padded row dealt in equal parts. Any permutation is exact, because
position ids, labels and mask metadata move by the same indices. Padding that a layout needs stands
at the end of the row and is dealt wherever the layout needs filler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megacp.attention.context_parallel.balance import ALIKE, Mix, deal_balanced
from megacp.attention.ops.mask import Metadata


@dataclass(frozen=True)
class Layout:
    """A permutation of the padded row; a rank holds `slices` equal slices of it."""

    name: str
    slices: int
    _deal: Callable[[Metadata, int, Mix], np.ndarray]
    padded: Callable[[Metadata, int], int] = lambda metadata, cp: len(metadata)
    """Least tokens of the padded row, before rounding up to `multiple`."""
    fills_documents: bool = False
    """Whether each document is filled up by itself, to a multiple of `slices * cp` tokens."""

    def deal(self, metadata: Metadata, cp: int, mix: Mix = ALIKE) -> np.ndarray:
        """The tokens `[cp, t]` of each rank; `mix` says how far the layers look."""
        return self._deal(metadata, cp, mix)

    def multiple(self, cp: int, tp: int) -> int:
        """Padded rows have a multiple of this; `tp` > 1 only with sequence parallelism."""
        return math.lcm(self.slices * cp, cp * tp)

    def padded_length(self, metadata: Metadata, cp: int, tp: int) -> int:
        """Tokens of the row `metadata[T]` after padding, at least T."""
        multiple = self.multiple(cp, tp)
        return -(-self.padded(metadata, cp) // multiple) * multiple


def zigzag_slices(cp: int, rank: int) -> tuple[int, int]:
    """The two of 2 cp slices that a rank holds: equal causal area for one long document.

    On four ranks 0 7, 1 6, 2 5 and 3 4: a slice from the front, which sees little, with its mirror
    from the back.
    """
    return rank, 2 * cp - 1 - rank


def _zigzag(metadata: Metadata, cp: int, mix: Mix) -> np.ndarray:
    slices = np.arange(len(metadata)).reshape(2 * cp, -1)  # [2 cp, T / (2 cp)]
    return np.stack([slices[list(zigzag_slices(cp, rank))].reshape(-1) for rank in range(cp)])


def document_bounds(metadata: Metadata) -> tuple[np.ndarray, np.ndarray]:
    """Stretches `[start, stop)` of the row with one document each, padding left out; a document is
    one stretch.
    """
    start = np.flatnonzero(
        np.diff(metadata.document, prepend=metadata.document[:1] - 1)
    )  # 0 is always one
    stop = np.append(start[1:], len(metadata))
    real = metadata.document[start] >= 0
    return start[real], stop[real]


def _zigzag_document_length(metadata: Metadata, cp: int) -> int:
    """Every document filled up to a multiple of 2 cp; padding that the row has already serves as
    filler.
    """
    start, stop = document_bounds(metadata)
    filled = int((-(-(stop - start) // (2 * cp)) * 2 * cp).sum())
    return max(len(metadata), filled)


def _zigzag_document(metadata: Metadata, cp: int, mix: Mix) -> np.ndarray:
    """Zigzag within each document, which is filled up at its end; slice after slice, document after
    document.

    This is the order of Transformer Engine's packed (thd) context parallelism.
    """
    start, stop = document_bounds(metadata)
    fillers = np.flatnonzero(metadata.leave == 0)
    parts: list[list[np.ndarray]] = [[] for _ in range(cp)]
    used = 0
    for first, last in zip(start.tolist(), stop.tolist(), strict=True):
        missing = -(last - first) % (2 * cp)  # to equal slices
        tokens = np.concatenate([np.arange(first, last), fillers[used : used + missing]])
        used += missing
        slices = tokens.reshape(2 * cp, -1)  # [2 cp, tokens of a slice]
        for rank in range(cp):
            parts[rank].append(slices[list(zigzag_slices(cp, rank))].reshape(-1))
    rest = fillers[used:].reshape(cp, -1)  # [cp, padding left on each rank]
    return np.stack([np.concatenate([*parts[rank], rest[rank]]) for rank in range(cp)])


CONTIGUOUS = Layout(
    "contiguous", 1, lambda metadata, cp, mix: np.arange(len(metadata)).reshape(cp, -1)
)
"""One range of the row for each rank. A single rank holds the row with it, because there is nothing
to deal.
"""
ZIGZAG = Layout("zigzag", 2, _zigzag)
"""Slices that mirror each other: large tiles, and equal work for one long document."""
ZIGZAG_DOCUMENT = Layout(
    "zigzag_document", 2, _zigzag_document, _zigzag_document_length, fills_documents=True
)
BALANCED = Layout("balanced", 1, deal_balanced)
"""Equal work for any mask."""
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, ZIGZAG, ZIGZAG_DOCUMENT, BALANCED)}
"""Layouts by name."""
