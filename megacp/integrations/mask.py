"""One mask for a batch of rows laid end to end, and one plan: document numbers keep rows apart.

So a batch is one longer row to every layout, transport and kernel, with the messages of one.
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

DocumentIds = torch.Tensor | Metadata | None
"""A caller's documents: int tensor `[B, S]` or `[S]`, `Metadata` of `S` or `B * S` tokens, or None.
"""


@dataclass(frozen=True)
class BatchMask:
    """Leave and span of batch rows of S tokens, as `Metadata` has them: int64 arrays `[rows, S]`.

    One row stands for any number of equal ones.
    """

    leave: np.ndarray
    span: np.ndarray
    whole_rule: bool = False
    """Given as `Metadata`, which is the whole mask: position ids need not follow the documents."""

    @property
    def length(self) -> int:
        """S, padding included."""
        return self.leave.shape[1]

    @functools.cached_property
    def _rows(self) -> list[Metadata]:
        return [Metadata.of_row(*row) for row in zip(self.leave, self.span, strict=True)]

    @functools.cached_property
    def document(self) -> np.ndarray:
        """int64 `[rows, S]`: numbers of the documents of each row, -1 at padding."""
        return np.stack([row.document for row in self._rows])

    def padded(self, layout: Layout, ranks: int) -> BatchMask:
        """These rows with padding at their ends, up to the least length that `layout` can deal."""
        more = max(layout.padded_length(row, ranks, 1) for row in self._rows) - self.length
        leave, span = (np.pad(x, ((0, 0), (0, more))) for x in (self.leave, self.span))
        return BatchMask(leave, span, self.whole_rule)

    def deal(self, layout: Layout, ranks: int) -> np.ndarray:
        """Places int64 `[rows, ranks, s]`, `s = S / ranks`; one row where all rows are dealt
        alike.
        """
        places = np.stack([layout.deal(row, ranks) for row in self._rows])
        return places[:1] if (places == places[:1]).all() else places

    def plan(
        self, places: np.ndarray, batch: int, cp_rank: int, causal: bool, spans: bool
    ) -> AttentionPlan:
        """The plan of `batch` rows laid end to end, dealt by `places[1 or batch, ranks, s]`,
        without `spans` if False.

        Not causal: the rule without its clause on the order. Each token then sees its whole
        document; a branch sees its document's prefix and itself. Given spans make no difference.
        """
        leave, span = (np.broadcast_to(x, (batch, self.length)) for x in (self.leave, self.span))
        number = np.arange(batch)[:, None]  # [batch, 1], of the rows
        leave = np.where(leave > 0, leave + number * self.length, 0)
        # a span is what sees itself both ways; not causal, every document and branch is one, which
        # its end names
        span = (
            np.where((span != 0) & spans, span + number * (self.span.max() + 1), 0)
            if causal
            else leave
        )
        flat = Metadata.of_row(leave.reshape(-1), span.reshape(-1))
        return AttentionPlan(in_batch(places, batch, self.length), flat, cp_rank)

    def of(self, values: np.ndarray, local: np.ndarray) -> np.ndarray:
        """The entries of `values[rows, S]` at the places `local[1 or B, s]`."""
        batch = max(len(values), len(local))
        wide, index = (np.broadcast_to(x, (batch, x.shape[1])) for x in (values, local))
        return np.take_along_axis(wide, index, axis=1)  # [batch, s]

    def misplaced(self, axes: np.ndarray, local: np.ndarray, images: bool = False) -> str:
        """Why int position ids `[axes, 1 or B, s]` of the tokens at `local[1 or B, s]` cannot be
        right, or nothing.

        They count from 0 through each document or through the row. Those of a row with `images`,
        which may stand on another rank, leave places out; they never go back within a document.
        """
        if self.whole_rule:
            return ""
        document = self.of(self.document, local)
        shape = np.broadcast_shapes(axes.shape[1:], document.shape)
        positions, document, place = (np.broadcast_to(x, shape) for x in (axes[0], document, local))
        if images or not (axes == axes[:1]).all():
            falls = 0
            for position, owner, where in zip(positions, document, place, strict=True):
                order = np.lexsort(
                    (where, owner)
                )  # a row's documents side by side, each by ascending place
                alike = (np.diff(owner[order]) == 0) & (owner[order][1:] >= 0)
                falls += int(((np.diff(position[order]) < 0) & alike).sum())
            return f"position_ids go back {falls} times within a document" if falls else ""
        numbers = np.zeros_like(
            self.document
        )  # [rows, S]: how many earlier tokens of its document each token has
        for row, counts in zip(self.document, numbers, strict=True):
            order = np.argsort(row, kind="stable")  # [S], documents side by side
            first = np.flatnonzero(
                np.diff(row[order], prepend=row[order[:1]] - 1)
            )  # [documents], where each begins
            counts[order] = np.arange(len(row)) - np.repeat(
                first, np.diff(np.append(first, len(row)))
            )
        real, number = document >= 0, self.of(numbers, local)
        right = any(
            (positions == np.broadcast_to(count, shape))[real].all() for count in (number, place)
        )
        return (
            ""
            if right
            else "position_ids do not count up by one through the tokens of each document, nor the row"
        )


def in_batch(places: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Places `[1 or batch, ranks, s]` in rows -> int64 `[ranks, batch * s]` in the rows laid end to
    end.
    """
    start = np.arange(batch)[:, None, None] * length
    moved = np.broadcast_to(places, (batch, *places.shape[1:])) + start
    return moved.transpose(1, 0, 2).reshape(
        places.shape[1], -1
    )  # [batch, ranks, s] -> [ranks, batch * s]


