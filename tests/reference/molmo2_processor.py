"""The image and video processors of the transformers library, without torchvision.

They need only three functions of torchvision. The replacements do the same as torchvision for a
float tensor on a CPU: `resize` without smoothing is torch's bilinear interpolation, and `normalize`
subtracts and divides.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megacp.training.data.vision.molmo2 import Molmo2Rules


@functools.cache
def _library(kind: str, name: str) -> Any:
    """Return a class of the library from its file, because the package itself returns a stand-in.

    The import takes a second and every test process reads this file, so import only on use.
    """
    return getattr(importlib.import_module(f"transformers.models.molmo2.{kind}_molmo2"), name)


class _Backend:
    """The object that the processors' functions use as `self` or `backend`."""

    def _build_overlapping_crops(self, *arguments: Any, **options: Any) -> Any:
        build = _library("image_processing", "Molmo2ImageProcessor")._build_overlapping_crops
        return build(self, *arguments, **options)

    def resize(
        self, image: torch.Tensor, size: Any, resample: Any, antialias: bool
    ) -> torch.Tensor:
        assert image.is_floating_point() and not antialias and int(resample) == 2, "bilinear"
        return torch.nn.functional.interpolate(
            image,
            size=(size.height, size.width),
            mode="bilinear",
            align_corners=False,
            antialias=False,
        )

    def rescale_and_normalize(
        self,
        images: torch.Tensor,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        *mean_and_std: Any,
    ) -> torch.Tensor:
        assert do_rescale and do_normalize
        mean, std = (torch.tensor(values) * (1.0 / rescale_factor) for values in mean_and_std)
        return (images.float() - mean[:, None, None]) / std[:, None, None]


def _settings(rules: Molmo2Rules) -> dict[str, Any]:
    return {
        "crop_size": rules.image_size,
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(rules.image_mean),
        "image_std": list(rules.image_std),
        "image_patch_size": rules.patch_size,
    }


def process_image(
    pixels: np.ndarray, rules: Molmo2Rules
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Process uint8 [h, w, 3].

    Return patches, pooling indices, and [low rows, low columns, high rows, high columns].
    """
    # a copy in channels-first order, like the library's conversion from an array
    batch = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()[None]
    grid, patches, pooling = _library(
        "image_processing", "Molmo2ImageProcessor"
    )._image_batch_to_patches_and_grids(
        _Backend(),
        batch,
        max_crops=rules.max_crops,
        overlap_margins=list(rules.overlap_margins),
        image_pooling_h=rules.image_pooling[0],
        image_pooling_w=rules.image_pooling[1],
        **_settings(rules),
    )
    return patches[0].numpy(), pooling[0].numpy(), grid[0].tolist()


def process_video(
    frames: np.ndarray, rules: Molmo2Rules
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Process uint8 [t, h, w, 3]; return patches [t, N, d], pooling indices of one frame, and
    [rows, columns].
    """
    batch = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).contiguous()
    grid, patches, pooling = _library(
        "video_processing", "Molmo2VideoProcessor"
    )._build_video_patches(
        _Backend(),
        batch,
        image_pooling_h=rules.video_pooling[0],
        image_pooling_w=rules.video_pooling[1],
        **_settings(rules),
    )
    return patches.numpy(), pooling.numpy(), grid


def sampled_frames(num_frames: int, fps: float, rules: Molmo2Rules) -> list[int]:
    """Return the indices of the frames that the video processor samples."""
    metadata = SimpleNamespace(fps=fps, duration=num_frames / fps, total_num_frames=num_frames)
    processor = SimpleNamespace(max_fps=rules.video_fps, num_frames=rules.max_frames)
    found = _library("video_processing", "Molmo2VideoProcessor").sample_frames(processor, metadata)  # type: ignore[arg-type]
    return found.tolist()


def _texts(rules: Molmo2Rules) -> Any:
    """Return the settings that the library's processor stores."""
    return SimpleNamespace(
        image_use_col_tokens=rules.use_column_tokens,
        use_single_crop_col_tokens=rules.low_res_column_tokens,
        use_single_crop_start_token=True,
        video_use_col_tokens=rules.video_column_tokens,
        use_frame_special_tokens=True,
    )


def image_text(grid: list[int], rules: Molmo2Rules) -> str:
    """Return the tokens of an image, as texts, for [low rows, low columns, high rows, high
    columns].
    """
    return _library("processing", "Molmo2Processor").replace_image_token(
        _texts(rules), {"image_grids": [grid]}, 0
    )


def video_text(grid: list[int], times: list[float], rules: Molmo2Rules) -> str:
    """Return the tokens of a video with its timestamps, as texts, for [frames, rows, columns]."""
    return _library("processing", "Molmo2Processor").get_video_string(
        _texts(rules), torch.tensor(grid), times
    )
