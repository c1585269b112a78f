"""Creates rows of images, videos and text in the proportions of a vision-language model's data.

Half of the documents are an image with branches, 40 % are a video, and the remaining ones are text.
A row is a function of (tokens, seed). Sizes follow Molmo2-like models (Deitke et al., 2024): 144
tokens per crop, and 81 tokens per video frame, preceded by its timestamp as text. A document has at
most a quarter of the row's tokens, because longer documents would be packed into longer rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.training.data.collate import collate
from megacp.training.data.reader import Pack
from megacp.training.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE

CROP_TOKENS, FRAME_TOKENS = 144, 81
Piece = tuple[int, int, bool]
"""Neighbouring tokens of a document that the mask treats alike: their number, their branch, and
whether they are an image.
"""


def _branches(rng: np.random.Generator, most: int) -> list[Piece]:
    return [
        (int(rng.integers(20, 201)), number, False)
        for number in range(1, int(rng.integers(1, most + 1)) + 1)
    ]


def _document(rng: np.random.Generator, longest: int) -> list[Piece]:
    """Draw a random document of at most about `longest` tokens.

    An image with many branches may be longer.
    """
    kind = rng.random()
    if kind < 0.5:
        opening, crops = int(rng.integers(5, 20)), int(rng.integers(1, 9))
        return [(opening, 0, False), (crops * CROP_TOKENS, 0, True), *_branches(rng, 8)]
    if kind < 0.9:
        fit = max(2, longest // (FRAME_TOKENS + 10))
        pieces: list[Piece] = []
        for _ in range(int(rng.integers(min(16, fit - 1), min(128, fit)))):
            pieces += [(int(rng.integers(4, 10)), 0, False), (FRAME_TOKENS, 0, True)]
        return pieces + _branches(rng, 3)
    return [(int(np.clip(rng.lognormal(6.5, 1.0), 32, max(32, min(16_000, longest)))), 0, False)]


def mixed_row(tokens: int, seed: int = 0) -> PackedBatch:
    """Return a row of `tokens` tokens, all with id 0, whose last document is truncated."""
    rng = np.random.default_rng(seed)
    columns: list[tuple[int, int, int, int]] = []  # tokens, document, branch, span of each piece
    number = 0
    while sum(column[0] for column in columns) < tokens:
        pieces = _document(rng, tokens // 4)
        # Number the spans per branch, because a span must not cross branches.
        columns += [
            (n, number, branch, image and (number << 8) + branch + 1) for n, branch, image in pieces
        ]
        number += 1
    length, document, branch, span = np.array(columns).T  # [pieces] each
    length = np.diff(np.minimum(np.cumsum(length), tokens), prepend=0)
    true = np.bincount(document, length).astype(np.int64)  # [documents]
    # Start of each piece within its document.
    start = np.cumsum(length) - length - (np.cumsum(true) - true)[document]
    segments = np.zeros(len(true), SEGMENT_DTYPE)
    segments["true_length"] = segments["padded_length"] = true
    segments["prefix_length"] = np.bincount(document, length * (branch == 0))
    answers = (branch > 0) & (length > 0)
    segments["num_branches"] = np.bincount(document, answers)
    branches = np.zeros(np.count_nonzero(answers), BRANCH_DTYPE)
    branches["start"], branches["length"] = start[answers], length[answers]
    branches["leave"] = branches["start"] + branches["length"]
    batch = collate(
        [
            Pack(
                seed,
                np.zeros(tokens, np.int64),
                None,
                segments,
                branches if len(branches) else None,
            )
        ]
    )
    return dataclasses.replace(batch, span=np.repeat(span, length).astype(np.int32))
