"""Random packs with every feature of a mask: documents, branches, image spans, padding inside and
at the end.
"""

from __future__ import annotations

import numpy as np

from megacp.attention.ops.mask import CAUSAL, FULL, WINDOW, Metadata, TileTable
from megacp.engine.rows.batch import PackedBatch


def random_batch(
    rng: np.random.Generator,
    tokens: int,
    vocab_size: int = 101,
    *,
    documents: int = 4,
    branches: bool = False,
    images: bool = False,
    padding: bool = False,
    depth: int = 1,
    weights: str = "some",
    number: int = 0,
) -> PackedBatch:
    """Return a random pack of `tokens` tokens.

    Branches come after their prefix, and later documents after earlier ones. Without documents the
    pack has only padding. `depth` is the maximum nesting of branches. `weights` is `some` (about
    two thirds of the tokens, with unequal weights) or `all` (1 everywhere).
    """
    cuts = np.sort(
        rng.choice(np.arange(1, tokens), max(1, min(documents, tokens)) - 1, replace=False)
    )
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
            if (
                prefix < length and rng.random() < 0.7
            ):  # images inside branches, in the document's span or in a separate one
                low = int(rng.integers(prefix, length))
                span[start + low : start + int(rng.integers(low + 1, length + 1))] = next_span
            next_span += 1
        start += length
    if padding:
        holes = rng.random(len(lengths)) < 0.3
        document[holes[document] | (np.arange(tokens) >= tokens - int(rng.integers(0, 4)))] = -1
    if not documents:
        document[:] = -1
    meta = Metadata.of_documents(document, branch, span)
    if depth > 1:
        meta, position = _trees(rng, lengths, document >= 0, depth, images)
    loss = (
        (rng.random(tokens) < 0.7) * rng.integers(1, 4, tokens) / 2
        if weights == "some"
        else np.ones(tokens)
    )
    return PackedBatch(
        tokens=rng.integers(0, vocab_size, tokens),
        labels=rng.integers(0, vocab_size, tokens),
        loss_weights=np.where(document >= 0, loss, 0).astype(np.float32),
        position_ids=position,
        leave=meta.leave.astype(np.int32),
        span=np.where(document >= 0, meta.span, 0).astype(np.int32),
        pack_ids=(number,),
    )


def _trees(
    rng: np.random.Generator, lengths: np.ndarray, real: np.ndarray, depth: int, images: bool
) -> tuple[Metadata, np.ndarray]:
    """Return random trees of these lengths one after another, and the position of each token on its
    path.
    """
    leave, span, position = (np.zeros(len(real), np.int64) for _ in range(3))

    def grow(start: int, stop: int, above: int, left: int) -> None:
        own = stop if left == 0 or rng.random() < 0.25 else int(rng.integers(start + 1, stop + 1))
        leave[start:own], position[start:own] = stop, above + np.arange(own - start)
        for first in rng.integers(start, own, 2) if images else ():
            span[first : int(rng.integers(first, own)) + 1] = span.max() + 1
        place = own
        while place < stop:
            end = int(rng.integers(place + 1, stop + 1))
            grow(place, end, above + own - start, left - 1)
            place = end

    for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
        grow(end - length, end, 0, depth)
    return Metadata.of_row(np.where(real, leave, 0), np.where(real, span, 0)), position


def video_batch(frames: int, text: int, tokens_of_frame: int, after: int = 3) -> PackedBatch:
    """Return one document of frames that all attend to each other.

    There are `text` causal tokens before each frame, and `after` tokens behind the last frame.
    """
    one = [0] * text + [1] * tokens_of_frame
    span = np.array(one * frames + [0] * after, np.int32)
    leave, numbers, ones = (
        np.full(len(span), len(span), np.int32),
        np.arange(len(span)),
        np.ones(len(span), np.float32),
    )
    return PackedBatch(numbers, 0 * numbers, ones, numbers, leave, span, pack_ids=(0,))


def metadata(batch: PackedBatch) -> Metadata:
    """Return the mask's metadata of a batch."""
    return Metadata.of_row(batch.leave, batch.span)


def dense_mask(table: TileTable) -> np.ndarray:
    """Return the mask of a small table as bool `[queries, keys]`."""
    dense = np.zeros((table.queries, table.keys), dtype=bool)
    for row in table.rows:
        for tile in row.tiles:
            block = dense[row.q_start : row.q_stop, tile.k_start : tile.k_stop]
            causal = np.tri(*block.shape).astype(bool)
            block |= {FULL: True, CAUSAL: causal, WINDOW: causal.T}[tile.kind]
    return dense


def branched(batch: PackedBatch) -> bool:
    """Whether some document has branches."""
    end = np.maximum.accumulate(batch.leave)
    return bool((batch.leave != end)[batch.leave > 0].any())
