"""Decoding of images and videos: exact pixels for good files, a clear message for bad ones."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from megacp.training.data.vision import decoding
from megacp.training.data.vision.decoding import (
    RulesDecoder,
    load_pixels,
    video_info,
    video_pixels,
)
from megacp.training.data.vision.molmo2 import Molmo2Rules, time_text
from megacp.training.data.vision.rules import ImageError
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.reference import molmo2_processor as reference
from tests.training.data.streams import claiming_an_old_x264, coded, damaged, growing, h264

RULES = dataclasses.replace(TINY, max_pixels=10_000)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    options = {"tiffinfo": {0x0112: orientation}} if kind == "TIFF" else {"exif": exif(orientation)}
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
    if "A" in mode:
        # an opacity of 100 / 255 over white
        colour = np.asarray(source.convert("RGB")).astype(float)
        assert np.abs(pixels - (colour * 100 + 255 * 155) / 255).max() <= 1
    else:
        assert np.array_equal(pixels, np.asarray(source.convert("RGB")))


def test_16_bit_grey_keeps_its_high_byte() -> None:
    grey = np.array([[0, 255, 256], [32768, 65279, 65535]], np.uint16)
    pixels = load_pixels(encoded(Image.fromarray(grey)), RULES)
    assert (
        pixels[..., 0].tolist() == [[0, 0, 1], [128, 254, 255]]
        and (pixels[..., :1] == pixels).all()
    )


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(noise(8, 8, seed)) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def without_pixels() -> bytes:
    data = bytearray(encoded(noise(8, 8)))
    data[16:20] = bytes(4)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of_one_frame() -> bytes:
    """Return a PNG that declares an animation but has a single frame."""
    data = encoded(noise(8, 8))
    place = data.index(b"IDAT") - 4
    frame = struct.pack(">IIIIIHHBB", 0, 8, 8, 0, 0, 1, 10, 0, 0)
    return (
        data[:place]
        + chunk(b"acTL", struct.pack(">II", 1, 0))
        + chunk(b"fcTL", frame)
        + data[place:]
    )


def webp_of_one_frame() -> bytes:
    image = encoded(noise(8, 8), "WEBP", lossless=True)[12:]
    size = (7).to_bytes(3, "little") * 2
    frame = bytes(6) + size + (100).to_bytes(3, "little") + b"\0" + image
    parts = [(b"VP8X", b"\x02\0\0\0" + size), (b"ANIM", bytes(6)), (b"ANMF", frame)]
    content = b"WEBP" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in parts)
    return b"RIFF" + struct.pack("<I", len(content)) + content


@pytest.mark.parametrize(
    "data", [encoded(noise(8, 8), "GIF"), png_of_one_frame(), webp_of_one_frame()], ids=len
)
def test_an_animation_of_one_frame_stands_still(data: bytes) -> None:
    assert load_pixels(data, RULES).shape == (8, 8, 3)


JPEG = encoded(noise(64, 64), "JPEG")
PNG = encoded(noise(64, 64))
BAD = {
    "empty": (b"", "0 bytes are not a file of type Jpeg, Png"),
    "html": (b"<!DOCTYPE html><html>404</html>", "of type Jpeg, Png.*begins with b'<!DOCTYPE'"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "the JPEG is truncated or damaged"),
    "half a png": (PNG[: len(PNG) // 2], "the PNG is truncated or damaged"),
    "header only": (JPEG[:20], "the JPEG is truncated or damaged"),
    "damaged png": (PNG[:60] + b"\0" * 60 + PNG[120:], "the PNG is truncated or damaged"),
    "animated gif": (animated("GIF"), "the GIF has 3 frames"),
    "animated png": (animated("PNG"), "the PNG has 3 frames"),
    "animated webp": (animated("WEBP"), "the WEBP has 3 frames"),
    "pages": (animated("TIFF"), "the TIFF has 3 frames or pages"),
    "float": (
        encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
        "pixels of kind F, but allowed are 1, L",
    ),
    "32 bits": (
        encoded(Image.fromarray(np.ones((4, 4), np.int32)), "TIFF"),
        "pixels of kind I, but allowed are 1, L",
    ),
    "zero size": (without_pixels(), "the PNG is truncated"),
    "too large": (
        encoded(noise(101, 100)),
        "101 x 100 = 10100 pixels, more than --max-pixels 10000",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_with_its_own_message(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ImageError, match=message):
        load_pixels(data, RULES)


def test_a_giant_header_is_refused_before_anything_is_decoded() -> None:
    # up to twice its limit, Pillow only warns and still decodes
    data = encoded(Image.new("1", (10_000, 10_000)))
    with pytest.raises(
        ImageError, match="10000 x 10000 = 100000000 pixels, more than --max-pixels 89478485"
    ):
        load_pixels(data, TINY)


av = pytest.importorskip("av")
# Samples all frames of short videos.
EVERY = dataclasses.replace(TINY, max_frames=64, video_fps=10.0)


def decoded(data: bytes, frames: Sequence[int] = range(99)) -> np.ndarray:
    return RulesDecoder(TINY).video(data, frames)[0]


CONTAINERS = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("matroska", "mpeg4"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mpegts", "mpeg2video"),
    ("gif", "gif"),
]


def test_the_frames_taken_are_those_of_the_transformers_library() -> None:
    for rules in (TINY, dataclasses.replace(TINY, max_frames=64, video_fps=2.0)):
        for num_frames in (*range(1, 140), 1000, 4711):
            for fps in (1.0, 2.0, 23.976, 25.0, 30000 / 1001, 60.0):
                expected = [
                    n for n in reference.sampled_frames(num_frames, fps, rules) if n < num_frames
                ]
                assert rules.sampled(num_frames, fps) == expected, (num_frames, fps)


def test_times_are_written_as_the_library_does() -> None:
    numbers = TINY.sampled(43, 10.0)
    text = "".join(time_text(i, n / 10.0, TINY) + "F" for i, n in enumerate(numbers))
    frame = "<frame_start><im_patch><frame_end>"
    assert text.replace("F", frame) == reference.video_text(
        [len(numbers), 1, 1], [n / 10.0 for n in numbers], TINY
    )
    assert time_text(3, 1.0, dataclasses.replace(TINY, time_mode="off")) == ""


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_every_range_of_frames_has_the_pixels_of_the_whole(container: str, codec: str) -> None:
    data = video(43, container, codec)
    info = video_info(data, TINY)
    assert info == (43, 10.0)
    taken = TINY.sampled(43, 10.0)
    with av.open(io.BytesIO(data)) as source:  # decode all frames in order
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)])[
            taken
        ]
    assert len(taken) == 12 and np.array_equal(np.stack(list(video_pixels(data, TINY))), frames)
    whole = decoded(data)
    assert np.abs(whole - reference.process_video(frames, TINY)[0]).max() <= 2 / 255 * 1.001
    for part in (range(5), [5], [11], [], [1, 4, 5, 9], range(0, 12, 2)):
        assert np.array_equal(decoded(data, part), whole[list(part)])


def test_a_video_that_is_asked_for_again_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only new frames are decoded, and the cache keeps the videos that were used last."""
    one = video(43)
    two = video(20)
    whole = decoded(one)
    asked = []

    def noted(
        data: bytes, rules: Molmo2Rules, frames: Sequence[int], fit: Any
    ) -> Iterator[np.ndarray]:
        asked.append((data is one, list(frames)))
        return video_pixels(data, rules, frames, fit)

    monkeypatch.setattr(decoding, "video_pixels", noted)
    decoder = RulesDecoder(TINY)
    for frames in ([0, 3], [0, 3], [2, 3, 5], [3], []):
        assert np.array_equal(decoder.video(one, frames)[0], whole[frames])
    assert asked == [(True, [0, 3]), (True, [2, 5])]
    monkeypatch.setattr(decoding, "KEPT_BYTES", len(one) + 2 * 3 * TINY.image_size**2)
    for data, frames in ((two, [0, 1]), (one, [0]), (two, [0, 1, 2]), (one, [0])):
        decoder.video(data, frames)
    # the cache had no room for the four frames of the first video
    assert asked[2:] == [(False, [0, 1]), (True, [0]), (False, [2])]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_a_still_image_is_a_video_of_one_frame(kind: str) -> None:
    data = encoded(noise(30, 20), kind)
    assert video_info(data, TINY)[0] == 1
    expected = reference.process_video(load_pixels(data, TINY)[None], TINY)[0]
    assert np.abs(decoded(data, [0]) - expected).max() <= 2 / 255 * 1.001
    assert decoded(data, [1, 2]).shape == (0, 16, 48)


