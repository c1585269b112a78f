"""Image files: each kind becomes the same upright RGB everywhere, and each way to be bad has its own message."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from megacp.core.data.decoding import ImageError, load_pixels
from tests.prepare.media.pictures import TINY, encoded, noise

RULES = dataclasses.replace(TINY, max_pixels=10_000)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    options = {} if kind == "TIFF" else {"exif": exif(orientation)}
    if kind == "TIFF":
        options = {"tiffinfo": {0x0112: orientation}}
    data = encoded(noise(13, 7), kind, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert expected.shape == ((13, 7, 3) if orientation >= 5 else (7, 13, 3))
    assert np.array_equal(load_pixels(data, RULES), expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "RGBA", "LA"])
def test_other_kinds_of_pixels_become_rgb_in_a_defined_way(mode: str) -> None:
    source = Image.fromarray(noise(9, 6)).convert("RGB" if mode == "P" else mode)
    if mode == "P":
        source = source.quantize(16)
    if "A" in mode:
        source.putalpha(100)
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    pixels = load_pixels(encoded(source, kind), RULES)
    if "A" in mode:  # over white: what is 100 / 255 there
        colour = np.asarray(source.convert("RGB")).astype(float)
        assert np.abs(pixels - (colour * 100 + 255 * 155) / 255).max() <= 1
    else:
        assert np.array_equal(pixels, np.asarray(source.convert("RGB")))


def test_a_transparent_colour_counts_in_the_depth_of_the_file() -> None:

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(bits: int, colours: int, row: bytes, *key: int) -> bytes:
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, bits, colours, 0, 0, 0))
        key_chunk = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
        tail = chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + header + key_chunk + tail

    for bits, row, key, other in [
        (1, b"\x40", 0, 255),
        (2, b"\x60", 1, 170),
        (4, b"\x38", 3, 136),
        (8, b"\x12\x80", 0x12, 0x80),
        (16, b"\x12\x34\x80\x00", 0x1234, 0x80),
        (16, b"\x12\x34\x12\x35", 0x1234, 0x12),
    ]:
        assert load_pixels(png(bits, 0, row, key), RULES)[0, :, 0].tolist() == [255, other], bits
    assert load_pixels(png(8, 2, bytes([1, 2, 3, 1, 2, 4]), 1, 2, 3), RULES).tolist() == [[[255] * 3, [1, 2, 4]]]
    with pytest.raises(ImageError, match="16 bits a channel and one transparent colour"):
        load_pixels(png(16, 2, bytes(12), 0, 0, 0), RULES)


def test_16_bit_grey_keeps_its_high_byte() -> None:
    grey = np.array([[0, 255, 256], [32768, 65279, 65535]], np.uint16)
    pixels = load_pixels(encoded(Image.fromarray(grey)), RULES)
    assert pixels[..., 0].tolist() == [[0, 0, 1], [128, 254, 255]] and (pixels[..., :1] == pixels).all()


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(noise(8, 8, seed)) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def without_pixels() -> bytes:
    data = bytearray(encoded(noise(8, 8)))
    data[16:20] = bytes(4)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of_one_frame() -> bytes:
    """An animation by its header, of one frame."""
    data = encoded(noise(8, 8))
    place = data.index(b"IDAT") - 4
    frame = struct.pack(">IIIIIHHBB", 0, 8, 8, 0, 0, 1, 10, 0, 0)
    return data[:place] + chunk(b"acTL", struct.pack(">II", 1, 0)) + chunk(b"fcTL", frame) + data[place:]


def webp_of_one_frame() -> bytes:
    image = encoded(noise(8, 8), "WEBP", lossless=True)[12:]
    size = (7).to_bytes(3, "little") * 2
    frame = bytes(6) + size + (100).to_bytes(3, "little") + b"\0" + image
    parts = [(b"VP8X", b"\x02\0\0\0" + size), (b"ANIM", bytes(6)), (b"ANMF", frame)]
    content = b"WEBP" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in parts)
    return b"RIFF" + struct.pack("<I", len(content)) + content


@pytest.mark.parametrize("data", [encoded(noise(8, 8), "GIF"), png_of_one_frame(), webp_of_one_frame()], ids=len)
def test_an_animation_of_one_frame_stands_still(data: bytes) -> None:
    assert load_pixels(data, RULES).shape == (8, 8, 3)


JPEG = encoded(noise(64, 64), "JPEG")
PNG = encoded(noise(64, 64))
BAD = {
    "empty": (b"", "0 bytes are none of Jpeg, Png"),
    "html": (b"<!DOCTYPE html><html>404</html>", "none of Jpeg, Png.*begins with b'<!DOCTYPE'"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "the JPEG is cut short or damaged"),
    "half a png": (PNG[: len(PNG) // 2], "the PNG is cut short or damaged"),
    "header only": (JPEG[:20], "the JPEG is cut short or damaged"),
    "damaged png": (PNG[:60] + b"\0" * 60 + PNG[120:], "the PNG is cut short or damaged"),
    "animated gif": (animated("GIF"), "the GIF has 3 frames"),
    "animated png": (animated("PNG"), "the PNG has 3 frames"),
    "animated webp": (animated("WEBP"), "the WEBP has 3 frames"),
    "pages": (animated("TIFF"), "the TIFF has 3 frames or pages"),
    "float": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "pixels of kind F, allowed are 1, L"),
    "32 bits": (encoded(Image.fromarray(np.ones((4, 4), np.int32)), "TIFF"), "pixels of kind I, allowed are 1, L"),
    "zero size": (without_pixels(), "the PNG is cut short"),
    "too large": (encoded(noise(101, 100)), "101 x 100 = 10100 pixels, more than --max-pixels 10000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_with_its_own_message(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ImageError, match=message):
        load_pixels(data, RULES)


def test_a_giant_header_is_refused_before_anything_is_decoded() -> None:
    # Pillow only warns up to twice its limit, and a warning stops nothing
    data = encoded(Image.new("1", (10_000, 10_000)))
    with pytest.raises(ImageError, match="10000 x 10000 = 100000000 pixels, more than --max-pixels 89478485"):
        load_pixels(data, TINY)
