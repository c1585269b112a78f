"""Qwen3.5's geometry: an image, or two frames of a video, is one grid of patches.

Each window of patches becomes a token.

Tokens, grids, frames and times equal the output of the transformers library (models/qwen3_vl, whose
processors are used for qwen3_5). Pixels differ by at most two of 255 levels: Pillow blends with
finer weights than torchvision, and rounds after each of the two passes.

A "crop" in a dataset's bounds is one patch here. Patches are stored window by window, so a token's
patches are consecutive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megacp.engine.config.vision import VisionConfig
from megacp.training.data.vision.rules import ImageError, ImageLayout, Pixels, VisionRules, rule

_FRAMES = 2
"""Number of frames that a patch covers; an image is treated as two equal frames."""
_LARGEST_RATIO = 200
"""Maximum ratio of an image's sides."""


@dataclass(frozen=True)
class Qwen35Rules(VisionRules):
    """Rules that convert images and videos to patches and tokens, stored in the manifest."""

    family: ClassVar[str] = "qwen3_5"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_moe")
    token_texts: ClassVar[Mapping[str, str]] = {
        "image_patch": "<|image_pad|>",
        "video_patch": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    placeholder: ClassVar[tuple[str, ...]] = ("vision_start", "image_patch", "vision_end")
    frames_of_unit: ClassVar[int] = _FRAMES
    patch_size: int = rule(16, "side length of a patch in pixels")
    merge_size: int = rule(2, "patches along each side of a window, which becomes one token")
    resize_pixels: tuple[int, int] = rule(
        (1 << 16, 1 << 24),
        "minimum and maximum number of pixels in an image after it is resized to whole windows",
    )
    video_resize_pixels: tuple[int, int] = rule(
        (1 << 12, 24 << 20),
        "minimum and maximum number of pixels in all sampled frames of a video after resizing",
    )
    min_frames: int = rule(4, "minimum number of frames to sample from a video")
    max_frames: int = rule(768, "maximum number of frames to sample from a video")
    video_fps: float = rule(
        2.0, "frames to sample per second, within --min-frames and --max-frames in total"
    )
    image_mean: tuple[float, float, float] = rule(
        (0.5, 0.5, 0.5), "values to subtract from red, green and blue, which are between 0 and 1"
    )
    image_std: tuple[float, float, float] = rule(
        (0.5, 0.5, 0.5), "values to divide red, green and blue by, after the subtraction"
    )
    max_pixels: int = rule(89_478_485, "reject images with more pixels")
    token_ids: dict[str, int] = rule(
        {},
        "ids of image tokens (default: the tokenizer's ids, or new ids above its vocabulary)",
        "--image-token-ids",
    )

    def __post_init__(self) -> None:
        """Raise ValueError with all invalid values, each with its flag."""
        names = ("patch_size", "merge_size", "min_frames", "max_frames", "max_pixels")
        ranges = ("resize_pixels", "video_resize_pixels")
        found = self.common_problems(dict.fromkeys((*names, *ranges), 1))
        for name in ranges:
            given = getattr(self, name)
            if given[0] > given[1]:
                found.append(
                    f"--{name.replace('_', '-')} is {given}, but the minimum must not be above the "
                    "maximum"
                )
        if found:
            raise ValueError("image rules: " + "; ".join(found))

    @property
    def patch_shape(self) -> tuple[int, int]:
        """See `VisionRules`, which also describes the following methods."""
        return 1, 3 * _FRAMES * self.patch_size**2

    def misfit(self, vision: VisionConfig) -> str | None:
        """Return whether and how the sizes of patches and windows differ."""
        patch = self.patch_size
        merge = self.merge_size
        if (patch, merge) == (vision.vision_patch_size, 2):
            return None
        return (
            f"has patches of {patch} pixels in windows of {merge}, but the model expects "
            f"{vision.vision_patch_size} in windows of 2: set --vision-patch-size"
        )

    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """Return one grid that approximately preserves the image's aspect ratio."""
        if max(width, height) > _LARGEST_RATIO * min(width, height):
            raise ImageError(
                f"{width} x {height}: one side is more than {_LARGEST_RATIO} times as long as the "
                "other"
            )
        return _grid_layout(*self._image_size(width, height), "image_patch", self)

    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """Return a unit per two frames, with their mean time. The last frame may be repeated."""
        if len(frames) < _FRAMES:
            raise ImageError(f"a video needs {_FRAMES} frames, but it has {len(frames)}")
        if len(sizes) > 1:
            listed_sizes = ", ".join(f"{w} x {h}" for w, h in sizes)
            raise ImageError(f"the frames of the video have different sizes: {listed_sizes}")
        ((width, height),) = sizes
        layout = _grid_layout(*self._video_size(len(frames), width, height), "video_patch", self)
        times = [number / fps for number in frames]
        times.append(frames[-1] / fps)  # for an odd number of frames
        pairs = [(times[i] + times[i + 1]) / 2 for i in range(0, len(frames), _FRAMES)]
        return [(f"<{time:.1f} seconds>", layout) for time in pairs]

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Return the first frame, the last frame, and evenly spaced frames between them."""
        count = int(num_frames / fps * self.video_fps)
        # all frames of a short video are used
        count = min(max(count, self.min_frames), self.max_frames, num_frames)
        taken: list[int] = np.linspace(0, num_frames - 1, count).round().astype(np.int64).tolist()
        return taken

    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """Return a frame resized to the size of its video's fitted frames."""
        return _resized(pixels, *self._video_size(count, pixels.shape[1], pixels.shape[0]))

    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """Return the patches of one grid."""
        fitted = _resized(pixels, *self._image_size(pixels.shape[1], pixels.shape[0]))
        return self.pixels_of_frames(np.broadcast_to(fitted, (1, _FRAMES, *fitted.shape)))

    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """Return the patches of one grid per unit, with values [colour, frame, row, column]."""
        units, _, height, width, _ = frames.shape
        patch, merge = self.patch_size, self.merge_size
        rows, columns = height // (patch * merge), width // (patch * merge)
        # [units, frames, rows, merge, patch, columns, merge, patch, 3]
        cut = frames.reshape(units, _FRAMES, rows, merge, patch, columns, merge, patch, 3)
        # -> [units, rows, columns, merge, merge, 3, frames, patch, patch]
        cut = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, self.patch_shape[1] // 3)
        # [3, 1]: for pixels of 0..255
        mean = (np.array(self.image_mean, np.float32) * np.float32(255))[:, None]
        std = (np.array(self.image_std, np.float32) * np.float32(255))[:, None]
        patches = np.subtract(cut, mean, dtype=np.float32)
        patches /= std
        pooling = np.arange(len(patches)).reshape(-1, merge**2)  # windows are consecutive
        return patches.reshape(-1, *self.patch_shape), pooling

    def resized_to(
        self,
        size: tuple[int, int],
        num_frames: int = 0,
        pixels: tuple[float | None, float | None] = (None, None),
    ) -> tuple[int, int]:
        """Return the size of the grid in pixels."""
        if pixels == (None, None):
            return self._video_size(num_frames, *size) if num_frames else self._image_size(*size)
        # the limits of a video are for all frames, and `pixels` for each of them
        low, high = self.resize_pixels
        if num_frames:
            low, high = (limit // num_frames for limit in self.video_resize_pixels)
        if pixels[1] is not None:
            high = int(pixels[1])
        low = min(low, high) if pixels[0] is None else int(pixels[0])
        return _fitting(*size, 1, self.patch_size * self.merge_size, (low, high))

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized."""
        return _fitting(width, height, 1, self.patch_size * self.merge_size, self.resize_pixels)

    def _video_size(self, count: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of each of `count` frames."""
        side = self.patch_size * self.merge_size
        if min(width, height) < side:  # first enlarge the frame to at least one window
            scale = max(side / height, side / width)
            width = int(width * scale)
            height = int(height * scale)
        return _fitting(width, height, count, side, self.video_resize_pixels, _FRAMES)


def _fitting(
    width: int, height: int, count: int, side: int, pixels: tuple[int, int], step: int = 1
) -> tuple[int, int]:
    """Return width and height as multiples of `side`, so that all frames are in the range `pixels`.

    There are `count` frames; to compare them with the range, round to a multiple of `step`.
    """
    fitted = [round(one / side) * side for one in (width, height)]
    total = round(count / step) * step * math.prod(fitted)  # pixels of all frames
    if total > pixels[1]:
        shrink = math.sqrt(count * height * width / pixels[1])
        fitted = [max(side, math.floor(one / shrink / side) * side) for one in (width, height)]
    elif total < pixels[0]:
        grow = math.sqrt(pixels[0] / (count * height * width))
        fitted = [math.ceil(one * grow / side) * side for one in (width, height)]
    return fitted[0], fitted[1]


@functools.lru_cache(maxsize=64)
def _grid_layout(width: int, height: int, kind: str, rules: Qwen35Rules) -> ImageLayout:
    """Return the layout for a grid of this size in pixels: start, one token per window, end."""
    merge = rules.merge_size
    side = rules.patch_size * merge  # side of a window in pixels
    ids = rules.token_ids
    rows, columns = height // side, width // side
    tokens = np.full(rows * columns + 2, ids[kind], np.int64)
    tokens[0] = ids["vision_start"]
    tokens[-1] = ids["vision_end"]
    pooling = np.arange(rows * columns * merge**2).reshape(-1, merge**2)
    return ImageLayout(pooling.size, tokens, pooling, (rows, columns))


def _resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return an image resized from uint8 [h, w, 3] to uint8 [height, width, 3].

    Like torchvision, use bicubic interpolation with antialiasing, first along rows.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install -e '.[data]'") from error
    image = Image.fromarray(np.ascontiguousarray(pixels))
    kind = Image.Resampling.BICUBIC
    image = image.resize((width, pixels.shape[0]), kind)
    return np.asarray(image.resize((width, height), kind))
