"""Random rows on which two models are compared: text, an image, several images, a video, an image and a video.

Key property: every row is one document, because the library has no mask of a pack, and pixels, tokens and pooling are
those that the image rules give, so the rows with frames are sorted by type as those of a real video are. Rejected: one
image alone, which no plan sorts: whoever reads logits in a wrong order agrees on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megacp.batch import PackedBatch, VisionInputs
from megacp.config.run import RunConfig
from megacp.data.images import Pixels, joined
from megacp.data.media.geometry import ImageLayout, ImageRules, frame_layout, frame_patches, image_layout, image_patches

_MOST_TOKENS = 64
_TEXT = 5
"""Tokens of each text in a row with images."""
_FRAME = (0, 0)
"""In the place of a picture's width and height in crops: a frame of a video."""
Media = Sequence[tuple[int, int]]
"""What stands in a row, in order: pictures by their width and height in crops, frames."""

MEDIA: dict[str, Media] = {
    "random image": ((2, 1),),
    "random images": ((2, 1), (1, 1), (1, 2)),
    "random video": (_FRAME,) * 8,
    "random image and video": ((2, 1), *(_FRAME,) * 8, (1, 1)),
}
"""The rows with images, by name."""


def rows_for(config: RunConfig, rules: ImageRules | None, seed: int = 0) -> dict[str, PackedBatch]:
    """Random rows that use all of a model: text, and those of MEDIA for one with a tower (which needs `rules`)."""
    rows = {"random text": random_text(config, rules, seed)}
    if config.vision.vision_num_layers:
        assert rules is not None, "a model with a tower is compared by image rules"
        rows |= {name: random_media(config, rules, media, seed) for name, media in MEDIA.items()}
    return rows


def random_text(config: RunConfig, rules: ImageRules | None = None, seed: int = 0) -> PackedBatch:
    """One document of random tokens."""
    count = min(_MOST_TOKENS, config.model.max_position_embeddings or config.data.seq_length)
    tokens = _words(config, rules, count, np.random.default_rng(seed))
    return _row(tokens, np.zeros(count, np.int32), None)


def random_media(config: RunConfig, rules: ImageRules, media: Media, seed: int = 0) -> PackedBatch:
    """One document of noise: pictures and frames, random tokens before, between and behind them."""
    rng = np.random.default_rng(seed)
    tokens, span, layouts, pixels = [_words(config, rules, _TEXT, rng)], [np.zeros(_TEXT)], [], []
    for size in media:
        layout, found = _unit(rules, size, rng)
        layouts.append(layout)
        pixels.append(found)
        tokens += [layout.tokens, _words(config, rules, _TEXT, rng)]
        span += [np.ones(len(layout.tokens)), np.zeros(_TEXT)]
    row = np.concatenate(tokens)
    vision = VisionInputs(
        np.cumsum([layout.num_crops for layout in layouts]),
        np.cumsum([layout.num_pooled for layout in layouts]),
        np.flatnonzero(row == rules.token_ids["image_patch"]),
        None,
        0,
        *joined(pixels, (rules.patches_per_crop, rules.patch_dim)),
    )
    return _row(row, np.concatenate(span).astype(np.int32), vision)


def _unit(rules: ImageRules, size: tuple[int, int], rng: np.random.Generator) -> tuple[ImageLayout, Pixels]:
    """A picture or a frame of noise."""
    width, height = (rules.image_size * max(1, crops) for crops in size)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if size == _FRAME:
        layout = frame_layout(rules)
        return layout, (frame_patches(noise, rules), layout.pooling)
    layout = image_layout(width, height, rules)
    return layout, (image_patches(noise, rules), layout.pooling)


def _words(config: RunConfig, rules: ImageRules | None, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random tokens that stand for no image, int64 [count]."""
    images = list(rules.token_ids.values()) if rules is not None else []
    words = np.setdiff1d(np.arange(config.model.vocab_size), images)
    return rng.choice(words, count)


def _row(tokens: np.ndarray, span: np.ndarray, vision: VisionInputs | None) -> PackedBatch:
    zeros, weights = np.zeros(len(tokens), np.int32), np.ones(len(tokens), np.float32)
    return PackedBatch(tokens, np.zeros_like(tokens), weights, np.arange(len(tokens)), zeros, zeros, span, (0,), vision)
