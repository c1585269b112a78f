"""Videos that current encoders do not produce: from an old x264, of two sizes, or damaged."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np


def patterned(number: int, width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Return waves with noise, so that every block has something to encode."""
    x, y, colour = (
        np.arange(width)[None, :, None],
        np.arange(height)[:, None, None],
        np.array([1.0, 1.7, 2.3]),
    )
    waves = 127 + 90 * np.sin((x * colour + number * 3) / 7) * np.cos((y * colour - number) / 5)
    return (waves + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)


def coded(
    num_frames: int,
    codec: str,
    options: dict[str, str],
    container: str,
    size: tuple[int, int],
    pixels: str,
) -> bytes:
    """Encode 10 frames per second of `patterned`, `size` = (width, height)."""
    import av

    stream, rng = io.BytesIO(), np.random.default_rng(0)
    with av.open(stream, "w", format=container) as output:
        track = output.add_stream(codec, rate=10)
        (track.width, track.height), track.pix_fmt = size, pixels
        track.codec_context.gop_size, track.codec_context.options = 12, options
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(patterned(number, *size, rng), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            output.mux(track.encode(frame))
        output.mux(track.encode())
    return stream.getvalue()


def growing(*sizes: tuple[int, int]) -> bytes:
    """Return four frames of each size in one WebM file, whose header has the first size."""
    import av

    stream, number = io.BytesIO(), 0
    with av.open(stream, "w", format="webm") as output:
        track = output.add_stream("libvpx", rate=10)
        (track.width, track.height), track.pix_fmt = sizes[0], "yuv420p"
        output.start_encoding()
        for size in sizes:
            with av.open(io.BytesIO(coded(4, "libvpx", {}, "webm", size, "yuv420p"))) as source:
                for packet in (packet for packet in source.demux(video=0) if packet.size):
                    copied = av.Packet(bytes(packet))
                    copied.stream, copied.is_keyframe = track, packet.is_keyframe
                    copied.pts = copied.dts = number
                    copied.time_base = Fraction(1, 10)
                    output.mux(copied)
                    number += 1
    return stream.getvalue()


def h264(
    num_frames: int, parameters: str, container: str = "mp4", size: tuple[int, int] = (32, 16)
) -> bytes:
    """Encode with libx264 in 4:4:4."""
    return coded(num_frames, "libx264", {"x264-params": parameters}, container, size, "yuv444p")


def claiming_an_old_x264(data: bytes) -> bytes:
    """Return the same stream; its first packet names an encoder with another rule for 4:4:4."""
    place = data.index(b"x264 - core ") + len(b"x264 - core ")
    return data[:place] + b"150" + data[place + 3 :]


def damaged(mp4: bytes, count: int, seed: int) -> bytes:
    """Change `count` bytes of the frames, but not headers, tables and the first tenth."""
    rng, found = np.random.default_rng(seed), bytearray(mp4)
    begin, end = mp4.index(b"mdat"), mp4.rindex(b"moov") - 4
    for place in rng.integers(begin + (end - begin) // 10, end, count):
        found[place] ^= int(rng.integers(1, 256))
    return bytes(found)
