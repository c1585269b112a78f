"""A tiny Molmo2 with random images: megacp's flags, transformers' native model, and the mapping of
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megacp.engine.config.run import flatten
from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.huggingface.convert.molmo2 import MOLMO2
from tests.reference.training import config_of

VOCAB, EXTRA = 89, 8
IMAGE_START, IMAGE_PATCH, IMAGE_END = VOCAB, VOCAB + 1, VOCAB + 2

TINY: dict[str, Any] = {
    "vision_num_layers": 3,
    "vision_hidden_size": 24,
    "vision_ffn_hidden_size": 36,
    "vision_num_attention_heads": 4,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -3),
    "connector_ffn_hidden_size": 40,
    "vocab_size": VOCAB,
    "additional_vocab_size": EXTRA,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": "head",
    "norm_epsilon": 1e-6,
    "rotary_base": 5_000.0,
}
"""In addition to `reference.training.SMALL`: crops of 4 x 4 patches of 4 x 4 pixels."""

PATCHES, PATCH_DIM = 16, 48
VALUES = flatten(config_of(TINY, {}))


def their_model(layers: Sequence[int] = (-1, -3)) -> Any:
    """Return transformers' Molmo2 with the sizes of SMALL | TINY.

    It is random, and every weight is far from its initial value.
    """
    import transformers

    content = MOLMO2.config({**VALUES, "vision_feature_layers": tuple(layers)})
    ids = {
        "image_start_token_id": IMAGE_START,
        "image_patch_id": IMAGE_PATCH,
        "image_end_token_id": IMAGE_END,
    }
    config = transformers.Molmo2Config(**content, **ids)
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    )
    with torch.no_grad():  # norms away from 1, biases and positions away from 0, scores away from 0
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model.eval()


THEIRS = {link.ours[0].name: link.theirs[0].name for link in MOLMO2.links(VALUES)}
"""transformers' name of each of megacp's global tensors."""


def random_units(
    rng: np.random.Generator, crops: Sequence[int], pooled: Sequence[int], window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return patches `[sum of crops, 16, 48]` float32 and pooling `[sum of pooled, window]`.

    Each unit pools its own patches. Some slots are outside the image, but no complete window is.
    """
    patches = rng.standard_normal((sum(crops), PATCHES, PATCH_DIM)).astype(np.float32)
    parts, first = [], 0
    for count, tokens in zip(crops, pooled, strict=True):
        part = rng.integers(first * PATCHES, (first + count) * PATCHES, (tokens, window))
        outside = rng.random((tokens, window)) < 0.3
        outside[:, rng.integers(window)] = False
        parts.append(np.where(outside, -1, part))
        first += count
    return patches, np.concatenate(parts)


def document_with_images(
    crops: Sequence[int] = (3, 1), pooled: Sequence[int] = (5, 4), window: int = 4, seed: int = 0
) -> PackedBatch:
    """Return one unpacked document: text, and the tokens of each unit between a start and an end
    token.

    All units share one span.
    """
    rng = np.random.default_rng(seed)
    patches, pooling = random_units(rng, crops, pooled, window)
    tokens, seen = [], []
    for count in pooled:
        text = rng.integers(0, VOCAB, int(rng.integers(2, 6))).tolist()
        tokens += [*text, IMAGE_START, *[IMAGE_PATCH] * count, IMAGE_END]
        seen += [0] * len(text) + [1] * (count + 2)
    tail = rng.integers(0, VOCAB, 7).tolist()
    row = np.array(tokens + tail, np.int64)
    span = np.array(seen + [0] * len(tail), np.int32)
    vision = VisionInputs(
        np.cumsum(crops, dtype=np.int64),
        np.cumsum(pooled, dtype=np.int64),
        np.flatnonzero(row == IMAGE_PATCH),
        None,
        patches,
        pooling.astype(np.int64),
    )
    leave, weights = np.full(len(row), len(row), np.int32), rng.random(len(row)).astype(np.float32)
    labels = np.concatenate([row[1:], [0]])
    weights[labels >= VOCAB] = 0.0
    labels[labels >= VOCAB] = 0
    return PackedBatch(row, labels, weights, np.arange(len(row)), leave, span, (seed,), vision)
