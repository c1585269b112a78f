"""Build a dataset from every kind of bad record, image and video in one run.

Each is refused with its reason, and nothing else is lost.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megacp.prepare.verify import verify
from megacp.training.data.reader import PackedDataset
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.media.test_pixels import BAD, exif
from tests.prepare.packs import builds

pytest.importorskip("av")
RULES = dataclasses.replace(TINY, token_ids={}, max_pixels=10_000)
SETTINGS: dict[str, Any] = {
    "image_rules": RULES,
    "seq_length": 1024,
    "max_record_bytes": 200_000,
    "on_error": "skip",
}
SETTINGS["max_crops_per_pack"] = 40


def record(**part: Any) -> bytes:
    """Return a JSON line with an image (or `part`) and a learned word."""
    return json.dumps(
        {"content": [{"type": "image", **part}, {"type": "text", "text": "a"}]}
    ).encode()


def inline(data: bytes, kind: str = "image") -> bytes:
    return record(type=kind, base64=base64.b64encode(data).decode())


def good_lines() -> dict[str, bytes]:
    """Return unusual but valid records; test_image_file checks their contents."""
    cmyk = Image.fromarray(noise(20, 10)).convert("CMYK")
    deep = Image.fromarray(np.arange(200, dtype=np.uint16).reshape(10, 20) * 300)
    return {
        "windows line end": b'{"text": "a line that ends as on Windows"}\r',
        "cmyk": inline(encoded(cmyk, "TIFF")),
        "16 bits": inline(encoded(deep)),
        "rotated": inline(encoded(noise(20, 10), "JPEG", exif=exif(6))),
        "video": inline(video(12), "video"),
        "text": json.dumps({"text": "plain", "id": 1}).encode(),
    }


def bad_lines(root: Path) -> dict[bytes, str]:
    """Return bad lines, each with the text that its reason must contain."""
    whole, small = (
        video(43),
        {"type": "image", "base64": base64.b64encode(encoded(noise(9, 9))).decode()},
    )
    (root / "out.png").symlink_to(root.parent / "secret.png")
    lines = {
        json.dumps({"text": "x" * 200_000}).encode(): "more than --max-record-bytes 200000",
        b'{"text": "\xff"}': "not UTF-8: byte 0xff at column 11",
        b'{"body": "x"}': "missing key: a record needs exactly one of",
        b'{"prompt": "a", "chosen": "b", "rejected": "c"}': "DPO.*--columns completion=chosen --ignore-keys rejected",
        b'{"text": "cut': "invalid JSON",
        json.dumps(
            {"content": [small] * 41}
        ).encode(): "image crops, more than --max-crops-per-pack 40",
        json.dumps(
            {"content": [small], "branches": ["x" * 1100]}
        ).encode(): "with all branches, .* --seq-length 1024",
        record(path="../secret.png"): "climbs with `..`",
        record(path="/etc/passwd"): "absolute",
        record(path="out.png"): "a symbolic link leads out of --image-root",
        record(path="file:///etc/passwd"): "it is a URL",
        record(path="none.png"): "no such file under --image-root",
        inline(video(0, "matroska"), "video"): "video is truncated or damaged",
        inline(whole[: len(whole) // 2], "video"): "the mov video is truncated or damaged",
    }
    (root / "empty.png").write_bytes(b"")
    lines |= {record(path="empty.png"): BAD["empty"][1]}
    return lines | {
        inline(data): message for name, (data, message) in BAD.items() if name != "empty"
    }


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_bad_record_has_its_own_reason_and_all_others_are_stored(
    tmp_path: Path, workers: int
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(noise(9, 9)))
    good, bad = list(good_lines().values()), bad_lines(root)
    lines, sound = [*good], list(range(len(good)))
    for line in bad:  # a valid record follows each bad one
        sound.append(len(lines) + 1)
        lines += [line, json.dumps({"text": f"after {len(lines)}"}).encode()]
    offsets = np.cumsum([0, *(len(line) + 1 for line in lines)])
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(b"".join(line + b"\n" for line in lines))
    built = tmp_path / "d"
    builds.run(
        [corpus],
        built,
        image_root=str(root),
        workers=workers,
        unit_bytes=400_000 // workers,
        **SETTINGS,
    )
    assert verify(built) == []
    rejects = [json.loads(line) for line in (built / "rejects.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [
        len(good) + 1 + 2 * number for number in range(len(bad))
    ]
    for reject, message in zip(rejects, bad.values(), strict=True):
        assert re.search(message, reject["reason"]), (reject, message)
    assert len({reject["reason"] for reject in rejects}) == len(bad)
    dataset = PackedDataset(built)
    stored = [
        int(offset)
        for i in range(len(dataset))
        for offset in dataset.pack(i).segments["source_offset"]
    ]
    assert sorted(stored) == offsets[sound].tolist()


def test_a_cut_gz_and_a_tar_with_a_member_outside_lose_nothing_that_is_whole(
    tmp_path: Path,
) -> None:
    picture = encoded(noise(9, 9))
    members = {
        "a/1.json": record(member="png"),
        "a/1.png": picture,
        "../2.txt": b"out",
        "z.txt": b"last",
    }
    with tarfile.open(tmp_path / "w.tar", "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    lines = b"".join(inline(encoded(noise(20, 20, i))) + b"\n" for i in range(30))
    packed = gzip.compress(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    builds.run([tmp_path / "w.tar", tmp_path / "c.jsonl.gz"], tmp_path / "d", **SETTINGS)
    rejects = [json.loads(line) for line in (tmp_path / "d/rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == 2 and "outside the archive" in rejects[0]["reason"]
    assert "truncated" in rejects[1]["reason"]
    dataset = PackedDataset(tmp_path / "d")
    sources = [int(s) for i in range(len(dataset)) for s in dataset.pack(i).segments["source_file"]]
    assert sources.count(0) == 2 and sources.count(1) == rejects[1]["line"] - 1 > 5


@pytest.mark.parametrize("name", ["images.bin", "images.idx", "units.npy", "shards_cp2.npy"])
def test_a_cut_file_of_images_is_named_at_open(tmp_path: Path, name: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(inline(encoded(noise(20, 20))) + b"\n")
    builds.run([corpus], tmp_path / "d", **SETTINGS)
    path = tmp_path / "d/shard_00000" / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        ValueError, match=rf"shard_00000/{name}: {size - 1} bytes, the manifest says {size}"
    ):
        PackedDataset(tmp_path / "d")
