"""How images become crops and tokens, as the processor files of a Molmo2 and as the rules of a dataset.

Key property: one table from the field of a rule to where the library's files have it, walked in both directions; a
setting that the library has no word for is refused by name. Rejected: writing the library's defaults where they happen
to agree, since it reads a missing key as its own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacp.convert.hf_files import read_json, write_json

IMAGES, VIDEOS, PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
Rules = dict[str, Any]
"""Image rules as a dataset's manifest holds them."""

_IMAGE = {
    "patch_size": "patch_size",
    "max_crops": "max_crops",
    "overlap_margins": "overlap_margins",
    "pooling_size": "image_pooling",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
_VIDEO = {
    "patch_size": "patch_size",
    "pooling_size": "video_pooling",
    "image_mean": "image_mean",
    "image_std": "image_std",
    "num_frames": "max_frames",
    "max_fps": "video_fps",
}
TEXT = {
    "image_use_col_tokens": "use_column_tokens",
    "use_single_crop_col_tokens": "low_res_column_tokens",
    "video_use_col_tokens": "video_column_tokens",
}
_IMAGE_DEFAULTS = {"max_crops": 8, "overlap_margins": [4, 4], "pooling_size": [2, 2]}
_VIDEO_DEFAULTS = {"pooling_size": [3, 3], "num_frames": 64, "max_fps": 2}
_BOTH_DEFAULTS = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TEXT_DEFAULTS = {"image_use_col_tokens": True, "use_single_crop_col_tokens": None, "video_use_col_tokens": False}
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 2}
FIXED_TEXT = {"use_single_crop_start_token": True, "use_frame_special_tokens": True}


def write_processor(rules: Rules, folder: Path) -> None:
    """Write the processor's files: one with all parts, and one for each part as older versions look for them.

    ValueError names a rule that the library cannot follow.
    """
    if rules["time_mode"] != "per-frame":
        raise ValueError(f"image rules: time_mode is {rules['time_mode']!r}, the library always writes times of frames")
    size = {"height": rules["image_size"], "width": rules["image_size"]}
    fps = rules["video_fps"]
    image = {name: rules[ours] for name, ours in _IMAGE.items()} | {"size": size, **_FIXED}
    video = {name: rules[ours] for name, ours in _VIDEO.items()} | {"size": size, **_FIXED, "do_sample_frames": True}
    video["max_fps"] = int(fps) if fps == int(fps) else fps
    image["image_processor_type"], video["video_processor_type"] = "Molmo2ImageProcessor", "Molmo2VideoProcessor"
    for part, name in ((image, IMAGES), (video, VIDEOS)):
        part["processor_class"] = "Molmo2Processor"
        write_json(folder / name, part)
    text = {name: rules[ours] for name, ours in TEXT.items()}
    whole = {"processor_class": "Molmo2Processor", **text, **FIXED_TEXT}
    write_json(folder / PROCESSOR, {**whole, "image_processor": image, "video_processor": video})


def _part(folder: Path, name: str, whole: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    inside = whole.get(key)
    if isinstance(inside, dict):
        return inside
    return read_json(folder / name) if (folder / name).is_file() else None


def read_rules(folder: Path, token_ids: Mapping[str, int]) -> Rules | None:
    """The rules that a folder's processor files say, None where there are none. ValueError names what differs from
    what we do.
    """
    whole = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    image, video = _part(folder, IMAGES, whole, "image_processor"), _part(folder, VIDEOS, whole, "video_processor")
    if image is None:
        return None
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
    rules: Rules = {"image_size": size["height"]}
    rules |= {ours: _set(image, name, _IMAGE_DEFAULTS | _BOTH_DEFAULTS) for name, ours in _IMAGE.items()}
    rules |= {
        ours: _set(video or {}, name, _VIDEO_DEFAULTS) for name, ours in _VIDEO.items() if name in _VIDEO_DEFAULTS
    }
    rules |= {ours: whole.get(name, _TEXT_DEFAULTS[name]) for name, ours in TEXT.items()}
    return {**rules, "video_fps": float(rules["video_fps"]), "time_mode": "per-frame", "token_ids": dict(token_ids)}


def _set(part: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> Any:
    value = part.get(name)
    return defaults[name] if value is None else value
