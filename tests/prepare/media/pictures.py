"""Small generated images and videos for tests."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

from megacp.training.data.vision.molmo2 import Molmo2Rules


class WordTokenizer:
    """A minimal tokenizer whose image tokens get ids from 257."""

    vocab_size = 257


TINY = Molmo2Rules(
    image_size=16, patch_size=4, overlap_margins=(1, 1), max_crops=6, max_frames=12, video_fps=4.0
).with_token_ids(WordTokenizer)


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return random pixels, uint8 `[height, width, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image file of `kind`, with Pillow's options."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def moving(num_frames: int, width: int = 48, height: int = 32) -> list[np.ndarray]:
    """Return frames that all differ, uint8 `[height, width, 3]`."""
    frames = []
    for i in range(num_frames):
        frame = np.full((height, width, 3), (i * 5) % 256, np.uint8)
        frame[:, : i % width] = 200
        frames.append(frame)
    return frames


def video(
    num_frames: int,
    container: str = "mp4",
    codec: str = "mpeg4",
    fps: int = 10,
    key_every: int = 5,
    first: int = 0,
    every: int = 1,
) -> bytes:
    """Return a video file of the frames of `moving`.

    Its timestamps begin at `first` and are `every` apart, in units of 1 / `fps` seconds.
    """
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as output:
        track = output.add_stream(codec, rate=fps)
        track.width, track.height = 48, 32
        track.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        track.codec_context.gop_size = key_every
        # write a header even without frames
        output.start_encoding()
        for number, pixels in enumerate(moving(num_frames)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = first + every * number
            frame.time_base = Fraction(1, fps)
            output.mux(track.encode(frame))
        output.mux(track.encode())
    return stream.getvalue()
