"""Rows of images, videos and text in the proportions of a vision-language model's training data, for benchmarks.

Key property: a row is a function of (tokens, seed) alone. Videos and texts take at most a quarter of the row, since
longer ones are packed into longer rows. Sizes are those of Molmo2-like models (Deitke et al., 2024):
144 tokens a crop, 81 a video frame with its time as text in front, several questions with answers over one image.
Rejected: `MockRules`, whose few documents of any size suit a test of exactness but no measurement of balance.

    of all documents   made of
    50 %  image        opening text, one image of 1 to 8 crops, 1 to 8 branches
    40 %  video        16 to 127 frames (fewer in short rows), text before each, frames see each other, 1 to 3 branches
    10 %  text         a lognormal number of tokens, median 665, causal
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megacp.batch import PackedBatch

CROP_TOKENS, FRAME_TOKENS = 144, 81
MOST_CROPS, MOST_BRANCHES, MOST_VIDEO_BRANCHES = 8, 8, 3
FRAMES = (16, 128)
"""Least number of frames, and one more than the most."""
BETWEEN_FRAMES, OPENING, ANSWER = (4, 10), (5, 20), (20, 201)
"""Least and one more than the most text tokens: before a frame, before an image, in a branch."""
TEXT_LOG_MEAN, TEXT_LOG_SPREAD, TEXT_LIMITS = 6.5, 1.0, (32, 16_000)


@dataclass(frozen=True)
class _Piece:
    """Neighbouring tokens of one document that the mask treats alike."""

    tokens: int
    branch: int = 0
    is_image: bool = False


def _branches(rng: np.random.Generator, most: int) -> list[_Piece]:
    return [_Piece(int(rng.integers(*ANSWER)), number) for number in range(1, int(rng.integers(1, most + 1)) + 1)]


def _document(rng: np.random.Generator, longest: int) -> list[_Piece]:
    """One document of at most about `longest` tokens, unless it is an image with many branches."""
    kind = rng.random()
    if kind < 0.5:
        opening = _Piece(int(rng.integers(*OPENING)))
        image = _Piece(int(rng.integers(1, MOST_CROPS + 1)) * CROP_TOKENS, is_image=True)
        return [opening, image, *_branches(rng, MOST_BRANCHES)]
    if kind < 0.9:
        pieces = []
        least, most = FRAMES
        fit = max(2, longest // (FRAME_TOKENS + BETWEEN_FRAMES[1]))
        for _ in range(int(rng.integers(min(least, fit - 1), min(most, fit)))):
            pieces += [_Piece(int(rng.integers(*BETWEEN_FRAMES))), _Piece(FRAME_TOKENS, is_image=True)]
        return pieces + _branches(rng, MOST_VIDEO_BRANCHES)
    shortest, most = TEXT_LIMITS
    drawn = rng.lognormal(TEXT_LOG_MEAN, TEXT_LOG_SPREAD)
    return [_Piece(int(np.clip(drawn, shortest, max(shortest, min(most, longest)))))]


def mixed_row(tokens: int, seed: int = 0) -> PackedBatch:
    """A full row of `tokens` tokens, the last document cut at its end; token ids and labels are 0.

    Branches, and documents of text alone, have loss weight 1. Raises ValueError for less than one token.
    """
    if tokens < 1:
        raise ValueError(f"a row has at least 1 token, got {tokens}")
    rng = np.random.default_rng(seed)
    columns: list[tuple[int, int, int, int]] = []  # tokens, document, branch, span of each piece
    total, document = 0, 0
    while total < tokens:
        for piece in _document(rng, tokens // 4):
            columns.append((piece.tokens, document, piece.branch, document + 1 if piece.is_image else 0))
            total += piece.tokens
        document += 1
    pieces = np.array(columns)
    of_token = np.repeat(np.arange(len(pieces)), pieces[:, 0])[:tokens]
    _, documents, branches, spans = pieces[of_token].T.astype(np.int32)
    answered = branches > 0
    has_images = np.bincount(documents, weights=spans) > 0
    return PackedBatch(
        tokens=np.zeros(tokens, np.int64),
        labels=np.zeros(tokens, np.int64),
        loss_weights=(answered | ~has_images[documents]).astype(np.float32),
        position_ids=_positions(documents, branches),
        document=documents,
        branch=branches,
        span=spans,
        pack_ids=(seed,),
    )


def _positions(document: np.ndarray, branch: np.ndarray) -> np.ndarray:
    """int64 `[T]`: places count from 0 in a document, and in each of its branches from the end of its prefix."""
    here = np.arange(len(document))
    opens = np.r_[True, document[1:] != document[:-1]]
    within = here - np.maximum.accumulate(np.where(opens, here, 0))
    prefix = np.bincount(document, weights=branch == 0).astype(np.int64)
    begins = np.r_[True, (document[1:] != document[:-1]) | (branch[1:] != branch[:-1])]
    in_branch = here - np.maximum.accumulate(np.where(begins, here, 0))
    return np.where(branch > 0, prefix[document] + in_branch, within)
