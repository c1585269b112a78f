"""Random packs with everything a mask can hold: documents, branches, image spans, padding inside and at the end."""

from __future__ import annotations

import numpy as np

from megacp.core.data.batch import PackedBatch
from megacp.core.ops.mask import CAUSAL, Metadata, TileTable


def random_batch(
    rng: np.random.Generator,
    tokens: int,
    vocab_size: int = 101,
    *,
    documents: int = 4,
    branches: bool = False,
    images: bool = False,
    padding: bool = False,
    weights: str = "some",
    number: int = 0,
) -> PackedBatch:
    """A pack of `tokens` tokens. Branches come after their prefix, later documents after earlier ones.

    `weights`: `some` (about two thirds are counted, with unequal weights) or `all` (1 everywhere).
    """
    cuts = np.sort(rng.choice(np.arange(1, tokens), min(documents, tokens) - 1, replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [tokens]]))
    document, branch, span, position = (np.zeros(tokens, np.int64) for _ in range(4))
    start, next_span = 0, 1
    for index, length in enumerate(lengths):
        row = slice(start, start + length)
        document[row], position[row] = index, np.arange(length)
        prefix = length
        if branches and length >= 4:
            prefix = int(rng.integers(1, length))
            number_of = int(rng.integers(1, min(4, length - prefix + 1)))
            ends = np.sort(rng.choice(np.arange(1, length - prefix + 1), number_of, replace=False))
            which = np.searchsorted(ends, np.arange(length - prefix), side="right") + 1
            branch[start + prefix : start + length] = which
            for value in np.unique(which):
                inside = np.flatnonzero(which == value)
                position[start + prefix + inside] = prefix + np.arange(len(inside))
        if images and prefix >= 3:
            shared = rng.random() < 0.5  # one span for the document, or one per image
            for _ in range(int(rng.integers(1, 4))):
                low = int(rng.integers(0, prefix - 1))
                span[start + low : start + int(rng.integers(low + 1, prefix + 1))] = next_span
                next_span += 0 if shared else 1
            if prefix < length and rng.random() < 0.7:  # images inside of branches, of the document's span or their own
                low = int(rng.integers(prefix, length))
                span[start + low : start + int(rng.integers(low + 1, length + 1))] = next_span
            next_span += 1
        start += length
    if padding:
        holes = rng.random(len(lengths)) < 0.3
        document[holes[document] | (np.arange(tokens) >= tokens - int(rng.integers(0, 4)))] = -1
    loss = (rng.random(tokens) < 0.7) * rng.integers(1, 4, tokens) / 2 if weights == "some" else np.ones(tokens)
    return PackedBatch(
        tokens=rng.integers(0, vocab_size, tokens),
        labels=rng.integers(0, vocab_size, tokens),
        loss_weights=np.where(document >= 0, loss, 0).astype(np.float32),
        position_ids=position,
        document=document.astype(np.int32),
        branch=np.where(document >= 0, branch, 0).astype(np.int32),
        span=np.where(document >= 0, span, 0).astype(np.int32),
        pack_ids=(number,),
    )


def video_batch(frames: int, text: int, tokens_of_frame: int, after: int = 3) -> PackedBatch:
    """One document: frames that all see each other, `text` causal tokens in front of each, `after` behind the last."""
    one = [0] * text + [1] * tokens_of_frame
    span = np.array(one * frames + [0] * after, np.int32)
    zeros, numbers, ones = np.zeros(len(span), np.int32), np.arange(len(span)), np.ones(len(span), np.float32)
    return PackedBatch(numbers, 0 * numbers, ones, numbers, zeros, zeros, span, pack_ids=(0,))


def metadata(batch: PackedBatch) -> Metadata:
    """What the mask knows of a batch."""
    return Metadata(batch.document, batch.branch, batch.span, np.arange(len(batch)))


def dense_mask(table: TileTable) -> np.ndarray:
    """The mask of a small table as bool `[queries, keys]`."""
    dense = np.zeros((table.queries, table.keys), dtype=bool)
    for row in table.rows:
        for tile in row.tiles:
            block = dense[row.q_start : row.q_stop, tile.k_start : tile.k_stop]
            block |= np.tri(*block.shape).astype(bool) if tile.kind == CAUSAL else True
    return dense