@pytest.mark.parametrize(
    ("container", "left"),
    [("matroska", 0.5), ("webm", 0.5), ("flv", 0.5), ("avi", 0.5), ("avi", 0.8), ("gif", 0.5)],
)
def test_part_of_a_video_is_refused_also_where_no_index_misses(container: str, left: float) -> None:
    codec = {"webm": "libvpx-vp9", "flv": "flv1", "gif": "gif"}.get(container, "mpeg4")
    data = video(60, container, codec)
    assert video_info(data, TINY)[0] == 60
    with pytest.raises(ImageError, match="video is truncated"):
        video_info(data[: int(left * len(data))], TINY)


def test_a_rate_that_the_frames_contradict_is_not_believed() -> None:
    data = video(20, "matroska", every=10)
    _, fps = video_info(data, TINY)
    assert fps == pytest.approx(1.0, rel=0.01) and len(TINY.sampled(20, fps)) == 12


def in_order(data: bytes) -> np.ndarray:
    """Return all frames, decoded in order on one thread."""
    with av.open(io.BytesIO(data)) as source:
        source.streams.video[0].codec_context.thread_count = 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)])


def test_what_the_first_packet_alone_says_is_known_behind_a_seek() -> None:
    now = h264(30, "cabac=1:8x8dct=1:crf=14:keyint=1")
    old = claiming_an_old_x264(now)
    expected = in_order(old)
    assert (expected != in_order(now)).any(axis=(1, 2, 3)).sum() > 1, (
        "the encoder name changes the pixels"
    )
    for number in range(30):
        (found,) = video_pixels(old, EVERY, [number])
        assert np.array_equal(found, expected[number]), number


