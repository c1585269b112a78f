"""Layouts: pure functions of the mask that decide which tokens of a row each cp rank gets.

A layout permutes the padded row and deals it to the ranks in equal parts. Attention is exact for
any permutation, because position ids, labels and mask metadata are permuted by the same indices.
Padding is added at the end of the row; a layout then uses it wherever it needs filler tokens.
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
    """A permutation of the padded row; each rank gets `slices` equal slices of it."""

    name: str
    slices: int
    _deal: Callable[[Metadata, int, Mix], np.ndarray]
    padded: Callable[[Metadata, int], int] = lambda metadata, cp: len(metadata)
    """Minimum number of tokens in the padded row, before rounding up to `multiple`."""
    fills_documents: bool = False
    """Whether each document is padded separately, to a multiple of `slices * cp` tokens."""

    def deal(self, metadata: Metadata, cp: int, mix: Mix = ALIKE) -> np.ndarray:
        """Return the tokens of each rank, `[cp, t]`, as indices into the row.

        `mix` gives the number of layers for each reach.
        """
        return self._deal(metadata, cp, mix)

    def multiple(self, cp: int, tp: int) -> int:
        """Return the divisor of all padded row lengths.

        Pass `tp` > 1 only with sequence parallelism.
        """
        return math.lcm(self.slices * cp, cp * tp)

    def padded_length(self, metadata: Metadata, cp: int, tp: int) -> int:
        """Return the number of tokens in the row `metadata[T]` after padding, at least T."""
        multiple = self.multiple(cp, tp)
        least = self.padded(metadata, cp)
        return -(-least // multiple) * multiple


def zigzag_slices(cp: int, rank: int) -> tuple[int, int]:
    """Return a rank's two slices out of 2 cp.

    Each rank combines a slice from the front of the row, which attends to few keys, with the
    mirrored slice from the back. All ranks then have equal causal areas for one long document. Four
    ranks get the slices 0 7, 1 6, 2 5 and 3 4.
    """
    return rank, 2 * cp - 1 - rank


def _zigzag(metadata: Metadata, cp: int, mix: Mix) -> np.ndarray:
    """Deal the slices of the whole row in zigzag order."""
    slices = np.arange(len(metadata)).reshape(2 * cp, -1)  # [2 cp, T / (2 cp)]
    ranks = [slices[list(zigzag_slices(cp, rank))].reshape(-1) for rank in range(cp)]
    return np.stack(ranks)


def document_bounds(metadata: Metadata) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds `[start, stop)` of each document in the row.

    Padding is excluded, and every document is contiguous.
    """
    # a stretch begins where the document number changes; the prepended value makes 0 a beginning
    document = metadata.document
    start = np.flatnonzero(np.diff(document, prepend=document[:1] - 1))
    stop = np.append(start[1:], len(metadata))
    real = document[start] >= 0
    return start[real], stop[real]


def _zigzag_document_length(metadata: Metadata, cp: int) -> int:
    """Return the row length after padding every document to a multiple of 2 cp tokens.

    Padding that the row already contains counts as filler.
    """
    start, stop = document_bounds(metadata)
    slice_length = -(-(stop - start) // (2 * cp))  # [documents], rounded up
    filled = int(slice_length.sum()) * 2 * cp
    return max(len(metadata), filled)


def _zigzag_document(metadata: Metadata, cp: int, mix: Mix) -> np.ndarray:
    """Deal each document in zigzag order, padded at its end.

    Each rank gets its slices document by document. This is the order of Transformer Engine's
    packed (thd) context parallelism.
    """
    start, stop = document_bounds(metadata)
    # the row's padding, from which each document takes its filler tokens
    fillers = np.flatnonzero(metadata.leave == 0)
    parts: list[list[np.ndarray]] = [[] for _ in range(cp)]
    used = 0
    for first, last in zip(start.tolist(), stop.tolist(), strict=True):
        missing = -(last - first) % (2 * cp)  # filler tokens until all slices are equal
        tokens = np.concatenate([np.arange(first, last), fillers[used : used + missing]])
        used += missing
        slices = tokens.reshape(2 * cp, -1)  # [2 cp, tokens of a slice]
        for rank in range(cp):
            parts[rank].append(slices[list(zigzag_slices(cp, rank))].reshape(-1))
    rest = fillers[used:].reshape(cp, -1)  # [cp, remaining padding of each rank]
    return np.stack([np.concatenate([*parts[rank], rest[rank]]) for rank in range(cp)])


CONTIGUOUS = Layout(
    "contiguous", 1, lambda metadata, cp, mix: np.arange(len(metadata)).reshape(cp, -1)
)
"""One contiguous range of the row per rank. A single rank always uses this layout, because there is
nothing to distribute.
"""
ZIGZAG = Layout("zigzag", 2, _zigzag)
"""Pairs of mirrored slices: large tiles, and equal work for one long document."""
ZIGZAG_DOCUMENT = Layout(
    "zigzag_document", 2, _zigzag_document, _zigzag_document_length, fills_documents=True
)
"""Zigzag within each document."""
BALANCED = Layout("balanced", 1, deal_balanced)
"""Equal work for any mask."""
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, ZIGZAG, ZIGZAG_DOCUMENT, BALANCED)}
"""Layouts by name."""
