"""Encoded images and videos as RGB pixels: what is read, how each kind becomes RGB, and what is refused.

The outcome depends on the bytes alone. Images become RGB of 8 bits: grey and palettes as they are; 16-bit grey by its
high byte (as Pillow does for 16-bit colour); CMYK by Pillow's formula; alpha and transparent colours over white. EXIF's
orientation is applied.

Frames and times of videos are those of the transformers library's Molmo2 video processor. A frame has the same pixels
whichever others are asked for, so several ranks may decode one video: where containers have true times, decoding begins
at the key frame before it, else at the first frame. A frame that the decoder calls damaged ends in an ImageError, never
in FFmpeg's grey. FFmpeg gets the container's name, which the first bytes tell, so that no playlist among the "videos"
can make it open other files. A still image is a video of one frame.
"""

from __future__ import annotations

import bisect
import importlib
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacp.core.data.geometry import ImageRules, frame_layout, frame_patches, image_layout, image_patches

_PLUGINS = {"JPEG": "Jpeg", "PNG": "Png", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff", "WEBP": "WebP"}
_BEGINNINGS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "RGBA", "LA", "PA", "RGBa", "La")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_CONTAINERS = {
    "mov": (4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    "matroska": (0, (b"\x1a\x45\xdf\xa3",)),
    "gif": (0, (b"GIF87a", b"GIF89a")),
    "avi": (8, (b"AVI ",)),
    "ogg": (0, (b"OggS",)),
    "flv": (0, (b"FLV\x01",)),
    "mpeg": (0, (b"\0\0\x01\xba",)),
    "mpegts": (0, (b"\x47",)),
    "asf": (0, (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",)),
}
"""FFmpeg's name of a container: where its mark stands, and the mark."""
_RATE_TOLERANCE = 0.1
"""Part by which the rate in a header may differ from that of the frames before it is not believed."""
_CUT_SECONDS, _CUT_SHARE = 1.0, 0.02
"""By how much headers are off in whole files."""
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers, as FFmpeg calls them, in which every frame has its true time and key frames are what they claim."""


class ImageError(ValueError):
    """Why the bytes are no usable image or video; the caller adds which one."""


def _file_format(data: bytes) -> str | None:
    """JPEG, PNG, GIF, BMP, TIFF or WEBP by the first bytes; None when it is none of them."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for beginning, name in _BEGINNINGS.items() if data.startswith(beginning)), None)


def is_still(data: bytes) -> bool:
    """Whether the bytes are an image file and no GIF of several frames, which alone of these is a video too."""
    name = _file_format(data)
    if name != "GIF":
        return name is not None
    try:
        from PIL import GifImagePlugin

        return not GifImagePlugin.GifImageFile(io.BytesIO(data)).is_animated
    except Exception:  # no pillow, or a damaged GIF: the decoder says what is wrong
        return False


def _refuse_no_media(data: bytes) -> None:
    """ImageError for what no decoder needs to see: no bytes at all, or a page of text."""
    if not data:
        raise ImageError("the file is empty, 0 bytes")
    beginning = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if beginning.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        raise ImageError("the file is an HTML page, no image; was an error page downloaded in its place?")
    if beginning.startswith((b"<?xml", b"<svg", b"<!doctype")):
        raise ImageError("the file is XML or SVG, no image of pixels")


def _open(data: bytes, max_pixels: int) -> Any:
    """A PIL.Image.Image whose pixels are not yet decoded. ImageError says why there is none."""
    _refuse_no_media(data)
    name = _file_format(data)
    if name is None:
        raise ImageError(f"the file is none of {', '.join(_PLUGINS)}: it begins with {data[:8]!r}")
    try:
        plugin = importlib.import_module(f"PIL.{_PLUGINS[name]}ImagePlugin")
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install 'megacp[data]'") from error
    try:
        image = getattr(plugin, f"{_PLUGINS[name]}ImageFile")(io.BytesIO(data))
        width, height = image.size
        frames = getattr(image, "n_frames", 1) if width * height <= max_pixels else 1
    except Exception as error:  # foreign bytes: the plugins raise whatever their parser runs into
        raise ImageError(f"the {name} is cut short or damaged in its header ({_one_line(error)})") from error
    if not width * height:
        raise ImageError(f"the {name} has no pixels, {width} x {height}")
    if (pixels := width * height) > max_pixels:
        raise ImageError(f"{width} x {height} = {pixels} pixels, more than --max-pixels {max_pixels} of the rules")
    if frames > 1:
        raise ImageError(f"the {name} has {frames} frames or pages, an image has one; name a GIF or MP4 as a video")
    return image


def read_pixels(data: bytes, max_pixels: int) -> np.ndarray:
    """uint8 [height, width, 3], RGB, turned upright. ImageError says why the bytes cannot be used."""
    image = _open(data, max_pixels)
    if image.mode not in (*_COLOURS, *_GREY_16):
        allowed = ", ".join(_COLOURS)
        raise ImageError(f"the {image.format} has pixels of kind {image.mode}, allowed are {allowed} and I;16")
    try:
        image.load()
        _scale_transparent_colour(image, data)
        _turn_upright(image)
        return np.ascontiguousarray(_rgb(image))
    except ImageError:
        raise
    except Exception as error:  # as above: whatever a decoder runs into
        raise ImageError(f"the {image.format} is cut short or damaged ({_one_line(error)})") from error


def load_pixels(data: bytes, rules: ImageRules) -> np.ndarray:
    """`read_pixels` by the rules' limit."""
    return read_pixels(data, rules.max_pixels)


def _turn_upright(image: Any) -> None:
    """Apply EXIF's orientation to loaded pixels; a PNG may hold it behind them. Damaged EXIF counts as none."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # foreign bytes, as above; the pixels are turned before EXIF is rewritten
        return


def _scale_transparent_colour(image: Any, data: bytes) -> None:
    """The colour that a PNG without alpha calls transparent, in the units of Pillow's pixels instead of the file's.

    PNG 1.2, 4.2.2.1: tRNS counts in the image's bit depth, which byte 24 of the file holds.
    """
    key = image.info.get("transparency")
    if image.format != "PNG" or image.mode == "P" or not isinstance(key, int | tuple):
        return
    bits = data[24]
    if bits == 16 and isinstance(key, tuple):
        raise ImageError("the PNG has 16 bits a channel and one transparent colour: give it an alpha channel")
    if bits < 8 and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**bits - 1)


def _rgb(image: Any) -> np.ndarray:
    from PIL import Image

    if image.mode in _GREY_16:
        grey, key = np.asarray(image), image.info.get("transparency")
        high = (grey >> 8).astype(np.uint8)
        if isinstance(key, int):
            high[grey == key] = 255
        return np.repeat(high[..., None], 3, axis=2)  # [h, w] -> [h, w, 3]
    if image.mode in ("RGBa", "La"):  # colours multiplied by alpha
        image = image.convert(image.mode[:-1] + "A")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class VideoInfo:
    """What a video says of itself."""

    num_frames: int
    fps: float
    """Mean frames a second; `video_fps` of the rules where the file does not say."""
    width: int
    height: int


def sample_frames(num_frames: int, fps: float, rules: ImageRules) -> list[int]:
    """Numbers of the frames that are taken, rising, at least one; evenly spread over the video.

    As Molmo2's processor, with its float32 (its rule can name one frame behind the last: that one is left out).
    """
    target = rules.max_frames
    if fps > rules.video_fps:
        target = min(target, int(num_frames / fps * rules.video_fps))
    step = num_frames / max(min(target, num_frames), 1)
    numbers = (np.arange(math.ceil(num_frames / step)) * step).astype(np.float32).astype(np.int64)
    kept: list[int] = numbers[numbers < num_frames].tolist()
    return kept


def time_text(index: int, seconds: float, rules: ImageRules) -> str:
    """The text before the `index`-th taken frame."""
    if rules.time_mode == "off":
        return ""
    return f"{' ' if index else ''}{seconds:.1f} "


def _container(data: bytes) -> str:
    _refuse_no_media(data)
    for name, (place, marks) in _CONTAINERS.items():
        if data[place:].startswith(marks) if place == 0 else data[place : place + 4] in marks:
            return name
    names = ", ".join(_CONTAINERS)
    raise ImageError(f"the file is no video that is read here ({names}): it begins with {data[:8]!r}")


@contextmanager
def _opened(data: bytes, rules: ImageRules) -> Iterator[tuple[Any, Any]]:
    """(container, video stream); whatever FFmpeg says inside the block becomes an ImageError."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install 'megacp[data]'") from error
    name = _container(data)
    try:
        with av.open(io.BytesIO(data), format=name) as container:
            if not container.streams.video:
                raise ImageError("the file has no video stream")
            stream = container.streams.video[0]
            _refuse_large(stream, rules)
            stream.codec_context.thread_count = 1  # ranks and workers share the cores already
            yield container, stream
    except ImageError:
        raise
    except EOFError as error:
        raise ImageError(f"the video has no frames: the {name} file ends before the first") from error
    except Exception as error:  # foreign bytes: FFmpeg's errors are of many classes
        raise ImageError(f"the {name} video is cut short or damaged ({_one_line(error)})") from error


def _refuse_large(shown: Any, rules: ImageRules) -> None:
    """ImageError for a stream or a frame (they may differ) above the limit."""
    if (pixels := shown.width * shown.height) > rules.max_pixels:
        raise ImageError(
            f"frames of {shown.width} x {shown.height} = {pixels} pixels, "
            f"more than --max-pixels {rules.max_pixels} of the rules"
        )


def _timeline(container: Any, stream: Any) -> tuple[list[int], list[int]]:
    """Times of all frames and of the key frames, in units of the stream, rising; no packet is decoded."""
    times, keys = set(), set()
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise ImageError(
                "the frames of the video have no times; put it into a container that keeps them, such as MP4"
            )
        times.add(packet.pts)
        if packet.is_keyframe:
            keys.add(packet.pts)
    if not times:
        raise ImageError("the video has no frames")
    return sorted(times), sorted(keys) if container.format.name in _SEEKABLE else []


def _info(times: list[int], stream: Any, rules: ImageRules) -> VideoInfo:
    fps = float(stream.average_rate or 0.0) or rules.video_fps
    count, first, last = len(times), times[0], times[-1]
    if count > 1 and stream.time_base:
        true = (count - 1) / float((last - first) * stream.time_base)
        fps = fps if abs(fps / true - 1) <= _RATE_TOLERANCE else true
    return VideoInfo(count, fps, stream.width, stream.height)


def _refuse_cut(container: Any, data: bytes) -> None:
    """ImageError for half a file of a container that FFmpeg opens nevertheless; the container is at its beginning."""
    name, reason = _container(data), ""
    if name == "gif" and not data.rstrip(b"\0").endswith(b";"):  # GIF89a, 27
        reason = "it does not end with its trailer"
    if name == "avi" and len(data) < (size := 8 + int.from_bytes(data[4:8], "little")) < 0xFFFFFFFF:
        reason = f"it has {len(data)} bytes, its header says {size}"
    if name in ("matroska", "flv"):
        seconds, end = (container.duration or 0) / 1e6, 0.0
        begin = min(container.start_time or 0, 0) / 1e6  # both count from 0, also where the first frame comes later
        for packet in container.demux():
            if packet.pts is not None and packet.time_base:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base) - begin)
        if seconds - end > max(_CUT_SECONDS, _CUT_SHARE * seconds):
            reason = f"it ends at {end:.1f} s, its header says {seconds:.1f} s"
    if reason:
        raise ImageError(f"the {name} video is cut short: {reason}")


