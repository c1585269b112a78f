"""From stored packs to one PackedBatch: padding inside segments, shifted labels, weights, positions, mask metadata.

Labels are shifted here, per document, before anything is cut over ranks: a token at the edge of a rank never needs its
neighbour's.

The last token of a document predicts nothing, and so does the last token of a branch. A prefix whose branches begin
differently predicts nothing at its end: each branch would be another answer. Where all branches begin alike, the end of
the prefix predicts that token, with its weight in the first branch. A loss weight belongs to the predicted token, so it
moves with the label to the place before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megacp.core.data.batch import PADDING, PackedBatch
from megacp.core.data.images import ImageLoading, with_images
from megacp.core.data.reader import Pack


class _TokenRuns(NamedTuple):
    """Runs of true tokens, each shifted and numbered by itself: whole documents, or a prefix and its branches."""

    length: np.ndarray  # int64 [r], as are all
    place: np.ndarray  # of the first token in the padded row
    position: np.ndarray  # id of the first token
    document: np.ndarray
    branch: np.ndarray


def collate(
    packs: Sequence[Pack],
    attention_mask: str = "packed",
    image_attention: str = "example",
    loading: ImageLoading | None = None,
) -> PackedBatch:
    """One microbatch from its packs (at least one), concatenated; T is the sum of their padded lengths.

    attention_mask "packed": each segment is a document, numbered over all packs; labels and positions stay inside it.
    "causal": each pack is one document; labels and positions run on over its segments, and over padding inside it as
    if that were not there. Padding has document -1, weight 0, and positions 0, 1, ... in each gap.
    image_attention: see `images.spans`. loading: what this rank decodes of the images; None decodes nothing.
    ValueError: "causal" for a pack with branches (one answer would see the others); image-patch tokens that are not as
    many as image features; a bad image, where the policy of `loading` is `fail`.
    """
    segments = packs[0].segments if len(packs) == 1 else np.concatenate([pack.segments for pack in packs])
    true = segments["true_length"].astype(np.int64)
    padded = segments["padded_length"].astype(np.int64)
    begin = np.cumsum(padded) - padded  # first place of each segment in the padded row
    if attention_mask == "packed":
        runs = _document_runs(packs, segments, begin)
        last = (np.cumsum(runs.length) - 1)[~_agreeing(packs, runs)]  # of true tokens: those that predict nothing
    else:
        if branched := [pack.index for pack in packs if pack.branches is not None]:
            raise ValueError(f"packs {branched} have branches, which --attention-mask causal cannot keep apart")
        pack_of = np.repeat(np.arange(len(packs)), [len(pack.segments) for pack in packs])
        before = np.cumsum(true) - true
        first_of_pack = np.searchsorted(pack_of, np.arange(len(packs)))
        runs = _TokenRuns(true, begin, before - before[first_of_pack][pack_of], pack_of, np.zeros(len(true), np.int64))
        last = np.cumsum(np.bincount(pack_of, weights=true).astype(np.int64)) - 1
    # as if every token were padding: in each segment 0, 1, ... from its true length on
    positions = np.maximum(np.arange(int(padded.sum())) - np.repeat(np.cumsum(padded) - padded + true, padded), 0)
    return with_images(_filled(packs, runs, last, positions), packs, begin, image_attention, loading)


def _document_runs(packs: Sequence[Pack], segments: np.ndarray, begin: np.ndarray) -> _TokenRuns:
    """One run a segment, or, where it has branches, one for the prefix and one for each branch."""
    documents = np.arange(len(segments))
    zeros = np.zeros(len(segments), np.int64)
    tables = [pack.branches for pack in packs if pack.branches is not None]
    if not tables:
        return _TokenRuns(segments["true_length"].astype(np.int64), begin, zeros, documents, zeros)
    branches = np.concatenate(tables)
    count, prefix = segments["num_branches"], segments["prefix_length"].astype(np.int64)
    owner = np.repeat(documents, count)
    number = np.arange(len(owner)) - (np.cumsum(count) - count)[owner] + 1
    order = np.argsort(np.concatenate((documents, owner)), kind="stable")  # a prefix, then its branches in order
    return _TokenRuns(
        length=np.concatenate((prefix, branches["length"]))[order],
        place=np.concatenate((begin, begin[owner] + branches["start"]))[order],
        position=np.concatenate((zeros, prefix[owner]))[order],
        document=np.concatenate((documents, owner))[order],
        branch=np.concatenate((zeros, number))[order],
    )


def _agreeing(packs: Sequence[Pack], runs: _TokenRuns) -> np.ndarray:
    """bool [r]: whether a run is a prefix whose branches all begin with the same token."""
    begin = np.cumsum(runs.length) - runs.length
    in_branch = runs.branch > 0
    if not in_branch.any():
        return in_branch
    stored = np.concatenate([pack.tokens for pack in packs])[begin]
    differs = np.zeros(len(in_branch), np.int64)
    differs[1:] = (runs.branch[1:] > 1) & (stored[1:] != stored[:-1])
    owner = np.cumsum(~in_branch) - 1  # runs of a document stand together, its prefix first
    alike = np.bincount(owner, weights=differs)[owner] == 0
    return ~in_branch & np.append(in_branch[1:], False) & alike


def _filled(packs: Sequence[Pack], runs: _TokenRuns, last: np.ndarray, position_ids: np.ndarray) -> PackedBatch:
    """Scatter the true tokens into the padded row. last: numbers of the true tokens that predict nothing."""
    stored = np.concatenate([pack.tokens for pack in packs]).astype(np.int64)
    weights = np.concatenate(
        [np.ones(len(pack.tokens), np.float32) if pack.weights is None else pack.weights for pack in packs]
    )
    # label and weight of the next true token; the last of all is cleared below
    labels, label_weights = np.roll(stored, -1), np.roll(weights, -1)
    labels[last], label_weights[last] = 0, 0
    run = np.repeat(np.arange(len(runs.length)), runs.length)  # of each true token
    offset = np.arange(len(stored)) - (np.cumsum(runs.length) - runs.length)[run]
    place = runs.place[run] + offset
    total = len(position_ids)
    position_ids[place] = runs.position[run] + offset

    def scattered(values: np.ndarray, dtype: type, empty: int = 0) -> np.ndarray:
        row: np.ndarray = np.full(total, empty, dtype)
        row[place] = values
        return row

    return PackedBatch(
        tokens=scattered(stored, np.int64),
        labels=scattered(labels, np.int64),
        loss_weights=scattered(label_weights, np.float32),
        position_ids=position_ids,
        document=scattered(runs.document[run], np.int32, PADDING),
        branch=scattered(runs.branch[run], np.int32),
        span=np.zeros(total, np.int32),
        pack_ids=tuple(pack.index for pack in packs),
        pack_lengths=tuple(int(pack.segments["padded_length"].sum()) for pack in packs),
    )
