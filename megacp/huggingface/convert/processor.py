"""How images become patches and tokens: the processor files of a folder and the image rules of a dataset.

Tables hold each setting of the library, our rule and its default, walked in both directions. All settings are written:
the library reads a missing one as its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megacp.core.data.vision.decoding import RULES
from megacp.core.data.vision.rules import VisionRules
from megacp.huggingface.convert.hf_files import write_json
from megacp.prepare.tokenize.beside import read_object

IMAGES, VIDEOS, PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
Rules = dict[str, Any]
"""Image rules as a dataset's manifest holds them."""

_Table = dict[str, tuple[str, Any]]
"""The library's setting -> our rule and the library's default."""

_HALF = [0.5, 0.5, 0.5]
_BOTH: _Table = {
    "patch_size": ("patch_size", 14),
    "image_mean": ("image_mean", _HALF),
    "image_std": ("image_std", _HALF),
}
_IMAGE: _Table = {
    "max_crops": ("max_crops", 8),
    "overlap_margins": ("overlap_margins", [4, 4]),
    "pooling_size": ("image_pooling", [2, 2]),
}
_VIDEO: _Table = {
    "pooling_size": ("video_pooling", [3, 3]),
    "num_frames": ("max_frames", 64),
    "max_fps": ("video_fps", 2),
}
TEXT: _Table = {
    "image_use_col_tokens": ("use_column_tokens", True),
    "use_single_crop_col_tokens": ("low_res_column_tokens", None),
    "video_use_col_tokens": ("video_column_tokens", False),
}
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 2}
FIXED_TEXT = {"use_single_crop_start_token": True, "use_frame_special_tokens": True}


_WINDOWS: _Table = {**_BOTH, "merge_size": ("merge_size", 2)}
_FRAMES: _Table = {"fps": ("video_fps", 2), "min_frames": ("min_frames", 4), "max_frames": ("max_frames", 768)}
_FIXED_WINDOWS = {**_FIXED, "resample": 3, "temporal_patch_size": 2}
_PIXELS = {"resize_pixels": [3136, 1003520], "video_resize_pixels": [131072, 786432]}


def _write_windows(rules: Rules, folder: Path) -> None:
    """Files for whole images in windows of patches, as Qwen3.5 has them."""
    for name, more, kind, table in (
        (IMAGES, "resize_pixels", {"image_processor_type": "Qwen2VLImageProcessor"}, {}),
        (VIDEOS, "video_resize_pixels", {"video_processor_type": "Qwen3VLVideoProcessor"}, _FRAMES),
    ):
        least, most = rules[more]
        size = {"shortest_edge": least, "longest_edge": most}
        part = {**_said(rules, _WINDOWS | table), "size": size, **_FIXED_WINDOWS, **kind}
        write_json(folder / name, {**part, "processor_class": "Qwen3VLProcessor"})


def _read_windows(image: Rules, video: Rules | None, whole: Rules) -> Rules:
    video = video or {}
    reasons = [
        f"{name}: {key} is {part[key]!r}, megacp can only express {value!r}"
        for name, part in ((IMAGES, image), (VIDEOS, video))
        for key, value in _FIXED_WINDOWS.items()
        if part.get(key, value) not in (value, None)
    ]
    reasons += [
        f"{VIDEOS}: {key} is {video[key]!r}, that of images is {image.get(key)!r}"
        for key in _WINDOWS
        if key in video and video[key] != image.get(key)
    ]
    reasons += [
        f"{VIDEOS}: {key} is {video[key]!r}" for key in ("num_frames", "cap_pixels_per_frame") if video.get(key)
    ]
    if reasons:
        raise ValueError("; ".join(reasons))
    rules: Rules = {**_read(image, _WINDOWS), **_read(video, _FRAMES)}
    for (name, default), part in zip(_PIXELS.items(), (image, video), strict=True):
        given = [(part.get("size") or {}).get(key) for key in ("shortest_edge", "longest_edge")]
        given = [part.get(key) or value for key, value in zip(("min_pixels", "max_pixels"), given, strict=True)]
        rules[name] = [one or other for one, other in zip(given, default, strict=True)]
    return {**rules, "video_fps": float(rules["video_fps"])}


