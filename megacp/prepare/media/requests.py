"""Compare the sizes and frames that a record asks for with the rules of the build.

A part of type image or video may have keys of Qwen's `qwen_vl_utils`, such as `max_pixels`. A
dataset has one set of image rules for all images, and training applies them again to the stored
files. So a request is followed if the rules have the same result for this image or video, and
refused otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megacp.training.data.vision.rules import ImageError, VisionRules

_PIXEL_FLAGS = {"image": "--resize-pixels", "video": "--video-resize-pixels"}


def refuse_other_size(
    rules: VisionRules,
    kind: str,
    requests: Mapping[str, float],
    size: tuple[int, int],
    num_frames: int = 0,
) -> None:
    """Raise ImageError if the rules do not resize an image or a video as requested.

    `size` is the width and height in the file, and `num_frames` the number of taken frames (0 for
    an image).
    """
    sides = [requests.get(f"resized_{side}") for side in ("width", "height")]
    pixels = requests.get("min_pixels"), requests.get("max_pixels")
    if sides == [None, None] and pixels == (None, None):
        return
    # the keys in question, as `requests` may also ask for frames
    names = [name for name in requests if name.startswith("resized_") or name.endswith("_pixels")]
    ignored = f"remove {_names(names)} (--ignore-keys {','.join(names)})"
    # some families cut an image into crops instead
    found = rules.resized_to(size, num_frames)
    if found is None:
        raise ImageError(
            f"{_shown(requests, names)}: the rules of {rules.family} do not resize to a size; "
            f"{ignored}, or resize the file itself"
        )

    # as in qwen_vl_utils, explicit sides take precedence over a range of pixels
    if None not in sides:
        width, height = (int(side) for side in sides if side is not None)
        wanted = rules.resized_to((width, height), num_frames)
        way = "resize the file itself"
    else:
        wanted = rules.resized_to(size, num_frames, pixels)
        way = f"set {_PIXEL_FLAGS[kind]} for all records"
    assert wanted is not None, "the family resizes, see above"
    if wanted != found:
        raise ImageError(
            f"{_shown(requests, names)} would resize it from {_size(size)} to {_size(wanted)} "
            f"pixels, but the build resizes it to {_size(found)}, because all records have the "
            f"same rules; {way}, or {ignored}"
        )


def refuse_other_frames(
    rules: VisionRules, requests: Mapping[str, float], num_frames: int, fps: float
) -> None:
    """Raise ImageError if the rules do not take the requested frames of a video.

    The video has `num_frames` frames, `fps` per second.
    """
    taken = rules.sampled(num_frames, fps)
    wanted = {}  # key -> number of frames
    # compare the frames themselves: another rate may take the same ones of a short video
    if "fps" in requests:
        other = dataclasses.replace(rules, video_fps=float(requests["fps"]))  # type: ignore[type-var]
        frames = other.sampled(num_frames, fps)
        if frames != taken:
            wanted["fps"] = len(frames)
    # any number of frames is spread evenly over the video, so the number decides
    if "nframes" in requests and requests["nframes"] != len(taken):
        wanted["nframes"] = int(requests["nframes"])
    for name, count in wanted.items():
        flag = {"fps": "--video-fps", "nframes": "--max-frames"}[name]
        raise ImageError(
            f"{_shown(requests, [name])} would take {count} of its {num_frames} frames, but the "
            f"build takes {len(taken)}, because all records have the same rules; set {flag} "
            f"{requests[name]:g} for all records, or remove {_names([name])} (--ignore-keys {name})"
        )


def _shown(requests: Mapping[str, float], names: list[str]) -> str:
    """Return requests with their values, such as "`max_pixels` 50176"."""
    return " and ".join(f"`{name}` {requests[name]:.15g}" for name in names)


def _names(names: list[str]) -> str:
    """Return the names of requests as text."""
    return " and ".join(f"`{name}`" for name in names)


def _size(size: tuple[int, int]) -> str:
    """Return a width and a height as text."""
    return f"{size[0]} x {size[1]}"
