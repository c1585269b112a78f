"""The bytes of an image file as RGB pixels: what is read, how each kind becomes RGB, and what is refused.

The outcome depends on the bytes alone, and each way to be wrong has a message.

What becomes RGB of 8 bits: grey and palettes as they are; 16-bit grey by its high byte (as Pillow does for 16-bit
colour); CMYK by Pillow's formula; alpha and transparent colours over white. EXIF's orientation is applied. Refused:
animations (a GIF may be a video), several pages, 32-bit and float pixels, more pixels than the limit.
"""

from __future__ import annotations

import importlib
import io
import struct
from typing import Any

import numpy as np

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
_STATED_SIZE = {"PNG": (">II", 16), "GIF": ("<HH", 6)}
"""Where a header states width and height."""
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "RGBA", "LA", "PA", "RGBa", "La")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")


class ImageError(ValueError):
    """Why the bytes are no usable image or video; the caller adds which one."""


def file_format(data: bytes) -> str | None:
    """JPEG, PNG, GIF, BMP, TIFF or WEBP by the first bytes; None when it is none of them."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for beginning, name in _BEGINNINGS.items() if data.startswith(beginning)), None)


def is_still(data: bytes) -> bool:
    """Whether the bytes are an image file and no GIF of several frames, which alone of these is a video too."""
    name = file_format(data)
    if name != "GIF":
        return name is not None
    try:
        from PIL import GifImagePlugin

        return not GifImagePlugin.GifImageFile(io.BytesIO(data)).is_animated
    except Exception:  # no pillow, or a damaged GIF: the decoder says what is wrong
        return False


def refuse_no_media(data: bytes) -> None:
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
    refuse_no_media(data)
    name = file_format(data)
    if name is None:
        known = ", ".join(_PLUGINS)
        raise ImageError(f"the file is none of {known}: it begins with {data[:8]!r}")
    if name in _STATED_SIZE and len(data) >= 24:
        layout, place = _STATED_SIZE[name]
        width, height = struct.unpack_from(layout, data, place)
        if not width or not height:
            raise ImageError(f"the {name} has no pixels: its header says {width} x {height}")
    try:
        plugin = importlib.import_module(f"PIL.{_PLUGINS[name]}ImagePlugin")
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install 'megacp[data]'") from error
    try:
        image = getattr(plugin, f"{_PLUGINS[name]}ImageFile")(io.BytesIO(data))
        width, height = image.size
        if width * height <= max_pixels:
            frames = getattr(image, "n_frames", 1)
    except Exception as error:  # foreign bytes: the plugins raise whatever their parser runs into
        raise ImageError(f"the {name} is cut short or damaged in its header ({_one_line(error)})") from error
    if width * height > max_pixels:
        found = f"{width} x {height} = {width * height} pixels"
        raise ImageError(f"{found}, more than --max-pixels {max_pixels} of the rules")
    if frames > 1 and name == "TIFF":
        raise ImageError(f"the TIFF has {frames} pages, one is wanted")
    if frames > 1:
        way = "name it as a video" if name == "GIF" else "give its frames, or a video such as MP4"
        raise ImageError(f"the {name} is animated, {frames} frames; an image stands still: {way}")
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
