"""Where an encoded image or video is decoded: bytes to what a vision tower takes, by the image rules of a dataset.

Key property: crops and pooled tokens are those that the same rules promised from the size alone when the dataset was
built. Rejected: to store pixels, 20 to 100 times the bytes of the files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megacp.core.data.geometry import ImageRules, frame_layout, image_layout, image_patches, load_pixels
from megacp.core.data.video import decode_video


class RulesDecoder:
    """A decoder for one set of rules; without state, so several threads may share it."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Patches of a crop, numbers of a patch."""
        return self._rules.patches_per_crop, self._rules.patch_dim

    def image(self, data: bytes) -> tuple[np.ndarray, np.ndarray]:
        """All crops of an image, float32 [c, patches, patch_dim], and its pooling int64 [m, window]; ImageError."""
        pixels = load_pixels(data, self._rules)
        height, width, _ = pixels.shape
        return image_patches(pixels, self._rules), image_layout(width, height, self._rules).pooling

    def video(self, data: bytes, frames: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Some of the taken frames, rising, float32 [frames, patches, patch_dim], and their pooling; ImageError."""
        patches = decode_video(data, self._rules, frames)
        window = frame_layout(self._rules).pooling
        begin = np.arange(len(patches))[:, None, None] * self._rules.patches_per_crop
        # [frames, pooled, window] -> [frames * pooled, window]
        return patches, np.where(window >= 0, window + begin, -1).reshape(-1, window.shape[1])