def video_info(data: bytes, rules: ImageRules) -> VideoInfo:
    """Frames, rate and size of an encoded video, without decoding one; ImageError, also for half a file."""
    if is_still(data):
        height, width, _ = load_pixels(data, rules).shape
        return VideoInfo(1, rules.video_fps, width, height)
    with _opened(data, rules) as (container, stream):
        _refuse_cut(container, data)
    with _opened(data, rules) as (container, stream):
        return _info(_timeline(container, stream)[0], stream, rules)


def video_pixels(data: bytes, rules: ImageRules, frames: Sequence[int] | None = None) -> Iterator[np.ndarray]:
    """uint8 [h, w, 3] of each of some of the taken frames (`sample_frames`, counted from 0), upright; ImageError.

    `frames` rise; None = all. Numbers behind the last are left out.
    """
    if is_still(data):
        if frames is None or 0 in frames:
            yield load_pixels(data, rules)
        return
    with _opened(data, rules) as (container, stream):
        times, keys = _timeline(container, stream)
        info = _info(times, stream, rules)
    taken = sample_frames(info.num_frames, info.fps, rules)
    wanted = [taken[i] for i in (range(len(taken)) if frames is None else frames) if i < len(taken)]
    # what lies between two groups of frames with a key frame before each is skipped
    for key, group in itertools.groupby(wanted, lambda number: bisect.bisect_right(keys, times[number]) - 1):
        left = list(group)
        if key > 0:
            yield from _decoded(data, rules, times, left, keys[key])
        if left:  # a seek that landed behind the frame, or a key frame that needs those before it
            yield from _decoded(data, rules, times, left)
        if left:
            raise ImageError("the video is cut short or damaged: not all frames can be decoded")


