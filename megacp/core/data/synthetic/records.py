"""Text and photos as JSONL, to measure the preprocessor on: Python's own sources, and photo-like noise."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import numpy as np


def write_text(path: Path, megabytes: float) -> tuple[int, list[str]]:
    """The standard library's sources as JSONL, over and over up to the size; bytes of text and the first texts."""
    texts, size = [], 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = "" if "site-packages" in source.parts else source.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts.append(text)
            size += len(text.encode())
        if size > megabytes * 1e6:
            break
    copies = max(1, math.ceil(megabytes * 1e6 / size))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) * copies, encoding="utf-8")
    return size * copies, texts


def write_photos(folder: Path, count: int) -> Path:
    """Photo-like PNG and JPEG files of 480 to 1,024 pixels with some detail, and the JSONL that names them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    lines = []
    for number in range(count):
        width, height = (int(side) for side in rng.integers(480, 1_025, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height))
        grain = rng.integers(-6, 7, (height, width, 1), dtype=np.int16)
        pixels = Image.fromarray(np.clip(np.asarray(coarse, np.int16) + grain, 0, 255).astype(np.uint8))
        name = f"{number}.{'png' if number % 4 == 0 else 'jpg'}"
        pixels.save(folder / "photos" / name, quality=90)
        record = {"content": [{"type": "image", "path": name}], "branches": ["what is it? a photo", "where? here"]}
        lines.append(json.dumps(record) + "\n")
    (folder / "photos.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "photos.jsonl"


def write_videos(folder: Path, count: int) -> Path:
    """MP4 files of 8 s in which light moves, 640 x 360 pixels 24 times a second, and the JSONL that names them."""
    import av

    rng = np.random.default_rng(0)
    (folder / "videos").mkdir()
    lines = []
    for number in range(count):
        still = rng.integers(0, 256, (9, 16, 3), dtype=np.uint8).repeat(40, 0).repeat(40, 1)
        with av.open(str(folder / "videos" / f"{number}.mp4"), "w") as output:
            track = output.add_stream("mpeg4", rate=24)
            track.width, track.height, track.pix_fmt = 640, 360, "yuv420p"
            for time in range(8 * 24):
                pixels = np.roll(still, 2 * time, axis=1)
                output.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(track.encode())
        record = {"content": [{"type": "video", "path": f"{number}.mp4"}], "branches": ["what moves? light"]}
        lines.append(json.dumps(record) + "\n")
    (folder / "videos.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "videos.jsonl"
