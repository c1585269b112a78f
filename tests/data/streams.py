"""Videos that encoders of today do not make: of an old x264, packed as DivX 5 did, damaged."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np

from tests.prepare.media.pictures import moving


def patterned(number: int, width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Waves under noise, which leave something to code in every block."""
    x, y, colour = np.arange(width)[None, :, None], np.arange(height)[:, None, None], np.array([1.0, 1.7, 2.3])
    waves = 127 + 90 * np.sin((x * colour + number * 3) / 7) * np.cos((y * colour - number) / 5)
    return (waves + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)


def coded(
    num_frames: int, codec: str, options: dict[str, str], container: str, size: tuple[int, int], pixels: str
) -> bytes:
    """10 frames a second of `patterned`, `size` = (width, height)."""
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
    """Four frames of each size in one WebM, whose header says the first."""
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


def h264(num_frames: int, parameters: str, container: str = "mp4", size: tuple[int, int] = (32, 16)) -> bytes:
    """By libx264 in 4:4:4."""
    return coded(num_frames, "libx264", {"x264-params": parameters}, container, size, "yuv444p")


def claiming_an_old_x264(data: bytes) -> bytes:
    """The same stream, whose first packet names a writer whose 4:4:4 is decoded by another rule."""
    place = data.index(b"x264 - core ") + len(b"x264 - core ")
    return data[:place] + b"150" + data[place + 3 :]


def packed_avi(num_frames: int) -> bytes:
    """MPEG-4 with B-frames in the packets of the frames after them, each followed by an empty packet, as by DivX 5."""
    import av

    stored = _mpeg4(num_frames)
    packets: list[tuple[bytes, bool]] = []
    while stored:
        data, is_key = stored.pop(0)
        if stored and _kind(stored[0][0]) == "B":
            between, _ = stored.pop(0)
            packets += [(data + between[between.index(_FRAME) :], is_key), (_NOTHING_NEW, False)]
        else:
            packets.append((data, is_key))
    first, is_key = packets[0]
    place = min(first.index(mark) for mark in (_GROUP, _FRAME) if mark in first)
    packets[0] = first[:place] + b"\0\0\1\xb2DivX503b1393p" + first[place:], is_key
    stream = io.BytesIO()
    with av.open(stream, "w", format="avi") as output:
        track = output.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = 48, 32, "yuv420p"
        output.start_encoding()
        for number, (data, is_key) in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.is_keyframe, packet.duration = track, is_key, 1
            packet.pts = packet.dts = number
            packet.time_base = Fraction(1, 10)
            output.mux(packet)
    return stream.getvalue()


_FRAME, _GROUP = b"\0\0\1\xb6", b"\0\0\1\xb3"
_NOTHING_NEW = _FRAME + bytes([0b01_0_1_0000, 0b1_0_011111])
"""A predicted frame that is not coded; its time, four bits, is read by nobody."""


def _kind(data: bytes) -> str:
    return "IPBS"[data[data.index(_FRAME) + len(_FRAME)] >> 6]


def _mpeg4(num_frames: int) -> list[tuple[bytes, bool]]:
    """Packets of `moving` in the order in which they are stored, and whether each is a key frame."""
    import av

    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 48, 32, "yuv420p"
    encoder.framerate, encoder.time_base, encoder.gop_size = 10, Fraction(1, 10), 12
    encoder.options = {"bf": "1", "flags": "+bitexact"}
    packets = []
    for number, pixels in enumerate(moving(num_frames)):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1, 10)
        packets += encoder.encode(frame)
    packets += encoder.encode()
    return [(bytes(packet), _kind(bytes(packet)) == "I") for packet in packets]


def damaged(mp4: bytes, count: int, seed: int) -> bytes:
    """`count` bytes of the frames changed; headers, tables and the first tenth are left alone."""
    rng, found = np.random.default_rng(seed), bytearray(mp4)
    begin, end = mp4.index(b"mdat"), mp4.rindex(b"moov") - 4
    for place in rng.integers(begin + (end - begin) // 10, end, count):
        found[place] ^= int(rng.integers(1, 256))
    return bytes(found)
