"""Molmo2's geometry: an image as crops cut into patches, pooled into tokens; what follows from its
size.

Tokens and pooling indices are those of the transformers library (models/molmo2); pixels differ by
at most one of 255 levels, where a resized value lies on a rounding edge. Each size is a number in
`Molmo2Rules`.

An image becomes one low-resolution crop of the whole, then overlapping high-resolution crops of a
canvas that is tiled by at most `max_crops`. In each part windows of patches are pooled into one
token. A pooling index counts patches over all crops of the image, [crops * patches_per_crop]; -1 =
outside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megacp.engine.config.vision import VisionConfig
from megacp.training.data.vision.rules import ImageLayout, Pixels, VisionRules, rule


@dataclass(frozen=True)
class Molmo2Rules(VisionRules):
    """How images and videos become crops and tokens; builtin types only, stored in the manifest.

    Images and patches are measured in pixels, margins and pooling in patches (rows, columns).
    """

    family: ClassVar[str] = "molmo2"
    model_types: ClassVar[tuple[str, ...]] = ("molmo2",)
    is_named: ClassVar[bool] = False
    token_texts: ClassVar[Mapping[str, str]] = {
        "image_patch": "<im_patch>",
        "image_col": "<im_col>",
        "image_start": "<im_start>",
        "low_res_image_start": "<low_res_im_start>",
        "frame_start": "<frame_start>",
        "image_end": "<im_end>",
        "frame_end": "<frame_end>",
        "image_low_res": "<im_low>",
    }
    placeholder: ClassVar[tuple[str, ...]] = ("image_start", "image_end")
    frames_of_unit: ClassVar[int] = 1
    image_size: int = rule(378, "side of a crop in pixels")
    patch_size: int = rule(14, "side of a patch in pixels")
    max_crops: int = rule(
        8, "high-resolution crops of an image at most, beside its low-resolution one"
    )
    overlap_margins: tuple[int, int] = rule(
        (4, 4), "patches that neighbours show too: at the left/top, right/bottom"
    )
    image_pooling: tuple[int, int] = rule(
        (2, 2), "rows and columns of patches of a token of an image"
    )
    video_pooling: tuple[int, int] = rule((3, 3), "the same of a video frame")
    max_frames: int = rule(64, "frames of a video at most")
    video_fps: float = rule(2.0, "frames taken from a second at most")
    time_mode: str = rule(
        "per-frame", "per-frame: the time in seconds as text before each frame; off: no text"
    )
    use_column_tokens: bool = rule(False, "a token after each row of an image", "--column-tokens")
    low_res_column_tokens: bool | None = rule(
        None, "in the low-resolution part (as --column-tokens)"
    )
    video_column_tokens: bool = rule(False, "in video frames")
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
        least = {"image_size": 1, "patch_size": 1, "max_crops": 1, "max_frames": 1, "max_pixels": 1}
        least |= {"image_pooling": 1, "video_pooling": 1, "overlap_margins": 0}
        found = self.common_problems(least)
        if min(self.image_size, self.patch_size) > 0:
            if self.image_size % self.patch_size:
                found.append(
                    f"--image-size {self.image_size} is not a multiple of --patch-size "
                    f"{self.patch_size}"
                )
            elif sum(self.overlap_margins) >= self.patches_per_side:
                margins = f"--overlap-margins {self.overlap_margins}"
                found.append(f"{margins} leave nothing of {self.patches_per_side} patches")
        if self.time_mode not in ("per-frame", "off"):
            found.append(f"--time-mode is {self.time_mode!r}, allowed are per-frame, off")
        if found:
            raise ValueError("image rules: " + "; ".join(found))

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of a crop."""
        return self.image_size // self.patch_size

    @property
    def patches_per_crop(self) -> int:
        """N, the patches of a crop."""
        return self.patches_per_side**2

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch: 3 * patch_size ** 2."""
        return 3 * self.patch_size**2

    @property
    def patch_shape(self) -> tuple[int, int]:
        """`VisionRules.patch_shape`; what follows implements that protocol too."""
        return self.patches_per_crop, self.patch_dim

    def misfit(self, vision: VisionConfig) -> str | None:
        """Sizes of crops and patches."""
        size, patch = self.image_size, self.patch_size
        expected = vision.vision_image_size, vision.vision_patch_size
        if (size, patch) == expected:
            return None
        have = (
            f"has crops of {size} pixels with patches of {patch}, the model's have "
            f"{expected[0]} and {expected[1]}"
        )
        return f"{have}: set --vision-image-size {size} --vision-patch-size {patch}"

    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """One low-resolution crop, and those of its tiling."""
        return image_layout(width, height, self)

    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """Each frame is one crop, whatever its size."""
        return [
            (time_text(i, number / fps, self), frame_layout(self))
            for i, number in enumerate(frames)
        ]

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Frames of a video: at most `video_fps` a second, and `max_frames` in all.

        Molmo2's processor has the rule, in float32 (which can name one frame behind the last: that
        one is left out).
        """
        target = self.max_frames
        if fps > self.video_fps:
            target = min(target, int(num_frames / fps * self.video_fps))
        step = num_frames / max(min(target, num_frames), 1)  # frames from one taken to the next
        numbers = (
            (np.arange(math.ceil(num_frames / step)) * step).astype(np.float32).astype(np.int64)
        )
        kept: list[int] = numbers[numbers < num_frames].tolist()
        return kept

    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """Frames resized to a crop."""
        return resized(pixels, self.image_size, self.image_size)

    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """All crops."""
        height, width, _ = pixels.shape
        return image_patches(pixels, self), image_layout(width, height, self).pooling

    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """A crop each."""
        patches = patches_of(frames[:, 0], self)
        window = frame_layout(self).pooling
        # [frames, 1, 1]: patches of the frames before, since windows count over all of them
        begin = np.arange(len(patches))[:, None, None] * self.patches_per_crop
        # [frames, pooled, window] -> [frames * pooled, window]
        return patches, np.where(window >= 0, window + begin, -1).reshape(-1, window.shape[1])

    def crop_boxes(
        self, width: int, height: int
    ) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
        """The high-resolution crops."""
        canvas, origins = crop_origins(width, height, self)
        return canvas, [(left, top, self.image_size) for top, left in origins]


