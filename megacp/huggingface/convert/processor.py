"""Writes the processor files of an exported folder: how the library converts images to patches and
tokens.

`megacp.prepare.media.processor_files` reads such files and defines their tables. All settings are
written, because the library replaces missing ones with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacp.huggingface.convert.hf_files import write_json
from megacp.prepare.media.processor_files import (
    IMAGES,
    PROCESSOR,
    PROCESSOR_FILES,
    VIDEOS,
    ProcessorPart,
)
from megacp.training.data.vision.rules import VisionRules

# Image rules in the form of a dataset's manifest.
Rules = dict[str, Any]

# Steps of the library's processors that are always applied.
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


def _settings(rules: Rules, part: ProcessorPart) -> dict[str, Any]:
    """Return a part's fields except its size, including the fixed settings of its class."""
    found = {name: rules[setting.rule] for name, setting in part.settings.items()}
    return {**found, **_STEPS, "resample": part.only["resample"][0]}


def _write_windows(rules: Rules, folder: Path) -> None:
    """Write Qwen3.5's files: whole images in windows of patches."""
    files = PROCESSOR_FILES["qwen3_5"]
    for name, part, kind in (
        (IMAGES, files.images, "image_processor_type"),
        (VIDEOS, files.videos, "video_processor_type"),
    ):
        least, most = rules[part.size.rule]
        content = {
            **_settings(rules, part),
            "size": {"shortest_edge": least, "longest_edge": most},
            "temporal_patch_size": 2,
            kind: part.cls,
            "processor_class": "Qwen3VLProcessor",
        }
        write_json(folder / name, content)


def _write_crops(rules: Rules, folder: Path) -> None:
    """Write Molmo2's files: images in square crops.

    Raise ValueError for rules without the times of frames, which the library always writes.
    """
    files = PROCESSOR_FILES["molmo2"]
    if rules["time_mode"] != "per-frame":
        raise ValueError(
            f"image rules: time_mode is {rules['time_mode']!r}, but transformers always writes the "
            "times of frames; build the dataset with --time-mode per-frame"
        )
    common = {
        "size": {"height": rules["image_size"], "width": rules["image_size"]},
        "processor_class": "Molmo2Processor",
    }
    image = {**_settings(rules, files.images), **common, "image_processor_type": files.images.cls}
    video = {**_settings(rules, files.videos), **common, "video_processor_type": files.videos.cls}
    fps = rules["video_fps"]
    # A whole number is written without a fraction, as in the library's files.
    video |= {"do_sample_frames": True, "max_fps": int(fps) if fps == int(fps) else fps}
    write_json(folder / IMAGES, image)
    write_json(folder / VIDEOS, video)
    whole = {name: rules[rule] for name, (rule, _) in files.switches.items()}
    whole |= {**files.only, "processor_class": "Molmo2Processor"}
    write_json(folder / PROCESSOR, {**whole, "image_processor": image, "video_processor": video})


# Vision family -> the function that writes its files.
_WRITERS: dict[str, Callable[[Rules, Path], None]] = {
    "molmo2": _write_crops,
    "qwen3_5": _write_windows,
}


def write_processor(rules: VisionRules, folder: Path) -> None:
    """Write the processor files: one with all parts, and one per part for older versions.

    Raise ValueError for a rule that the library cannot follow.
    """
    _WRITERS[rules.family](rules.to_dict(), folder)
