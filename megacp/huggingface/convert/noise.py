"""Random rows on which two models are compared: text, an image, several images, a video, an image and a video.

Every row is one document, because the transformers library has no mask of a pack. Pixels, tokens and pooling are those
of the image rules. Rows with several images and frames matter: on one image alone no plan sorts, so logits that
are read in a wrong order would agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megacp.core.config.run import RunConfig
from megacp.core.data.batch import PackedBatch, VisionInputs
from megacp.core.data.geometry import ImageLayout, ImageRules, frame_layout, frame_patches, image_layout, image_patches
from megacp.core.data.images import Pixels, joined

_MOST_TOKENS = 64
_TEXT = 5
"""Tokens of each text in a row with images."""
_FRAME = (0, 0)
"""Stands for a frame of a video where an image has its width and height in crops."""
Media = Sequence[tuple[int, int]]
"""The units of a row in order: images by their width and height in crops, frames."""

MEDIA: dict[str, Media] = {
    "random image": ((2, 1),),
    "random images": ((2, 1), (1, 1), (1, 2)),
    "random video": (_FRAME,) * 8,
    "random image and video": ((2, 1), *(_FRAME,) * 8, (1, 1)),
}
"""The rows with images, by name."""


def rows_for(config: RunConfig, rules: ImageRules | None) -> dict[str, PackedBatch]:
    """Random rows that use all of a model: text, and those of MEDIA for one with a tower (which needs `rules`)."""
    rows = {"random text": random_text(config, rules)}
    if config.vision.vision_num_layers:
        assert rules is not None, "a model with a tower is compared by image rules"
        rows |= {name: random_media(config, rules, media) for name, media in MEDIA.items()}
    return rows


def random_text(config: RunConfig, rules: ImageRules | None) -> PackedBatch:
    """One document of random tokens."""
    count = min(_MOST_TOKENS, config.model.max_position_embeddings or config.data.seq_length)
    return _row(_words(config, rules, count, np.random.default_rng(0)), np.zeros(count, np.int32), None)


def random_media(config: RunConfig, rules: ImageRules, media: Media) -> PackedBatch:
    """One document of noise: images and frames, random tokens before, between and behind them."""
    rng = np.random.default_rng(0)
    tokens, span, layouts, pixels = [_words(config, rules, _TEXT, rng)], [np.zeros(_TEXT)], [], []
    for size in media:
        layout, found = _unit(rules, size, rng)
        layouts.append(layout)
        pixels.append(found)
        tokens += [layout.tokens, _words(config, rules, _TEXT, rng)]
        span += [np.ones(len(layout.tokens)), np.zeros(_TEXT)]
    row = np.concatenate(tokens)  # int64 [T]
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
    """An image or a frame of noise."""
    width, height = (rules.image_size * max(1, crops) for crops in size)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if size == _FRAME:
        layout = frame_layout(rules)
        return layout, (frame_patches(noise, rules), layout.pooling)
    layout = image_layout(width, height, rules)
    return layout, (image_patches(noise, rules), layout.pooling)


def _words(config: RunConfig, rules: ImageRules | None, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random tokens that belong to no image, int64 [count]."""
    images = list(rules.token_ids.values()) if rules is not None else []
    words = np.setdiff1d(np.arange(config.model.vocab_size), images)
    return rng.choice(words, count)


def _row(tokens: np.ndarray, span: np.ndarray, vision: VisionInputs | None) -> PackedBatch:
    zeros, weights = np.zeros(len(tokens), np.int32), np.ones(len(tokens), np.float32)
    return PackedBatch(tokens, np.zeros_like(tokens), weights, np.arange(len(tokens)), zeros, zeros, span, (0,), vision)