def _tiling(width: int, height: int, rules: Molmo2Rules) -> tuple[int, int]:
    """Rows and columns of high-resolution crops, whose canvas shrinks the image least, else
    enlarges it least.

    In float32 and with ties to the first, as the reference: sizes may be below 0 (less than the
    margins).
    """
    margin = sum(rules.overlap_margins) * rules.patch_size
    most = rules.max_crops
    tilings = [(h, w) for h in range(1, most + 1) for w in range(1, most // h + 1)]
    # of equally good tilings the first wins: the one of fewer crops, then of fewer rows
    tilings.sort(key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
    with np.errstate(divide="ignore"):
        canvas = (np.array(tilings) * (rules.image_size - margin)).astype(np.float32)
        scale = (canvas / np.array([height - margin, width - margin], np.float32)).min(axis=1)
    if (scale < 1).all():
        return tilings[int(scale.argmax())]
    return tilings[int(np.where(scale < 1, np.float32(10e9), scale).argmin())]


def pooling_windows(grid: np.ndarray, pool: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Group patch indices [h, w] into windows, int64 [rows * columns, pool_h * pool_w], and (rows,
    columns).

    A grid that does not divide is surrounded by -1, the larger half at the end.
    """
    missing = [-size % step for size, step in zip(grid.shape, pool, strict=True)]
    grid = np.pad(grid, [(m // 2, m - m // 2) for m in missing], constant_values=-1)
    rows, columns = grid.shape[0] // pool[0], grid.shape[1] // pool[1]
    # [rows * pool_h, columns * pool_w] -> [rows, columns, pool_h, pool_w] -> [rows * columns,
    # pool_h * pool_w]
    windows = (
        grid.reshape(rows, pool[0], columns, pool[1])
        .swapaxes(1, 2)
        .reshape(rows * columns, pool[0] * pool[1])
    )
    return windows, (rows, columns)


def _high_res_grid(rows: int, columns: int, rules: Molmo2Rules) -> np.ndarray:
    """Index of the patch shown at each position, int64 [rows of the canvas, its columns], the
    low-res crop counted.

    Where crops overlap, each shows the half on its side.
    """
    side = rules.patches_per_side
    left, right = rules.overlap_margins
    # [crop row, crop column, patch row, patch column]; -1 where a neighbouring crop shows that
    # position
    index = np.arange(rows * columns * side * side).reshape(rows, columns, side, side)
    if left:
        index[1:, :, :left] = -1
        index[:, 1:, :, :left] = -1
    if right:
        index[:-1, :, -right:] = -1
        index[:, :-1, :, -right:] = -1
    kept = index.swapaxes(1, 2).ravel()  # [rows, side, columns, side], reading order on the canvas
    window = side - left - right  # patches of a crop that no neighbour has
    grid: np.ndarray = kept[kept >= 0].reshape(
        rows * window + left + right, columns * window + left + right
    )
    return grid + rules.patches_per_crop


def _layout(
    grid: np.ndarray | None,
    pool: tuple[int, int],
    rules: Molmo2Rules,
    kind: str,
    start: str,
    in_columns: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of patches [h, w] (None: of one crop) and their pooling: a start token, rows of
    `image_patch`, an end.
    """
    crop = np.arange(rules.patches_per_crop).reshape(
        rules.patches_per_side, -1
    )  # indices of its patches
    pooling, (rows, columns) = pooling_windows(crop if grid is None else grid, pool)
    ids = rules.token_ids
    row = [ids["image_patch"]] * columns + ([ids["image_col"]] if in_columns else [])
    return np.array([ids[start], *row * rows, ids[f"{kind}_end"]], np.int64), pooling


@functools.lru_cache(maxsize=256)
def image_layout(width: int, height: int, rules: Molmo2Rules) -> ImageLayout:
    """What an image of this size (upright) becomes; `rules` must have all token ids."""
    rows, columns = _tiling(width, height, rules)
    in_high, in_low = rules.use_column_tokens, rules.low_res_column_tokens
    pool = rules.image_pooling
    low = _layout(
        None, pool, rules, "image", "low_res_image_start", in_high if in_low is None else in_low
    )
    high = _layout(
        _high_res_grid(rows, columns, rules), pool, rules, "image", "image_start", in_high
    )
    return ImageLayout(
        rows * columns + 1, np.concatenate((low[0], high[0])), np.concatenate((low[1], high[1]))
    )


@functools.lru_cache(maxsize=16)
def frame_layout(rules: Molmo2Rules) -> ImageLayout:
    """What one frame of a video becomes, whatever its size: one crop, pooled by `video_pooling`."""
    pool, in_columns = rules.video_pooling, rules.video_column_tokens
    return ImageLayout(1, *_layout(None, pool, rules, "frame", "frame_start", in_columns))


def time_text(index: int, seconds: float, rules: Molmo2Rules) -> str:
    """The text before the `index`-th taken frame."""
    return "" if rules.time_mode == "off" else f"{' ' if index else ''}{seconds:.1f} "


def _source_pixels(before: int, after: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two source indices of each of `after` pixels and the weight of the second, float32:
    centres aligned.
    """
    scale = np.float32(before) / np.float32(after)
    centre = np.maximum(
        scale * (np.arange(after, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5),
        np.float32(0),
    )
    first = np.minimum(centre.astype(np.int64), before - 1)
    return (
        first,
        np.minimum(first + 1, before - 1),
        np.minimum(centre - first, 1).astype(np.float32),
    )


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [height, width, 3]: bilinear between the nearest four, in float32,
    no smoothing.
    """
    top, bottom, down = _source_pixels(pixels.shape[0], height)
    left, right, across = _source_pixels(pixels.shape[1], width)
    down = down[:, None]
    across = np.repeat(across, 3)  # a weight for each colour of a pixel
    rows, index = np.unique(
        np.concatenate((top, bottom)), return_inverse=True
    )  # most are read for two results
    pixels = pixels[rows]
    # [rows, width, 3] -> [rows, 3 * width]
    blended = pixels.take(left, 1).reshape(len(rows), -1) * (1 - across)
    blended += pixels.take(right, 1).reshape(len(rows), -1) * across
    above, below = (
        blended.take(index[:height], 0) * (1 - down),
        blended.take(index[height:], 0) * down,
    )
    return np.rint(above + below).clip(0, 255).astype(np.uint8).reshape(height, width, 3)


def patches_of(crops: np.ndarray, rules: Molmo2Rules) -> np.ndarray:
    """uint8 [crops, size, size, 3] -> normalized float32 [crops, N, 3 * patch ** 2], a patch row by
    row, RGB inside.
    """
    side, patch = rules.patches_per_side, rules.patch_size
    of_colours = [
        np.array(values, np.float32) * np.float32(255)
        for values in (rules.image_mean, rules.image_std)
    ]
    mean, std = (np.tile(values, patch**2) for values in of_colours)  # [3 * patch ** 2]
    # [crops, side, patch, side, patch, 3] -> [crops, side, side, patch, patch, 3] -> [crops, N, 3 *
    # patch ** 2]
    cut = (
        crops.reshape(-1, side, patch, side, patch, 3)
        .swapaxes(2, 3)
        .reshape(-1, side * side, rules.patch_dim)
    )
    values = np.subtract(cut, mean, dtype=np.float32)
    values /= std
    return values


def crop_origins(
    width: int, height: int, rules: Molmo2Rules
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Height and width of the canvas, and row and column of the first pixel of each high-resolution
    crop.
    """
    rows, columns = _tiling(width, height, rules)
    margin = sum(rules.overlap_margins) * rules.patch_size
    step = rules.image_size - margin  # neighbours share `margin` pixels
    origins = [(row * step, column * step) for row in range(rows) for column in range(columns)]
    return (rows * step + margin, columns * step + margin), origins


def image_patches(pixels: np.ndarray, rules: Molmo2Rules) -> np.ndarray:
    """uint8 [h, w, 3] -> float32 [num_crops, patches_per_crop, 3 * patch ** 2], the low-resolution
    crop first.
    """
    height, width, _ = pixels.shape
    (down, across), origins = crop_origins(width, height, rules)
    canvas = resized(pixels, down, across)
    side = rules.image_size
    crops = [canvas[top : top + side, left : left + side] for top, left in origins]
    return patches_of(np.stack([resized(pixels, side, side), *crops]), rules)