SOUND = {
    "open groups": lambda: h264(40, "open-gop=1:bframes=3:keyint=12"),
    "open groups in a stream": lambda: h264(40, "open-gop=1:bframes=3:keyint=12", "mpegts"),
    "refreshed in columns": lambda: h264(40, "intra-refresh=1:keyint=12", size=(64, 16)),
    "H.264 in AVI": lambda: h264(40, "bframes=3:keyint=12", "avi"),
    "open groups in AVI": lambda: h264(40, "open-gop=1:bframes=3:keyint=12", "avi"),
    "one frame in AVI": lambda: h264(1, "bframes=3:keyint=12", "avi"),
    "AVI with holes": lambda: video(40, "avi", every=2),
    "AVI with long holes": lambda: video(30, "avi", every=10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_video_is_read_frame_by_frame_as_in_order(name: str) -> None:
    data = SOUND[name]()
    expected = in_order(data)
    num_frames, fps = video_info(data, EVERY)
    assert num_frames == len(expected) == len(EVERY.sampled(num_frames, fps))
    assert np.array_equal(np.stack(list(video_pixels(data, EVERY))), expected)
    for number in range(len(expected)):
        (found,) = video_pixels(data, EVERY, [number])
        assert np.array_equal(found, expected[number]), number


@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.slow
def test_a_damaged_video_is_refused(codec: str, count: int) -> None:
    whole = coded(40, codec, {}, "mp4", (160, 96), "yuv420p")
    assert len(list(video_pixels(whole, EVERY))) == 40
    for seed in range(6):
        with pytest.raises(
            ImageError, match=r"the video is damaged: its frame at \d.\d0 s|is truncated or damaged"
        ):
            list(video_pixels(damaged(whole, count, seed), EVERY))


def sound_only() -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as output:
        track = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 800), np.int16), format="s16", layout="mono"
        )
        frame.sample_rate = 8000
        output.mux(track.encode(frame))
    return stream.getvalue()


def test_a_bad_video_is_refused_with_its_own_message() -> None:
    half = video(43)
    bad = {
        b"": "0 bytes are not a file of type mov",
        b"#EXTM3U\nfile:///etc/passwd\n": "of type mov.*begins with b'#EXTM3U",
        half[: len(half) // 2]: "the mov video is truncated or damaged",
        video(0, "matroska"): "the matroska video is truncated or damaged",
        sound_only(): "no video stream",
        encoded(noise(5, 5), "JPEG")[:100]: "the JPEG is truncated or damaged",
    }
    for data, message in bad.items():
        with pytest.raises(ImageError, match=message):
            decoded(data)
    with pytest.raises(ImageError, match="48 x 32 = 1536 pixels, more than --max-pixels 1000"):
        video_info(video(3), dataclasses.replace(TINY, max_pixels=1000))


def test_frames_that_grow_within_a_video_are_held_to_the_limit_too() -> None:
    data = growing((32, 16), (320, 160))
    assert video_info(data, EVERY)[0] == 8
    assert [pixels.shape[0] for pixels in video_pixels(data, EVERY)] == [16] * 4 + [160] * 4
    with pytest.raises(ImageError, match="320 x 160 = 51200 pixels, more than --max-pixels 1000"):
        list(video_pixels(data, dataclasses.replace(EVERY, max_pixels=1000)))
