"""From stored packs to one PackedBatch: padding inside segments, shifted labels, weights,
positions, mask metadata.

Labels are shifted here, per document, before anything is cut over ranks: a token at the edge of a
rank never needs its neighbour's.

The last token of a document predicts nothing, and so does the last token of a branch. What has
branches that begin differently predicts nothing at its end: each would be another answer. Where all
begin alike, the end of what they continue predicts that token, with its weight in the first branch.
A loss weight belongs to the predicted token, so it moves with the label to the token before.

Letters: `T` tokens of the padded row, `n` true ones, `r` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.training.data.images import ImageLoading, with_images
from megacp.training.data.reader import Pack


class _TokenRuns(NamedTuple):
    """Runs of true tokens, each shifted by itself: whole documents, or prefixes and branches, in
    their order.
    """

    length: np.ndarray  # int64 [r], as are all
    start: np.ndarray  # index of the first token in the padded row
    leave: np.ndarray  # index where the part ends that sees the run


def collate(
    packs: Sequence[Pack],
    attention_mask: str = "packed",
    image_attention: str = "example",
    loading: ImageLoading | None = None,
) -> PackedBatch:
    """One microbatch from its packs (at least one), concatenated; T is the sum of their padded
    lengths.

    attention_mask "packed": each segment is a document, numbered over all packs; labels and
    positions stay inside it. "causal": each pack is one document; labels and positions run on over
    its segments, and over padding inside it as if that were not there. Padding has leave 0, weight
    0, and positions 0, 1, ... in each gap. image_attention: see `images.spans`. loading: what this
    rank decodes of the images; None decodes nothing. ValueError: "causal" for a pack with branches
    (one answer would see the others); image-patch tokens that are not as many as image features; a
    bad image, where the policy of `loading` is `fail`.
    """
    segments = (
        packs[0].segments if len(packs) == 1 else np.concatenate([pack.segments for pack in packs])
    )
    true = segments["true_length"].astype(np.int64)
    padded = segments["padded_length"].astype(np.int64)
    begin = np.cumsum(padded) - padded  # index of each segment's first token in the padded row
    if attention_mask == "packed":
        runs = _document_runs(packs, segments, begin)
        last = (np.cumsum(runs.length) - 1)[
            ~_agreeing(packs, runs)
        ]  # of true tokens: those that predict nothing
    else:
        if branched := [pack.index for pack in packs if pack.branches is not None]:
            raise ValueError(
                f"packs {branched} have branches, which --attention-mask causal cannot keep apart"
            )
        pack_of = np.repeat(np.arange(len(packs)), [len(pack.segments) for pack in packs])
        end = np.cumsum(
            np.bincount(pack_of, weights=padded).astype(np.int64)
        )  # of each pack in the padded row
        runs = _TokenRuns(true, begin, end[pack_of])
        last = np.cumsum(np.bincount(pack_of, weights=true).astype(np.int64)) - 1
    # [T], as if every token were padding: in each segment 0, 1, ... from its true length on
    positions = np.maximum(np.arange(int(padded.sum())) - np.repeat(begin + true, padded), 0)
    return with_images(
        _filled(packs, runs, last, positions), packs, begin, image_attention, loading
    )


def _document_runs(packs: Sequence[Pack], segments: np.ndarray, begin: np.ndarray) -> _TokenRuns:
    """One run a segment, or, where it has branches, one for the prefix and one for each branch."""
    whole = begin + segments["true_length"]
    tables = [pack.branches for pack in packs if pack.branches is not None]
    if not tables:
        return _TokenRuns(segments["true_length"].astype(np.int64), begin, whole)
    branches = np.concatenate(tables)
    documents = np.arange(len(segments))
    owner = np.repeat(documents, segments["num_branches"])  # the document of each branch
    order = np.argsort(
        np.concatenate((documents, owner)), kind="stable"
    )  # a prefix, then its branches in order
    return _TokenRuns(
        length=np.concatenate((segments["prefix_length"], branches["length"])).astype(np.int64)[
            order
        ],
        start=np.concatenate((begin, begin[owner] + branches["start"]))[order],
        leave=np.concatenate((whole, begin[owner] + branches["leave"]))[order],
    )


def _agreeing(packs: Sequence[Pack], runs: _TokenRuns) -> np.ndarray:
    """bool [r]: whether a run has branches that all begin with the same token."""
    parent = parents(runs.start, runs.leave)
    child = np.flatnonzero(parent >= 0)  # runs that continue another
    agreeing = np.zeros(len(parent), bool)
    if len(child):
        begins = np.concatenate([pack.tokens for pack in packs])[
            np.cumsum(runs.length) - runs.length
        ]  # [r]: first ids
        continued = parent[child]
        agreeing[continued] = True
        # the first branch of a run is the run right behind it
        agreeing[continued[begins[child] != begins[continued + 1]]] = False
    return agreeing


def parents(start: np.ndarray, leave: np.ndarray) -> np.ndarray:
    """int64 [n]: of nodes of trees in the order of their tokens the one that each continues; -1 for
    a root.

    start, leave [n]: index of a node's first token, and where its subtree ends.
    """
    found = np.full(len(start), -1)
    if (leave[:-1] <= start[1:]).all():  # no branches at all
        return found
    above = list[int]()  # nodes whose subtrees have not ended, from the root down
    ends = leave.tolist()
    for node, first in enumerate(start.tolist()):
        while above and ends[above[-1]] <= first:
            above.pop()
        found[node] = above[-1] if above else -1
        above.append(node)
    return found


def _filled(
    packs: Sequence[Pack], runs: _TokenRuns, last: np.ndarray, position_ids: np.ndarray
) -> PackedBatch:
    """Scatter the true tokens into the padded row. last: numbers of the true tokens that predict
    nothing.
    """
    stored = np.concatenate([pack.tokens for pack in packs]).astype(np.int64)  # [n]
    weights = np.concatenate(
        [
            np.ones(len(pack.tokens), np.float32) if pack.weights is None else pack.weights
            for pack in packs
        ]
    )
    # label and weight of the next true token; the last of all is cleared below
    labels = np.roll(stored, -1)
    labels[last] = 0
    label_weights = np.roll(weights, -1)
    label_weights[last] = 0
    number = np.arange(len(stored))  # of each true token
    run = np.repeat(np.arange(len(runs.length)), runs.length)  # [n]: the run of each
    within = number - (np.cumsum(runs.length) - runs.length)[run]
    index = runs.start[run] + within  # [n]: where each stands in the padded row
    total = len(position_ids)  # T
    leave = runs.leave[run]
    # a token's position counts those before it on its path: all before it, but those whose part has
    # ended by then
    ended = np.cumsum(np.bincount(leave, minlength=total + 1))  # [T + 1]
    position_ids[index] = number - ended[index]

    def scattered(values: np.ndarray, dtype: type) -> np.ndarray:
        row: np.ndarray = np.zeros(total, dtype)
        row[index] = values
        return row

    return PackedBatch(
        tokens=scattered(stored, np.int64),
        labels=scattered(labels, np.int64),
        loss_weights=scattered(label_weights, np.float32),
        position_ids=position_ids,
        leave=scattered(leave, np.int32),
        span=np.zeros(total, np.int32),
        pack_ids=tuple(pack.index for pack in packs),
        pack_lengths=tuple(int(pack.segments["padded_length"].sum()) for pack in packs),
    )
