"""Molmo2's geometry: an image is divided into crops of patches, which are pooled to tokens.

Tokens and pooling indices equal the output of the transformers library (models/molmo2). Pixels
differ by at most one of 255 levels, where a resized value is close to a rounding boundary. All
sizes are fields of `Molmo2Rules`.

An image becomes one low-resolution crop of the whole image, and at most `max_crops` overlapping
high-resolution crops that tile a canvas. In both parts, each window of patches is pooled to one
token. Pooling indices count patches across all crops of the image, [crops * patches_per_crop];
-1 = outside.
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
    """Rules that convert images and videos to crops and tokens, stored in the manifest.

    Image and patch sizes are in pixels; margins and pooling are in patches (rows, columns).
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
    image_size: int = rule(378, "side length of a crop in pixels")
    patch_size: int = rule(14, "side length of a patch in pixels")
    max_crops: int = rule(
        8, "maximum number of high-resolution crops, in addition to the low-resolution one"
    )
    overlap_margins: tuple[int, int] = rule(
        (4, 4), "patches that a crop shares with its neighbours: left and top, right and bottom"
    )
    image_pooling: tuple[int, int] = rule(
        (2, 2), "rows and columns of patches that are pooled to one image token"
    )
    video_pooling: tuple[int, int] = rule(
        (3, 3), "rows and columns of patches that are pooled to one video token"
    )
    max_frames: int = rule(64, "maximum number of frames to sample from a video")
    video_fps: float = rule(2.0, "maximum number of frames to sample per second")
    time_mode: str = rule(
        "per-frame", "per-frame: write the time in seconds before each frame; off: write no times"
    )
    use_column_tokens: bool = rule(
        False, "add a column token after each row of image tokens", "--column-tokens"
    )
    low_res_column_tokens: bool | None = rule(
        None, "add column tokens in the low-resolution crop (default: same as --column-tokens)"
    )
    video_column_tokens: bool = rule(False, "add column tokens in video frames")
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
                found.append(
                    f"{margins} leave nothing of {self.patches_per_side} patches per side: use "
                    "smaller margins"
                )
        if self.time_mode not in ("per-frame", "off"):
            found.append(f"--time-mode is {self.time_mode!r}, but must be per-frame or off")
        if found:
            raise ValueError("image rules: " + "; ".join(found))

    @property
    def patches_per_side(self) -> int:
        """Number of patches along one side of a crop."""
        return self.image_size // self.patch_size

    @property
    def patches_per_crop(self) -> int:
        """Number of patches per crop."""
        return self.patches_per_side**2

    @property
    def patch_dim(self) -> int:
        """Number of values per patch: 3 * patch_size ** 2."""
        return 3 * self.patch_size**2

    @property
    def patch_shape(self) -> tuple[int, int]:
        """See `VisionRules`, which also describes the following methods."""
        return self.patches_per_crop, self.patch_dim

    def misfit(self, vision: VisionConfig) -> str | None:
        """Return whether and how the sizes of crops and patches differ."""
        size = self.image_size
        patch = self.patch_size
        expected = vision.vision_image_size, vision.vision_patch_size
        if (size, patch) == expected:
            return None
        return (
            f"has crops of {size} pixels with patches of {patch}, but the model expects "
            f"{expected[0]} and {expected[1]}: set --vision-image-size {size} "
            f"--vision-patch-size {patch}"
        )

    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """Return the layout: one low-resolution crop, and the high-resolution crops of a tiling."""
        return image_layout(width, height, self)

    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """Return one crop per frame of any size."""
        units = []
        for i, number in enumerate(frames):
            units.append((time_text(i, number / fps, self), frame_layout(self)))
        return units

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Return at most `video_fps` frames per second, and at most `max_frames`.

        This is the rule of Molmo2's processor, in float32. Its rounding may give one frame after
        the last, which is dropped.
        """
        target = self.max_frames
        if fps > self.video_fps:
            target = min(target, int(num_frames / fps * self.video_fps))
        step = num_frames / max(min(target, num_frames), 1)  # between two sampled frames
        times = np.arange(math.ceil(num_frames / step)) * step
        numbers = times.astype(np.float32).astype(np.int64)
        kept: list[int] = numbers[numbers < num_frames].tolist()
        return kept

    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """Return a frame resized to the size of a crop."""
        return resized(pixels, self.image_size, self.image_size)

    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """Return all crops of an image."""
        height, width, _ = pixels.shape
        return image_patches(pixels, self), image_layout(width, height, self).pooling

    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """Return one crop per frame."""
        patches = patches_of(frames[:, 0], self)
        window = frame_layout(self).pooling
        # [frames, 1, 1]: patches in earlier frames, because windows count across all frames
        begin = np.arange(len(patches))[:, None, None] * self.patches_per_crop
        # [frames, pooled, window] -> [frames * pooled, window]
        return patches, np.where(window >= 0, window + begin, -1).reshape(-1, window.shape[1])

    def crop_boxes(
        self, width: int, height: int
    ) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
        """Return the high-resolution crops."""
        canvas, origins = crop_origins(width, height, self)
        return canvas, [(left, top, self.image_size) for top, left in origins]


def _tiling(width: int, height: int, rules: Molmo2Rules) -> tuple[int, int]:
    """Return the best tiling: rows and columns of high-resolution crops.

    If every tiling shrinks the image, the best tiling shrinks it least; otherwise, it enlarges the
    image least. Like the reference, this function computes in float32 and chooses the first of
    equal tilings. Image sizes without margins may be negative.
    """
    margin = sum(rules.overlap_margins) * rules.patch_size
    most = rules.max_crops
    tilings = []
    for rows in range(1, most + 1):
        tilings += [(rows, columns) for columns in range(1, most // rows + 1)]
    # among equal tilings, prefer fewer crops, then fewer rows
    tilings.sort(key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
    with np.errstate(divide="ignore"):
        canvas = (np.array(tilings) * (rules.image_size - margin)).astype(np.float32)
        scale = (canvas / np.array([height - margin, width - margin], np.float32)).min(axis=1)
    if (scale < 1).all():  # every tiling shrinks the image
        return tilings[int(scale.argmax())]
    return tilings[int(np.where(scale < 1, np.float32(10e9), scale).argmin())]


def pooling_windows(grid: np.ndarray, pool: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return windows of patch indices [h, w], and the numbers of rows and columns of windows.

    The windows are int64 [rows * columns, pool_h * pool_w]. If `pool` does not divide the grid, it
    is padded with -1, with the larger half at the end.
    """
    missing = [-size % step for size, step in zip(grid.shape, pool, strict=True)]
    padding = [(size // 2, size - size // 2) for size in missing]
    grid = np.pad(grid, padding, constant_values=-1)
    rows, columns = grid.shape[0] // pool[0], grid.shape[1] // pool[1]
    # [rows * pool_h, columns * pool_w] -> [rows, columns, pool_h, pool_w]
    windows = grid.reshape(rows, pool[0], columns, pool[1]).swapaxes(1, 2)
    return windows.reshape(rows * columns, pool[0] * pool[1]), (rows, columns)


def _high_res_grid(rows: int, columns: int, rules: Molmo2Rules) -> np.ndarray:
    """Return the index of the patch at each position of the canvas, int64 [rows, columns].

    Indices start after the low-resolution crop. Where two crops overlap, each provides the part on
    its own side.
    """
    side = rules.patches_per_side
    left, right = rules.overlap_margins
    # [crop row, crop column, patch row, patch column]; -1 where another crop provides the patch
    index = np.arange(rows * columns * side * side).reshape(rows, columns, side, side)
    if left:
        index[1:, :, :left] = -1
        index[:, 1:, :, :left] = -1
    if right:
        index[:-1, :, -right:] = -1
        index[:, :-1, :, -right:] = -1
    kept = index.swapaxes(1, 2).ravel()  # [rows, side, columns, side]: row-major on the canvas
    window = side - left - right  # patches per side that a crop shares with no neighbour
    height = rows * window + left + right
    width = columns * window + left + right
    grid: np.ndarray = kept[kept >= 0].reshape(height, width)
    return grid + rules.patches_per_crop


def _layout(
    grid: np.ndarray | None,
    pool: tuple[int, int],
    rules: Molmo2Rules,
    kind: str,
    start: str,
    in_columns: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and pooling windows for patches [h, w]; None means the patches of one crop.

    The tokens are a start token, rows of `image_patch`, and an end token.
    """
    if grid is None:  # patch indices of a single crop
        grid = np.arange(rules.patches_per_crop).reshape(rules.patches_per_side, -1)
    pooling, (rows, columns) = pooling_windows(grid, pool)
    ids = rules.token_ids
    row = [ids["image_patch"]] * columns
    if in_columns:
        row.append(ids["image_col"])
    tokens = np.array([ids[start], *row * rows, ids[f"{kind}_end"]], np.int64)
    return tokens, pooling


@functools.lru_cache(maxsize=256)
def image_layout(width: int, height: int, rules: Molmo2Rules) -> ImageLayout:
    """Return the layout of an upright image of this size; `rules` must have all token ids."""
    rows, columns = _tiling(width, height, rules)
    pool = rules.image_pooling
    in_high = rules.use_column_tokens
    in_low = rules.low_res_column_tokens
    if in_low is None:
        in_low = in_high
    low_tokens, low_pooling = _layout(None, pool, rules, "image", "low_res_image_start", in_low)
    grid = _high_res_grid(rows, columns, rules)
    high_tokens, high_pooling = _layout(grid, pool, rules, "image", "image_start", in_high)
    tokens = np.concatenate((low_tokens, high_tokens))
    pooling = np.concatenate((low_pooling, high_pooling))
    return ImageLayout(rows * columns + 1, tokens, pooling)


@functools.lru_cache(maxsize=16)
def frame_layout(rules: Molmo2Rules) -> ImageLayout:
    """Return the layout of a video frame of any size: one crop, pooled by `video_pooling`."""
    in_columns = rules.video_column_tokens
    tokens, pooling = _layout(None, rules.video_pooling, rules, "frame", "frame_start", in_columns)
    return ImageLayout(1, tokens, pooling)


def time_text(index: int, seconds: float, rules: Molmo2Rules) -> str:
    """Return the text before sampled frame number `index`."""
    if rules.time_mode == "off":
        return ""
    space = " " if index else ""
    return f"{space}{seconds:.1f} "


def _source_pixels(before: int, after: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two source indices for each of `after` pixels, and the float32 weight of the second.

    Pixel centres are aligned.
    """
    scale = np.float32(before) / np.float32(after)
    half = np.float32(0.5)
    centre = scale * (np.arange(after, dtype=np.float32) + half) - half
    centre = np.maximum(centre, np.float32(0))
    first = np.minimum(centre.astype(np.int64), before - 1)
    second = np.minimum(first + 1, before - 1)
    weight = np.minimum(centre - first, 1).astype(np.float32)
    return first, second, weight


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return an image resized from uint8 [h, w, 3] to uint8 [height, width, 3].

    The four nearest pixels are blended bilinearly in float32, without antialiasing.
    """
    top, bottom, down = _source_pixels(pixels.shape[0], height)
    left, right, across = _source_pixels(pixels.shape[1], width)
    down = down[:, None]
    across = np.repeat(across, 3)  # one weight per colour of a pixel
    # Keep only the source rows that are used. Most contribute to two results.
    rows, index = np.unique(np.concatenate((top, bottom)), return_inverse=True)
    pixels = pixels[rows]
    # [rows, width, 3] -> [rows, 3 * width]
    blended = pixels.take(left, 1).reshape(len(rows), -1) * (1 - across)
    blended += pixels.take(right, 1).reshape(len(rows), -1) * across
    above = blended.take(index[:height], 0) * (1 - down)
    below = blended.take(index[height:], 0) * down
    levels = np.rint(above + below).clip(0, 255).astype(np.uint8)
    return levels.reshape(height, width, 3)


def patches_of(crops: np.ndarray, rules: Molmo2Rules) -> np.ndarray:
    """Return normalized patches, float32 [crops, N, D], of crops, uint8 [crops, size, size, 3].

    N is the number of patches per crop. D = 3 * patch ** 2: rows of a patch, with RGB innermost.
    """
    side = rules.patches_per_side
    patch = rules.patch_size
    # [D]: for pixels of 0..255
    mean = np.tile(np.array(rules.image_mean, np.float32) * np.float32(255), patch**2)
    std = np.tile(np.array(rules.image_std, np.float32) * np.float32(255), patch**2)
    # [crops, side, patch, side, patch, 3] -> [crops, side, side, patch, patch, 3] -> [crops, N, D]
    cut = crops.reshape(-1, side, patch, side, patch, 3).swapaxes(2, 3)
    cut = cut.reshape(-1, side * side, rules.patch_dim)
    values = np.subtract(cut, mean, dtype=np.float32)
    values /= std
    return values


def crop_origins(
    width: int, height: int, rules: Molmo2Rules
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return height and width of the canvas, and the origin of each high-resolution crop.

    The origin is the row and column of the crop's first pixel.
    """
    rows, columns = _tiling(width, height, rules)
    margin = sum(rules.overlap_margins) * rules.patch_size
    step = rules.image_size - margin  # neighbours share `margin` pixels
    origins = []
    for row in range(rows):
        origins += [(row * step, column * step) for column in range(columns)]
    return (rows * step + margin, columns * step + margin), origins


def image_patches(pixels: np.ndarray, rules: Molmo2Rules) -> np.ndarray:
    """Return all crops of an image as patches, the low-resolution crop first.

    uint8 [h, w, 3] -> float32 [num_crops, patches_per_crop, 3 * patch ** 2].
    """
    height, width, _ = pixels.shape
    (down, across), origins = crop_origins(width, height, rules)
    canvas = resized(pixels, down, across)
    side = rules.image_size
    crops = [canvas[top : top + side, left : left + side] for top, left in origins]
    return patches_of(np.stack([resized(pixels, side, side), *crops]), rules)
