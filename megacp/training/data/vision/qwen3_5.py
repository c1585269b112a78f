"""Qwen3.5's geometry: an image, or two frames of a video, as one grid of patches, of which windows
become tokens.

Tokens, grids, frames and times are those of the transformers library (models/qwen3_vl, whose
processors qwen3_5 has); pixels differ by at most two of 255 levels: Pillow blends with finer
weights than torchvision, and each of the two passes rounds.

A "crop" of the bounds in a dataset is one patch here. Patches stand window by window, so those of a
token follow each other.
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
"""Frames of a patch; an image is shown as two equal ones."""
_LARGEST_RATIO = 200
"""Largest ratio of the sides of an image."""


@dataclass(frozen=True)
class Qwen35Rules(VisionRules):
    """How images and videos become patches and tokens; builtin types only, stored in the
    manifest.
    """

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
    patch_size: int = rule(16, "side of a patch in pixels")
    merge_size: int = rule(2, "patches along a side of the window that becomes one token")
    resize_pixels: tuple[int, int] = rule(
        (1 << 16, 1 << 24), "least and most of an image, in whole windows"
    )
    video_resize_pixels: tuple[int, int] = rule(
        (1 << 12, 24 << 20), "the same of all taken frames of a video"
    )
    min_frames: int = rule(4, "frames of a video at least")
    max_frames: int = rule(768, "frames of a video at most")
    video_fps: float = rule(
        2.0, "frames taken from a second, between --min-frames and --max-frames"
    )
    image_mean: tuple[float, float, float] = rule(
        (0.5, 0.5, 0.5), "subtracted from red, green, blue between 0 and 1"
    )
    image_std: tuple[float, float, float] = rule(
        (0.5, 0.5, 0.5), "what the difference is divided by"
    )
    max_pixels: int = rule(89_478_485, "larger images are refused")
    token_ids: dict[str, int] = rule(
        {}, "ids of image tokens (the tokenizer's, or above it)", "--image-token-ids"
    )

    def __post_init__(self) -> None:
        """ValueError lists all that cannot be, each with its flag."""
        least = dict.fromkeys(
            ("patch_size", "merge_size", "min_frames", "max_frames", "max_pixels"), 1
        )
        found = self.common_problems({**least, "resize_pixels": 1, "video_resize_pixels": 1})
        for name in ("resize_pixels", "video_resize_pixels"):
            if (given := getattr(self, name))[0] > given[1]:
                found.append(
                    f"--{name.replace('_', '-')} is {given}, the least is more than the most"
                )
        if found:
            raise ValueError("image rules: " + "; ".join(found))

    @property
    def patch_shape(self) -> tuple[int, int]:
        """`VisionRules.patch_shape`; what follows implements that protocol too."""
        return 1, 3 * _FRAMES * self.patch_size**2

    def misfit(self, vision: VisionConfig) -> str | None:
        """Sizes of patches and windows."""
        patch, merge = self.patch_size, self.merge_size
        if (patch, merge) == (vision.vision_patch_size, 2):
            return None
        have = (
            f"has patches of {patch} pixels in windows of {merge}, the model's are "
            f"{vision.vision_patch_size} in 2"
        )
        return f"{have}: set --vision-patch-size"

    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """One grid, in which the sides keep their ratio."""
        if max(width, height) > _LARGEST_RATIO * min(width, height):
            raise ImageError(
                f"{width} x {height}: one side is more than {_LARGEST_RATIO} times the other"
            )
        return _grid_layout(*self._image_size(width, height), "image_patch", self)

    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """Two frames each, behind the mean of their times; the last frame may stand for two."""
        if len(frames) < _FRAMES:
            raise ImageError(f"a video needs {_FRAMES} frames, it has {len(frames)}")
        if len(sizes) > 1:
            raise ImageError(
                "the frames of the video have the sizes "
                f"{', '.join(f'{w} x {h}' for w, h in sizes)}"
            )
        ((width, height),) = sizes
        layout = _grid_layout(*self._video_size(len(frames), width, height), "video_patch", self)
        times = [number / fps for number in frames] + [
            frames[-1] / fps
        ]  # the last may be half of a pair
        pairs = [(times[i] + times[i + 1]) / 2 for i in range(0, len(frames), _FRAMES)]
        return [(f"<{time:.1f} seconds>", layout) for time in pairs]

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """The first and the last frame, and those evenly between them."""
        count = int(num_frames / fps * self.video_fps)
        count = min(
            max(count, self.min_frames), self.max_frames, num_frames
        )  # a short video gives all it has
        taken: list[int] = np.linspace(0, num_frames - 1, count).round().astype(np.int64).tolist()
        return taken

    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """Frames resized to the size that all of the video have."""
        return _resized(pixels, *self._video_size(count, pixels.shape[1], pixels.shape[0]))

    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """One grid."""
        fitted = _resized(pixels, *self._image_size(pixels.shape[1], pixels.shape[0]))
        return self.pixels_of_frames(np.broadcast_to(fitted, (1, _FRAMES, *fitted.shape)))

    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """A grid each: a patch is [colour, frame, row, column]."""
        units, _, height, width, _ = frames.shape
        patch, merge = self.patch_size, self.merge_size
        rows, columns = height // (patch * merge), width // (patch * merge)
        # [units, frames, rows, merge, patch, columns, merge, patch, 3]
        cut = frames.reshape(units, _FRAMES, rows, merge, patch, columns, merge, patch, 3)
        # -> [units, rows, columns, merge, merge, 3, frames, patch, patch]
        cut = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, self.patch_shape[1] // 3)
        of_colours = [
            np.array(values, np.float32) * np.float32(255)
            for values in (self.image_mean, self.image_std)
        ]
        mean, std = (values[:, None] for values in of_colours)  # [3, 1]
        patches = np.subtract(cut, mean, dtype=np.float32)
        patches /= std
        return patches.reshape(-1, *self.patch_shape), np.arange(len(patches)).reshape(-1, merge**2)

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        return _fitting(width, height, 1, self.patch_size * self.merge_size, self.resize_pixels)

    def _video_size(self, count: int, width: int, height: int) -> tuple[int, int]:
        """Width and height of each of `count` frames."""
        side = self.patch_size * self.merge_size
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        return _fitting(width, height, count, side, self.video_resize_pixels, _FRAMES)


def _fitting(
    width: int, height: int, count: int, side: int, pixels: tuple[int, int], step: int = 1
) -> tuple[int, int]:
    """Width and height in multiples of `side`, such that `count` frames have the least and most
    `pixels`.

    Frames count as a multiple of `step`, rounded like the sides.
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
    """The tokens of a grid for pixels of this size: a start, a token a window, an end."""
    merge = rules.merge_size
    side = rules.patch_size * merge  # pixels of a window, which becomes a token
    ids = rules.token_ids
    rows, columns = height // side, width // side
    tokens = np.full(rows * columns + 2, ids[kind], np.int64)
    tokens[0], tokens[-1] = ids["vision_start"], ids["vision_end"]
    pooling = np.arange(rows * columns * merge**2).reshape(-1, merge**2)
    return ImageLayout(pooling.size, tokens, pooling, (rows, columns))


def _resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [height, width, 3]: bicubic and smoothed, first along rows, as
    torchvision does.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install 'megacp[data]'") from error
    image = Image.fromarray(np.ascontiguousarray(pixels))
    kind = Image.Resampling.BICUBIC
    return np.asarray(image.resize((width, pixels.shape[0]), kind).resize((width, height), kind))
