"""Rows of images, videos and text in the proportions of a vision-language model's training data, for benchmarks.

Key property: a row is a function of (tokens, seed). Videos and texts take at most a quarter of the row, since longer
ones are packed into longer rows. Sizes are those of Molmo2-like models (Deitke et al., 2024): 144 tokens a crop, 81 a
video frame with its time as text in front, several questions with answers over one image. Rejected: `MockRules`, whose
few documents of any size suit a test of exactness but no measurement of balance.

    of all documents   made of
    50 %  image        opening text, one image of 1 to 8 crops, 1 to 8 branches
    40 %  video        16 to 127 frames (fewer in short rows), text before each, frames see each other, 1 to 3 branches
    10 %  text         a lognormal number of tokens, median 665, causal
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megacp.core.data.batch import PackedBatch
from megacp.core.data.collate import collate
from megacp.core.data.reader import Pack
from megacp.core.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE

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
    """A row of `tokens` tokens, all with id 0; its last document is cut at the end. ValueError for less than one."""
    if tokens < 1:
        raise ValueError(f"a row has at least 1 token, got {tokens}")
    rng = np.random.default_rng(seed)
    columns: list[tuple[int, int, int, int]] = []  # tokens, document, branch, span of each piece
    total, number = 0, 0
    while total < tokens:
        for piece in _document(rng, tokens // 4):
            columns.append((piece.tokens, number, piece.branch, number + 1 if piece.is_image else 0))
            total += piece.tokens
        number += 1
    length, document, branch, span = np.array(columns).T  # [pieces] each
    length = np.diff(np.minimum(np.cumsum(length), tokens), prepend=0)
    true = np.bincount(document, length).astype(np.int64)  # [documents]
    start = np.cumsum(length) - length - (np.cumsum(true) - true)[document]  # of a piece within its document
    segments = np.zeros(len(true), SEGMENT_DTYPE)
    segments["true_length"] = segments["padded_length"] = true
    segments["prefix_length"] = np.bincount(document, length * (branch == 0))
    answers = (branch > 0) & (length > 0)
    segments["num_branches"] = np.bincount(document, answers)
    branches = np.zeros(np.count_nonzero(answers), BRANCH_DTYPE)
    branches["start"], branches["length"] = start[answers], length[answers]
    batch = collate([Pack(seed, np.zeros(tokens, np.int64), None, segments, branches if len(branches) else None)])
    return dataclasses.replace(batch, span=np.repeat(span, length).astype(np.int32))


def causal_row(tokens: int) -> PackedBatch:
    """One document of text that fills the row."""
    segments = np.zeros(1, SEGMENT_DTYPE)
    segments["true_length"] = segments["padded_length"] = segments["prefix_length"] = tokens
    return collate([Pack(0, np.zeros(tokens, np.int64), None, segments, None)])