def decode_video(data: bytes, rules: ImageRules, frames: Sequence[int] | None = None) -> np.ndarray:
    """float32 [frames, patches_per_crop, 3 * patch ** 2] of some of the taken frames, as `video_pixels`; ImageError."""
    found = [frame_patches(pixels, rules) for pixels in video_pixels(data, rules, frames)]
    none = np.zeros((0, rules.patches_per_crop, rules.patch_dim), np.float32)
    return np.concatenate(found or [none])


def _decoded(
    data: bytes, rules: ImageRules, times: list[int], left: list[int], key: int | None = None
) -> Iterator[np.ndarray]:
    """Pixels of the frames numbered `left`, which are taken off that list, from the key frame at time `key` on."""
    number_at = {time: number for number, time in enumerate(times)}
    with _opened(data, rules) as (container, stream):
        if key is not None:
            # a stream names its writer in its first frame alone, and FFmpeg mends the errors of known ones
            next(container.decode(stream), None)
            container.seek(key, stream=stream)
        for count, frame in enumerate(container.decode(stream)):
            number = count if key is None else number_at.get(frame.pts, -1)
            if number > left[0] or (key is not None and frame.is_corrupt and number_at.get(key, 0) <= number):
                return
            if number < left[0]:
                continue
            if frame.is_corrupt:
                if key is not None:
                    return
                seconds = float((times[number] - times[0]) * stream.time_base)
                raise ImageError(f"the video is damaged: its frame at {seconds:.2f} s cannot be decoded as a whole")
            _refuse_large(frame, rules)
            pixels = frame.to_ndarray(format="rgb24")
            del left[0]
            yield np.rot90(pixels, getattr(frame, "rotation", 0) // 90)  # degrees against the clock
            if not left:
                return


class RulesDecoder:
    """A decoder for one set of rules; without state, so several threads may share it."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Patches of a crop, numbers of a patch."""
        return self._rules.patches_per_crop, self._rules.patch_dim

    def image(self, data: bytes) -> tuple[np.ndarray, np.ndarray]:
        """All crops of an image, float32 [c, patches, patch_dim], and its pooling int64 [m, window]; ImageError."""
        pixels = load_pixels(data, self._rules)
        height, width, _ = pixels.shape
        return image_patches(pixels, self._rules), image_layout(width, height, self._rules).pooling

    def video(self, data: bytes, frames: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Some of the taken frames, rising, float32 [frames, patches, patch_dim], and their pooling; ImageError."""
        patches = decode_video(data, self._rules, frames)
        window = frame_layout(self._rules).pooling
        begin = np.arange(len(patches))[:, None, None] * self._rules.patches_per_crop
        # [frames, pooled, window] -> [frames * pooled, window]
        return patches, np.where(window >= 0, window + begin, -1).reshape(-1, window.shape[1])
