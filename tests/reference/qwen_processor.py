"""The Qwen3.5 processors and positions of the transformers library, without torchvision.

The replacements for torchvision do the same as torchvision on a CPU: `resize` of bytes is torch's
bicubic interpolation with smoothing, and `normalize` subtracts and divides.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megacp.training.data.vision.qwen3_5 import Qwen35Rules


def _library(module: str, name: str) -> Any:
    """Return a class of the library; it is imported on use, because that takes seconds."""
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _interpolated(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize uint8 [n, 3, h, w]."""
    return torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True)


def _resize(image: np.ndarray, size: tuple[int, int], resample: int, **options: Any) -> np.ndarray:
    assert image.dtype == np.uint8 and int(resample) == 3, "bicubic"
    return _interpolated(torch.from_numpy(image.copy())[None], size)[0].numpy()


def process_image(pixels: np.ndarray, rules: Qwen35Rules) -> tuple[np.ndarray, list[int]]:
    """Process uint8 [h, w, 3]; return patches [n, d] and the grid [1, rows, columns]."""
    processor = _library("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")(
        size=dict(zip(("shortest_edge", "longest_edge"), rules.resize_pixels, strict=True)),
        patch_size=rules.patch_size,
        merge_size=rules.merge_size,
        image_mean=list(rules.image_mean),
        image_std=list(rules.image_std),
    )
    with mock.patch("transformers.image_processing_backends.np_resize", _resize):
        found = processor(images=pixels, input_data_format="channels_last", return_tensors="np")
    return found["pixel_values"], found["image_grid_thw"][0].tolist()


class _Frames:
    """The object that the video processor's methods use as `self`."""

    max_video_tokens = 768

    def __init__(self, rules: Qwen35Rules) -> None:
        self.min_frames, self.max_frames, self.fps = (
            rules.min_frames,
            rules.max_frames,
            rules.video_fps,
        )
        self._class = _library("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor")

    def resize(
        self, videos: torch.Tensor, size: Any, factor: int, temporal_factor: int, **_: Any
    ) -> torch.Tensor:
        fitting = _library("qwen3_vl.video_processing_qwen3_vl", "smart_resize")
        count, _, height, width = videos.shape[1:]
        edges = {"min_pixels": size.shortest_edge, "max_pixels": size.longest_edge}
        new = fitting(count, height, width, temporal_factor=temporal_factor, factor=factor, **edges)
        return _interpolated(videos[0], new)[None]

    def rescale_and_normalize(
        self,
        images: torch.Tensor,
        do_rescale: bool,
        factor: float,
        do_normalize: bool,
        *mean_and_std: Any,
    ) -> torch.Tensor:
        assert do_rescale and do_normalize
        mean, std = (torch.tensor(values) * (1.0 / factor) for values in mean_and_std)
        return (images.float() - mean[:, None, None]) / std[:, None, None]

    def patchify(self, *arguments: Any, **options: Any) -> Any:
        return self._class.patchify(self, *arguments, **options)

    def process(self, frames: np.ndarray, rules: Qwen35Rules) -> tuple[np.ndarray, list[int]]:
        found = self._class._preprocess(
            self,
            [torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).contiguous()],
            do_resize=True,
            size=SimpleNamespace(
                shortest_edge=rules.video_resize_pixels[0],
                longest_edge=rules.video_resize_pixels[1],
            ),
            resample=3,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=list(rules.image_mean),
            image_std=list(rules.image_std),
            patch_size=rules.patch_size,
            temporal_patch_size=2,
            merge_size=rules.merge_size,
            cap_pixels_per_frame=False,
        )
        return found["pixel_values_videos"].numpy(), found["video_grid_thw"][0].tolist()

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=fps)
        return self._class.sample_frames(self, metadata).tolist()


def process_video(frames: np.ndarray, rules: Qwen35Rules) -> tuple[np.ndarray, list[int]]:
    """Process uint8 [t, h, w, 3]; return patches [n, d] and the grid [pairs, rows, columns]."""
    return _Frames(rules).process(frames, rules)


def sampled_frames(num_frames: int, fps: float, rules: Qwen35Rules) -> list[int]:
    """Return the indices of the frames that the video processor samples."""
    return _Frames(rules).sampled(num_frames, fps)


def _texts(rules: Qwen35Rules) -> SimpleNamespace:
    """Return the settings that the library's processor stores."""
    processor = _library("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor")
    sizes = SimpleNamespace(merge_size=rules.merge_size, temporal_patch_size=2)
    return SimpleNamespace(
        image_processor=sizes,
        video_processor=sizes,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *given: processor._calculate_timestamps(None, *given),
        library=processor,
    )


def image_text(grid: list[int], rules: Qwen35Rules) -> str:
    """Return the text of an image in a chat template, with its tokens, for [1, rows, columns]."""
    texts = _texts(rules)
    image = texts.library.replace_image_token(texts, {"image_grid_thw": np.array([grid])}, 0)
    return f"<|vision_start|>{image}<|vision_end|>"


def video_text(grid: list[int], frames: list[int], fps: float, rules: Qwen35Rules) -> str:
    """Return the text of a video with its timestamps, for [pairs, rows, columns] and the sampled
    frames.
    """
    texts = _texts(rules)
    metadata = SimpleNamespace(frames_indices=[*frames], fps=fps)
    return texts.library.replace_video_token(
        texts, {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}, 0
    )


def positions(
    tokens: np.ndarray,
    image_grids: list[list[int]],
    video_grids: list[list[int]],
    rules: Qwen35Rules,
) -> np.ndarray:
    """Return time, row and column of each token of one document: int64 [n, 3]."""
    model = _library("qwen3_5.modeling_qwen3_5", "Qwen3_5Model")
    self = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=rules.merge_size)),
        get_vision_position_ids=lambda *given, **named: model.get_vision_position_ids(
            None, *given, **named
        ),
    )
    ids = rules.token_ids
    kinds = (tokens == ids["image_patch"]) * 1 + (tokens == ids["video_patch"]) * 2
    grids = [torch.tensor(grid) if grid else None for grid in (image_grids, video_grids)]
    found, _ = model.get_rope_index(
        self, torch.from_numpy(tokens)[None], torch.from_numpy(kinds)[None], *grids
    )
    return found[:, 0].T.numpy()