def batch_mask(document_ids: DocumentIds, length: int) -> BatchMask:
    """The rows of `length` tokens that `document_ids` describe; one causal document a row when
    there are none.

    ValueError for ids of another dtype or shape, and `Metadata` that is not in the order of its
    tokens.
    """
    if document_ids is None:
        return BatchMask(np.full((1, length), length), np.zeros((1, length), np.int64))
    right = (
        "document_ids are ints [S] or [B, S], or a Metadata of S or B * S tokens in order, S "
        f"= {length} of the buffers"
    )
    if isinstance(document_ids, Metadata):
        tokens, rows = len(document_ids), np.arange(len(document_ids)) // length * length
        if (
            tokens == 0
            or tokens % length
            or not np.array_equal(document_ids.order, np.arange(tokens))
        ):
            raise ValueError(f"context_parallel: {right}")
        leave = np.clip(document_ids.leave - rows, 0, length)  # no document lies in two rows
        return BatchMask(
            leave.reshape(-1, length), document_ids.span.reshape(-1, length), whole_rule=True
        )
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
    """Document numbers int64 `[B, S]` of whole packed or padded rows, -1 at padding.

    `position_ids[B, S]`: a document begins where a position is not its left neighbour's plus one.
    None: each row is one document. `attention_mask[B, S]`: 1 (or True) at tokens, 0 at padding; one
    row may stand for all. Raises ValueError for other shapes and values.
    """
    given = [x for x in (position_ids, attention_mask) if x is not None]
    rows = {len(x) for x in given if x.dim() == 2} - {1}  # one row of positions may stand for all
    if (
        not given
        or len(rows) > 1
        or any(x.dim() != 2 or x.shape[1] != given[0].shape[1] for x in given)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in given) or "neither"
        raise ValueError(
            f"documents_of wants position_ids and attention_mask [B, S], one or both, got {shapes}"
        )
    numbers = torch.zeros(given[0].shape, dtype=torch.int64, device=given[0].device)
    if position_ids is not None:
        numbers[:, 1:] = (position_ids.diff(dim=1) != 1).cumsum(1)
    if attention_mask is None:
        return numbers
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "documents_of wants an attention_mask of 1 at tokens and 0 at padding, got other numbers"
        )
    return numbers.masked_fill(attention_mask == 0, PADDING)  # [1 or B, S] of either


def trees_of(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Metadata:
    """The mask of whole rows of prefix trees, whose tokens stand in depth-first order; of `B * S`
    tokens.

    `position_ids[B, S]`: a token continues the last one before it that stands one position lower,
    and sees the path there. So a branch begins where positions go back. `attention_mask`: as in
    `documents_of`. Raises ValueError as it does, and for positions of a row that do not begin at 0
    or skip one.
    """
    real = documents_of(position_ids, attention_mask).cpu().numpy() >= 0  # [B, S]
    positions = np.broadcast_to(position_ids.detach().cpu().numpy(), real.shape)[real].astype(
        np.int64
    )  # [tokens]
    places = np.flatnonzero(real)
    first = np.diff(places // real.shape[1], prepend=-1) > 0  # of each row
    if positions[first].any() or (positions < 0).any() or (np.diff(positions) > 1).any():
        raise ValueError(
            "trees_of wants position_ids that begin at 0 in each row, and go up by one or back"
        )
    leave, starts = (
        np.where(real.reshape(-1), real.size, 0),
        np.flatnonzero(np.diff(positions, prepend=-2) != 1),
    )
    path, height = (
        np.zeros(positions.max(initial=0) + 1, np.int64),
        0,
    )  # places from a root to here, by position
    for start, stop in zip(starts, np.append(starts[1:], len(places)), strict=True):
        low, high = positions[start], positions[stop - 1] + 1
        leave[path[low:height]] = places[start]  # what the path loses ends here
        path[low:high], height = places[start:stop], high
    return Metadata.of_row(leave, np.zeros_like(leave))
