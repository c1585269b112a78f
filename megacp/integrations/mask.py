"""Mask and plan of a batch, whose rows are treated as one long row of separate documents.

Layouts, transports and kernels therefore handle a single row, with the messages of a single row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from megacp.attention.context_parallel.layout import Layout
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Metadata
from megacp.engine.rows.batch import PADDING

# Documents from the caller: int `[B, S]` or `[S]`, `Metadata` of `S` or `B * S` tokens, or None.
DocumentIds = torch.Tensor | Metadata | None


@dataclass(frozen=True)
class BatchMask:
    """`leave` and `span` (see `Metadata`) for the rows of a batch: int64 arrays `[rows, S]`.

    A single row may represent any number of equal rows.
    """

    leave: np.ndarray
    span: np.ndarray
    whole_rule: bool = False
    """Whether the caller gave the whole mask as `Metadata`. Position ids then need not follow the
    documents.
    """

    @property
    def length(self) -> int:
        """Row length S, including padding."""
        return self.leave.shape[1]

    @functools.cached_property
    def _rows(self) -> list[Metadata]:
        return [Metadata.of_row(*row) for row in zip(self.leave, self.span, strict=True)]

    @functools.cached_property
    def document(self) -> np.ndarray:
        """Document number of each token, -1 at padding: int64 `[rows, S]`."""
        return np.stack([row.document for row in self._rows])

    def padded(self, layout: Layout, ranks: int) -> BatchMask:
        """Return the mask with rows padded to the smallest length that `layout` can distribute."""
        more = max(layout.padded_length(row, ranks, 1) for row in self._rows) - self.length
        leave, span = (np.pad(x, ((0, 0), (0, more))) for x in (self.leave, self.span))
        return BatchMask(leave, span, self.whole_rule)

    def deal(self, layout: Layout, ranks: int) -> np.ndarray:
        """Return the row indices of each rank's tokens: int64 `[rows, ranks, s]`, `s = S / ranks`.

        The result has a single row if all rows are distributed in the same way.
        """
        places = np.stack([layout.deal(row, ranks) for row in self._rows])
        if (places == places[:1]).all():
            return places[:1]
        return places

    def plan(
        self, places: np.ndarray, batch: int, cp_rank: int, causal: bool, spans: bool
    ) -> AttentionPlan:
        """Return the plan for `batch` concatenated rows.

        `places[1 or batch, ranks, s]` comes from `deal`. `spans=False` ignores the spans. Without
        `causal`, each token attends to its whole document; a token of a branch attends to the
        document's prefix and to its branch.
        """
        shape = (batch, self.length)
        leave = np.broadcast_to(self.leave, shape)
        span = np.broadcast_to(self.span, shape)
        # Offset the document ends and the span numbers so that no two rows share them.
        number = np.arange(batch)[:, None]  # [batch, 1]
        leave = np.where(leave > 0, leave + number * self.length, 0)
        if causal:
            moved = span + number * (self.span.max() + 1)
            span = np.where((span != 0) & spans, moved, 0)
        else:
            # Tokens of a span attend to each other, so make every document and branch a span, with
            # its end as the number.
            span = leave
        flat = Metadata.of_row(leave.reshape(-1), span.reshape(-1))
        return AttentionPlan(in_batch(places, batch, self.length), flat, cp_rank)

    def of(self, values: np.ndarray, local: np.ndarray) -> np.ndarray:
        """Return the entries of `values[rows, S]` at row indices `local[1 or B, s]`: `[B, s]`."""
        batch = max(len(values), len(local))
        wide, index = (np.broadcast_to(x, (batch, x.shape[1])) for x in (values, local))
        return np.take_along_axis(wide, index, axis=1)  # [batch, s]

    def misplaced(self, axes: np.ndarray, local: np.ndarray, images: bool = False) -> str:
        """Return why the position ids of the tokens at `local[1 or B, s]` are wrong, or "".

        `axes` is int `[axes, 1 or B, s]`. Positions must count up from 0 in each document or in the
        whole row. With `images`, they may skip numbers but must not decrease within a document.
        """
        if self.whole_rule:
            return ""
        document = self.of(self.document, local)
        shape = np.broadcast_shapes(axes.shape[1:], document.shape)
        positions = np.broadcast_to(axes[0], shape)
        document = np.broadcast_to(document, shape)
        place = np.broadcast_to(local, shape)
        if images or not (axes == axes[:1]).all():
            falls = 0
            for position, owner, where in zip(positions, document, place, strict=True):
                # Sort by document, then by row index, and look for decreasing positions.
                order = np.lexsort((where, owner))
                same_document = (np.diff(owner[order]) == 0) & (owner[order][1:] >= 0)
                falls += int(((np.diff(position[order]) < 0) & same_document).sum())
            if falls == 0:
                return ""
            return f"position_ids decrease {falls} times within a document"
        real = document >= 0
        number = self.of(_numbers_in_document(self.document), local)
        for expected in (number, place):
            if (positions == np.broadcast_to(expected, shape))[real].all():
                return ""
        return "position_ids do not count up by one, neither in each document nor in the whole row"


def _numbers_in_document(documents: np.ndarray) -> np.ndarray:
    """Return each token's index in its document, for document numbers `documents[rows, S]`."""
    numbers = np.zeros_like(documents)
    for row, counts in zip(documents, numbers, strict=True):
        order = np.argsort(row, kind="stable")  # [S], sorted by document
        # [documents], the first token of each
        first = np.flatnonzero(np.diff(row[order], prepend=row[order[:1]] - 1))
        lengths = np.diff(np.append(first, len(row)))
        counts[order] = np.arange(len(row)) - np.repeat(first, lengths)
    return numbers


