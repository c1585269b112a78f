"""Images for mock packs: random patches and pooling windows that follow from numbers alone.

Key property: units, tables and token ids stand in a mock pack as in a stored one. Its "encoded bytes" are the numbers
from which the mock decoder draws the pixels. So rows with images go through the collation, sharding and loading of real
ones. Rejected: encoding real PNGs, which would take most of a parity check's time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megacp.core.data.image_shards import compute_image_shard_boundaries
from megacp.core.data.images import Pixels
from megacp.core.data.row_images import PackImages
from megacp.core.data.tables import UNIT_DTYPE

_ITEM = struct.Struct("<5q")  # seed, pack, item, crops (frames of a video), pooled tokens of the image or a frame
_MOST_CROPS = 3
_MOST_FRAMES = 5
_DEGREES = (1, 2, 3, 4, 8)
_WINDOW = 4
"""Patches of a pooled token, some of them outside."""


@dataclass(frozen=True)
class MockImages:
    """What mock images look like, in the sizes of a model."""

    patches_per_crop: int
    patch_dim: int
    image_patch: int
    """Token id of a pooled feature, above the ids of text; the id after it stands around each image."""
    attention: str = "example"
    """--image-attention."""

    @property
    def marker(self) -> int:
        """Token before and after an image."""
        return self.image_patch + 1


@dataclass(frozen=True)
class MockDecoder:
    """The `Decoder` of mock images."""

    images: MockImages

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Patches of a crop, numbers of a patch."""
        return self.images.patches_per_crop, self.images.patch_dim

    def image(self, data: bytes) -> Pixels:
        """All crops of an image, normal patches and windows anywhere in them."""
        seed, pack, item, crops, pooled = _ITEM.unpack(data)
        return self._drawn(np.random.default_rng([seed, pack, item]), crops, pooled)

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Some frames; each is the same whatever others are asked for."""
        seed, pack, item, count, pooled = _ITEM.unpack(data)
        patches = [np.zeros((0, *self.patch_shape), np.float32)]
        pooling = [np.zeros((0, _WINDOW), np.int64)]
        for place, frame in enumerate(frame for frame in frames if frame < count):
            one = self._drawn(np.random.default_rng([seed, pack, item, frame]), 1, pooled)
            patches.append(one[0])
            pooling.append(np.where(one[1] >= 0, one[1] + place * self.images.patches_per_crop, -1))
        return np.concatenate(patches), np.concatenate(pooling)

    def _drawn(self, rng: np.random.Generator, crops: int, pooled: int) -> Pixels:
        patches = rng.standard_normal((crops, *self.patch_shape), np.float32)
        windows = rng.integers(0, crops * self.images.patches_per_crop, (pooled, _WINDOW))
        outside = rng.random(windows.shape) < 0.2
        outside[:, 0] = False  # a window has at least one patch
        return patches, np.where(outside, -1, windows)


def with_mock_images(
    tokens: np.ndarray, runs: Sequence[tuple[int, int, int, int]], images: MockImages, seed: int, pack: int
) -> PackImages:
    """Overwrite stretches of `tokens` with images and return their tables.

    `runs`: (segment, branch, first token within the segment, place of the first token in `tokens`), one for each
    shared prefix and branch, in order; a run ends where the next begins. Two in three runs get images, as far as there
    is room.
    """
    rng = np.random.default_rng([seed, pack, 1])
    places = [place for *_, place in runs] + [len(tokens)]
    rows: list[tuple[int, int, int, int, int, int, int, int]] = []
    items: list[bytes] = []
    crops_so_far = pooled_so_far = 0
    for (segment, branch, start, place), stop in zip(runs, places[1:], strict=True):
        offset = 0
        while rng.random() < 0.7:
            video = rng.random() < 0.4
            crops = int(rng.integers(1, 1 + (_MOST_FRAMES if video else _MOST_CROPS)))
            pooled = int(rng.integers(1, 5))
            offset += int(rng.integers(0, 4))
            parts = [(1, frame) for frame in range(crops)] if video else [(crops, -1)]
            if place + offset + len(parts) * (pooled + 2) >= stop:
                break
            for number, frame in parts:
                first = place + offset
                tokens[first : first + pooled + 2] = images.marker
                tokens[first + 1 : first + 1 + pooled] = images.image_patch
                crops_so_far, pooled_so_far = crops_so_far + number, pooled_so_far + pooled
                within = start + offset
                rows.append((segment, len(items), within, pooled + 2, crops_so_far, pooled_so_far, frame, branch))
                offset += pooled + 2
            items.append(_ITEM.pack(seed, pack, len(items), crops, pooled))
    units = np.array(rows, UNIT_DTYPE)
    bounds = units["image_stop"].astype(np.int64), units["pooled_stop"].astype(np.int64)
    # every other pack has stored tables, so that rows with and without them stand side by side
    degrees = _DEGREES if pack % 2 == 0 and len(units) else ()
    tables = {degree: compute_image_shard_boundaries(*bounds, degree) for degree in degrees}
    return PackImages(units, tables, items.__getitem__, images.image_patch)
