"""Images and videos as counts of crops and tokens: units of a pack, documents, and the images of a mixed row."""

from __future__ import annotations

import dataclasses

import numpy as np

from megacp.core.data.batch import PackedBatch, VisionInputs
from megacp.core.data.synthetic.mixed import CROP_TOKENS, FRAME_TOKENS

KINDS = ("images", "mixed", "image, video")
PACK_CROPS, MOST_CROPS, FRAMES = 128, 9, (8, 129)
"""Crops of a pack, most crops of an image, least and one more than the most frames of a video."""

Units = tuple[np.ndarray, np.ndarray]
"""Crops and pooled tokens of each unit, int64 [u]."""


def synthetic_units(rng: np.random.Generator, kind: str) -> Units:
    """Units of a pack of about 128 crops, of a kind in `KINDS`: images of 1 to 9 crops, frames of videos.

    Half the documents of `mixed` are videos of 8 to 128 frames, cut where the pack is full; `image, video` is an image
    of 9 crops before 128 frames.
    """
    crops: list[int] = [MOST_CROPS] + [1] * 128 if kind == "image, video" else []
    frames: list[bool] = [False] + [True] * 128 if kind == "image, video" else []
    while sum(crops) < PACK_CROPS:
        left = PACK_CROPS - sum(crops)
        video = kind == "mixed" and rng.random() < 0.5
        new = [1] * min(left, int(rng.integers(*FRAMES))) if video else [int(rng.integers(1, MOST_CROPS + 1))]
        crops, frames = crops + new, frames + [video] * len(new)
    units = np.array(crops, np.int64)
    return units, np.where(frames, FRAME_TOKENS, units * CROP_TOKENS)


def mixed_documents(rng: np.random.Generator, count: int) -> Units:
    """Crops and tokens: half images of 2 to 9 crops with questions, 40 % videos of 8 to 128 frames, the rest text."""
    kind, crops, frames = rng.random(count), rng.integers(2, MOST_CROPS + 1, count), rng.integers(*FRAMES, count)
    pictures = 100 + crops * CROP_TOKENS + rng.integers(1, 9, count) * 60
    text = np.clip(rng.lognormal(6, 1, count), 10, 8192).astype(np.int64)
    video, plain = kind >= 0.5, kind >= 0.9
    tokens = np.where(plain, text, np.where(video, frames * (FRAME_TOKENS + 7) + 100, pictures))
    return np.where(plain, 0, np.where(video, frames, crops)), tokens


def with_vision(row: PackedBatch) -> PackedBatch:
    """A row of `data/synthetic/mixed.py` with a pooled feature on each image token; each stretch of them is a unit.

    Every token of a stretch holds a feature; an image has a crop for each 144 of them, a frame one.
    """
    inside = row.span > 0
    begins = inside & ~np.r_[False, inside[:-1] & (row.document[1:] == row.document[:-1])]
    starts = np.flatnonzero(begins)
    tokens = np.bincount(np.cumsum(begins)[inside] - 1, minlength=len(starts))
    vision = VisionInputs(
        cum_crop_bounds=np.cumsum(-(-tokens // CROP_TOKENS)),
        cum_token_pooling_bounds=np.cumsum(tokens),
        feature_rows=np.flatnonzero(inside),
        boundaries=None,
        first_crop=0,
        patches=np.zeros((0, 1, 1), np.float32),
        pooling=np.zeros((0, 1), np.int64),
    )
    return dataclasses.replace(row, vision=vision)