def in_batch(places: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Convert indices within rows to indices into the concatenated batch, `[ranks, batch * s]`.

    `places`, `[1 or batch, ranks, s]`, has the indices within rows.
    """
    start = np.arange(batch)[:, None, None] * length
    moved = np.broadcast_to(places, (batch, *places.shape[1:])) + start
    # [batch, ranks, s] -> [ranks, batch * s]
    return moved.transpose(1, 0, 2).reshape(places.shape[1], -1)


def batch_mask(document_ids: DocumentIds, length: int) -> BatchMask:
    """Return the mask for rows of `length` tokens; None means one document per row.

    Raise ValueError for a wrong dtype or shape, and for `Metadata` with reordered tokens.
    """
    if document_ids is None:
        return BatchMask(np.full((1, length), length), np.zeros((1, length), np.int64))
    right = (
        "document_ids must be ints [S] or [B, S], or a Metadata of S or B * S tokens in order, "
        f"where S = {length} is the length of the buffers"
    )
    if isinstance(document_ids, Metadata):
        tokens = len(document_ids)
        in_order = np.array_equal(document_ids.order, np.arange(tokens))
        if tokens == 0 or tokens % length or not in_order:
            raise ValueError(f"context_parallel: {right}")
        row_starts = np.arange(tokens) // length * length
        # Document ends are relative to the row, and no document continues in the next row.
        leave = np.clip(document_ids.leave - row_starts, 0, length).reshape(-1, length)
        span = document_ids.span.reshape(-1, length)
        return BatchMask(leave, span, whole_rule=True)
    if (
        document_ids.is_floating_point()
        or document_ids.dim() not in (1, 2)
        or document_ids.shape[-1] != length
    ):
        raise ValueError(f"context_parallel: {right}")
    documents = document_ids.detach().cpu().numpy().reshape(-1, length)
    leave = np.stack([Metadata.of_documents(np.maximum(row, PADDING)).leave for row in documents])
    return BatchMask(leave, np.zeros_like(leave))


def documents_of(
    position_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the document numbers of packed or padded rows, -1 at padding: int64 `[B, S]`.

    `position_ids[B, S]`: a document begins where a position does not equal the previous one plus
    one; without `position_ids`, each row is one document. `attention_mask[B, S]`: 1 (or True) at
    tokens, 0 at padding. A single row of either applies to all rows. Raise ValueError for other
    shapes and values.
    """
    given = [x for x in (position_ids, attention_mask) if x is not None]
    same_length = all(x.dim() == 2 and x.shape[1] == given[0].shape[1] for x in given)
    rows = {len(x) for x in given if x.dim() == 2} - {1}
    if not given or len(rows) > 1 or not same_length:
        shapes = ", ".join(str(tuple(x.shape)) for x in given) or "neither"
        raise ValueError(
            f"documents_of expects position_ids or attention_mask [B, S], or both, got {shapes}"
        )
    numbers = torch.zeros(given[0].shape, dtype=torch.int64, device=given[0].device)
    if position_ids is not None:
        numbers[:, 1:] = (position_ids.diff(dim=1) != 1).cumsum(1)
    if attention_mask is None:
        return numbers
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "documents_of expects an attention_mask with 1 at tokens and 0 at padding, got other "
            "numbers"
        )
    return numbers.masked_fill(attention_mask == 0, PADDING)  # [1 or B, S] of either


def trees_of(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Metadata:
    """Return the mask of rows with prefix trees in depth-first order: `Metadata` of `B * S` tokens.

    `position_ids[B, S]`: a token continues the nearest earlier token whose position is one lower,
    and attends to the path from the root to that token. A branch therefore begins where positions
    decrease. `attention_mask` has the same meaning as in `documents_of`. Raise ValueError as
    `documents_of` does, and if the positions of a row do not begin at 0 or if they skip a number.
    """
    real = documents_of(position_ids, attention_mask).cpu().numpy() >= 0  # [B, S]
    whole = np.broadcast_to(position_ids.detach().cpu().numpy(), real.shape)
    positions = whole[real].astype(np.int64)  # [tokens]
    places = np.flatnonzero(real)
    first = np.diff(places // real.shape[1], prepend=-1) > 0  # of each row
    if positions[first].any() or (positions < 0).any() or (np.diff(positions) > 1).any():
        raise ValueError(
            "trees_of expects position_ids that begin at 0 in each row, and increase by one or "
            "decrease"
        )
    leave = np.where(real.reshape(-1), real.size, 0)
    # Runs of tokens whose positions count up by one: a root, or a branch.
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    stops = np.append(starts[1:], len(places))
    path = np.zeros(positions.max(initial=0) + 1, np.int64)  # token indices on the current path
    height = 0
    for start, stop in zip(starts, stops, strict=True):
        low = positions[start]
        high = positions[stop - 1] + 1
        leave[path[low:height]] = places[start]  # tokens that leave the path are hidden from now on
        path[low:high] = places[start:stop]
        height = high
    return Metadata.of_row(leave, np.zeros_like(leave))
