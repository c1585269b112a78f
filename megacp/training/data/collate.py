"""Collation of stored packs to a PackedBatch: padding, shifted labels, weights, positions and mask.

Labels are shifted here, per document, before the row is divided among ranks. A rank's last token
therefore never needs a token from the next rank.

The last token of a document predicts no token, and neither does the last token of a branch. If a
prefix or branch is continued by branches that begin with different tokens, its last token predicts
none of them. If all of these branches begin with the same token, it predicts that token, with the
first branch's weight. A loss weight belongs to the predicted token, so it moves with the label to
the preceding token.

In shapes, `T` is the number of tokens in the padded row, `n` of true tokens, and `r` of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.training.data.images import ImageLoading, with_images
from megacp.training.data.reader import Pack


class _TokenRuns(NamedTuple):
    """Runs of true tokens, in order. Labels are shifted within each run.

    A run is a whole document, a prefix or a branch.
    """

    length: np.ndarray  # int64 [r], like the other fields
    start: np.ndarray  # index of the first token in the padded row
    leave: np.ndarray  # index after the last token that attends to the run


def collate(
    packs: Sequence[Pack],
    attention_mask: str = "packed",
    image_attention: str = "example",
    loading: ImageLoading | None = None,
) -> PackedBatch:
    """Return a microbatch of one or several concatenated packs.

    T is the sum of the packs' padded lengths. With attention_mask "packed", each segment is a
    document, and labels and positions do not cross its end. With "causal", each pack is a document,
    and labels and positions continue across its segments, skipping padding. Padding has leave 0,
    weight 0, and positions 0, 1, ... in each gap. See `images.spans` for `image_attention`.
    `loading` selects the images to decode on this rank; None decodes none.

    Raise ValueError for "causal" with branches (they would attend to each other), if the numbers of
    image-patch tokens and image features differ, and for a bad image if the policy is `fail`.
    """
    if len(packs) == 1:
        segments = packs[0].segments
    else:
        segments = np.concatenate([pack.segments for pack in packs])
    true = segments["true_length"].astype(np.int64)
    padded = segments["padded_length"].astype(np.int64)
    begin = np.cumsum(padded) - padded  # index of each segment's first token in the padded row
    if attention_mask == "packed":
        runs = _document_runs(packs, segments, begin)
        ends = np.cumsum(runs.length) - 1  # index of each run's last true token
        last = ends[~_agreeing(packs, runs)]  # these predict no token
    else:
        branched = [pack.index for pack in packs if pack.branches is not None]
        if branched:
            raise ValueError(
                f"packs {branched} have branches, which --attention-mask causal cannot separate: "
                "use --attention-mask packed"
            )
        # one run per segment, but labels and attention end only with the pack
        pack_of = np.repeat(np.arange(len(packs)), [len(pack.segments) for pack in packs])
        padded_of_packs = np.bincount(pack_of, weights=padded).astype(np.int64)
        true_of_packs = np.bincount(pack_of, weights=true).astype(np.int64)
        end = np.cumsum(padded_of_packs)  # of each pack in the padded row
        runs = _TokenRuns(true, begin, end[pack_of])
        last = np.cumsum(true_of_packs) - 1
    # [T]: positions of padding, which count 0, 1, ... after each segment's true tokens. `_filled`
    # overwrites the positions of true tokens.
    positions = np.maximum(np.arange(int(padded.sum())) - np.repeat(begin + true, padded), 0)
    batch = _filled(packs, runs, last, positions)
    return with_images(batch, packs, begin, image_attention, loading)


def _document_runs(packs: Sequence[Pack], segments: np.ndarray, begin: np.ndarray) -> _TokenRuns:
    """Return the runs: one per segment or, with branches, one for its prefix and one per branch."""
    whole = begin + segments["true_length"]
    tables = [pack.branches for pack in packs if pack.branches is not None]
    if not tables:
        return _TokenRuns(segments["true_length"].astype(np.int64), begin, whole)
    branches = np.concatenate(tables)
    documents = np.arange(len(segments))
    owner = np.repeat(documents, segments["num_branches"])  # the document of each branch
    # sort each prefix before its document's branches, which are already in order
    order = np.argsort(np.concatenate((documents, owner)), kind="stable")
    length = np.concatenate((segments["prefix_length"], branches["length"])).astype(np.int64)
    start = np.concatenate((begin, begin[owner] + branches["start"]))
    leave = np.concatenate((whole, begin[owner] + branches["leave"]))
    return _TokenRuns(length[order], start[order], leave[order])


def _agreeing(packs: Sequence[Pack], runs: _TokenRuns) -> np.ndarray:
    """Return whether all branches of each run begin with the same token, bool [r]."""
    parent = parents(runs.start, runs.leave)
    child = np.flatnonzero(parent >= 0)  # runs that continue another run
    agreeing = np.zeros(len(parent), bool)
    if len(child):
        tokens = np.concatenate([pack.tokens for pack in packs])
        begins = tokens[np.cumsum(runs.length) - runs.length]  # [r]: first token of each run
        continued = parent[child]
        agreeing[continued] = True
        # A run's first branch is the next run, so compare all branches with that.
        differing = begins[child] != begins[continued + 1]
        agreeing[continued[differing]] = False
    return agreeing


def parents(start: np.ndarray, leave: np.ndarray) -> np.ndarray:
    """Return the parent of each node, int64 [n]; -1 for a root.

    Nodes of all trees are in token order. `start` and `leave` [n] are the indices of each node's
    first token and of the end of its subtree.
    """
    found = np.full(len(start), -1)
    if (leave[:-1] <= start[1:]).all():  # no branches
        return found
    above = list[int]()  # path from the root to the latest node
    ends = leave.tolist()
    for node, first in enumerate(start.tolist()):
        while above and ends[above[-1]] <= first:
            above.pop()
        if above:
            found[node] = above[-1]
        above.append(node)
    return found


def _filled(
    packs: Sequence[Pack], runs: _TokenRuns, last: np.ndarray, position_ids: np.ndarray
) -> PackedBatch:
    """Return the padded row with the packs' true tokens.

    `last` contains the indices of true tokens without a label. `position_ids` contains the
    positions of padding; this function fills in the positions of true tokens.
    """
    stored = np.concatenate([pack.tokens for pack in packs]).astype(np.int64)  # [n]
    of_packs = []
    for pack in packs:
        all_ones = np.ones(len(pack.tokens), np.float32)
        of_packs.append(all_ones if pack.weights is None else pack.weights)
    weights = np.concatenate(of_packs)  # [n]
    # Label and weight come from the next true token. Clear those of tokens in `last`, including the
    # very last token, to which `roll` has assigned the first one.
    labels = np.roll(stored, -1)
    labels[last] = 0
    label_weights = np.roll(weights, -1)
    label_weights[last] = 0
    number = np.arange(len(stored))  # [n]: index of each true token
    run = np.repeat(np.arange(len(runs.length)), runs.length)  # [n]: run of each token
    within = number - (np.cumsum(runs.length) - runs.length)[run]
    index = runs.start[run] + within  # [n]: index in the padded row
    total = len(position_ids)  # T
    leave = runs.leave[run]
    # A token's position is the number of earlier tokens on its path: all earlier tokens, except
    # those in branches that have already ended.
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