def _write_crops(rules: Rules, folder: Path) -> None:
    """Files for square crops, as Molmo2 has them."""
    if rules["time_mode"] != "per-frame":
        raise ValueError(f"image rules: time_mode is {rules['time_mode']!r}, the library always writes times of frames")
    size = {"height": rules["image_size"], "width": rules["image_size"]}
    image, video = ({**_said(rules, _BOTH | table), "size": size, **_FIXED} for table in (_IMAGE, _VIDEO))
    fps = rules["video_fps"]
    video |= {"do_sample_frames": True, "max_fps": int(fps) if fps == int(fps) else fps}
    image["image_processor_type"], video["video_processor_type"] = "Molmo2ImageProcessor", "Molmo2VideoProcessor"
    for part, name in ((image, IMAGES), (video, VIDEOS)):
        part["processor_class"] = "Molmo2Processor"
        write_json(folder / name, part)
    whole = {"processor_class": "Molmo2Processor", **_said(rules, TEXT), **FIXED_TEXT}
    write_json(folder / PROCESSOR, {**whole, "image_processor": image, "video_processor": video})


def _said(rules: Rules, table: _Table) -> dict[str, Any]:
    return {theirs: rules[ours] for theirs, (ours, _) in table.items()}


def _read(part: Mapping[str, Any], table: _Table) -> Rules:
    found = {ours: (part.get(theirs), default) for theirs, (ours, default) in table.items()}
    return {ours: default if value is None else value for ours, (value, default) in found.items()}


def _part(folder: Path, name: str, whole: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    inside = whole.get(key)
    if isinstance(inside, dict):
        return inside
    return read_object(folder / name) if (folder / name).is_file() else None


def _read_crops(image: Rules, video: Rules | None, whole: Rules) -> Rules:
    size = image.get("size", {"height": 378, "width": 378})
    reasons = [
        f"{IMAGES}: {key} is {part[key]!r}, megacp can only express {value!r}"
        for part, table in ((image, _FIXED), (video or {}, _FIXED), (whole, FIXED_TEXT))
        for key, value in table.items()
        if part.get(key, value) not in (value, None)
    ]
    if size.get("height") != size.get("width"):
        reasons.append(f"{IMAGES}: size is {size!r}, megacp can only express squares")
    if video is not None:
        for key in ("patch_size", "image_mean", "image_std", "size"):
            if key in image and key in video and image[key] != video[key]:
                reasons.append(f"{VIDEOS}: {key} is {video[key]!r}, that of images is {image[key]!r}")
    if reasons:
        raise ValueError("; ".join(reasons))
    rules: Rules = {"image_size": size["height"], **_read(image, _BOTH | _IMAGE), **_read(video or {}, _VIDEO)}
    rules |= {ours: whole.get(theirs, default) for theirs, (ours, default) in TEXT.items()}
    return {**rules, "video_fps": float(rules["video_fps"]), "time_mode": "per-frame"}


_FILES: dict[str, tuple[Callable[[Rules, Path], None], Callable[[Rules, Rules | None, Rules], Rules]]] = {
    "molmo2": (_write_crops, _read_crops),
    "qwen3_5": (_write_windows, _read_windows),
}
"""What writes the files of a vision family's rules, and what reads them: image part, video part, and the whole."""


def write_processor(rules: VisionRules, folder: Path) -> None:
    """Write the files: one with all parts, and each part for older versions. ValueError for a rule it cannot follow."""
    write, _ = _FILES[rules.family]
    write(rules.to_dict(), folder)


def read_rules(folder: Path, token_ids: Mapping[str, int], family: str) -> VisionRules | None:
    """The rules of a folder, None where there are none. ValueError names a setting that megacp cannot express."""
    whole = read_object(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    image, video = _part(folder, IMAGES, whole, "image_processor"), _part(folder, VIDEOS, whole, "video_processor")
    if image is None:
        return None
    _, read = _FILES[family]
    return RULES[family].from_dict({**read(image, video, whole), "token_ids": dict(token_ids)})
