"""Every way to name an image in a record; files outside the root are never opened."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.documents import Placed, RecordPart
from megacp.prepare.records.record import RecordError, RecordRules, SamplePart
from megacp.prepare.records.sample import parse_record
from megacp.training.data.vision.molmo2 import frame_layout, image_layout
from megacp.training.data.vision.rules import ImageError
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.storage.web_server import bad_server
from tests.training.data.streams import coded, damaged

pytest.importorskip("av")
PICTURE = encoded(noise(30, 20))
GREY = damaged(coded(40, "libx264", {}, "mp4", (160, 96), "yuv420p"), 20, 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a.png").write_bytes(PICTURE)
    (folder / "v.mp4").write_bytes(video(30))
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "in.png").symlink_to("sub/a.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "round.png").symlink_to("round.png")
    return folder


def expand(
    content: list[dict[str, Any]],
    root: Path | None,
    members: dict[str, bytes] | None = None,
    **changes: Any,
) -> tuple[tuple[RecordPart, ...], list[bytes]]:
    """Expand a record's content, in which "ROOT" is the path of `root`; return parts and items."""
    found = []
    for part in content:
        part = dict(part)
        for key, value in part.items():
            if isinstance(value, str):
                part[key] = value.replace("ROOT", str(root))
        found.append(part)
    pieces = parse_record({"content": found}, RecordRules(media=True)).prefix
    items: list[bytes] = []
    reader = MediaReader(dataclasses.replace(TINY, **changes), None if root is None else str(root))
    return reader.expand(pieces, members or {}, items), items


@pytest.mark.parametrize(
    "part",
    [
        {"path": "sub/a.png"},
        {"image": "./sub//a.png"},
        {"path": "ROOT/sub/a.png"},
        {"path": "in.png"},
        {"base64": base64.b64encode(PICTURE).decode()},
        {"base64": "data:image/png;base64," + base64.encodebytes(PICTURE).decode(), "path": None},
        {"bytes": PICTURE},
        {"member": "png"},
        {"member": "d/1.png"},
    ],
)
def test_an_image_may_be_given_in_every_way(root: Path, part: dict[str, Any]) -> None:
    content = [
        {"type": "text", "text": "see "},
        {"type": "image", **part},
        {"type": "text", "text": "!"},
    ]
    (text, placed, after, end), items = expand(content, root, {"d/1.png": PICTURE})
    assert (
        (text, after) == (SamplePart("see ", 1.0), SamplePart("!", 1.0))
        and isinstance(end, SamplePart)
        and end.is_end
    )
    assert (
        isinstance(placed, Placed) and items == [PICTURE] and (placed.item, placed.frame) == (0, -1)
    )
    assert placed.layout.tokens.tolist() == image_layout(30, 20, TINY).tokens.tolist()


def test_a_video_is_its_frames_with_their_times_between(root: Path) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "now"}, {"type": "video", "path": "v.mp4"}],
        }
    ]
    pieces = parse_record({"messages": messages}, RecordRules(media=True)).prefix
    items: list[bytes] = []
    parts = MediaReader(TINY, str(root)).expand(pieces, {}, items)
    texts = [part.text for part in parts if isinstance(part, SamplePart)]
    # the first time joins the text before it, as in a written prompt
    assert texts[:4] == ["<|user|>\n", "now0.0 ", " 0.2 ", " 0.5 "]
    placed = [part for part in parts if isinstance(part, Placed)]
    assert [part.frame for part in placed] == list(range(12)) and {
        part.item for part in placed
    } == {0}
    assert len(items) == 1 and all(part.layout is frame_layout(TINY) for part in placed)
    assert not any(part.weight for part in parts if isinstance(part, SamplePart))


BAD_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "climbing": (
        {"path": "../secret.png"},
        r"`content\[0\].path` '../secret.png': the path climbs with `..`",
    ),
    "climbing within": ({"path": "sub/../../secret.png"}, "climbs with `..`"),
    "absolute": ({"path": "/etc/passwd"}, "absolute"),
    "absolute link": ({"path": "ROOT/out.png"}, "it is a URL or an absolute path"),
    "absolute climbing": ({"path": "ROOT/../secret.png"}, "climbs with `..`"),
    "file url": (
        {"path": "file:///etc/passwd"},
        "it is a URL or an absolute path.*--image-urls",
    ),
    "short file url": ({"path": "file:/etc/passwd"}, "it is a URL"),
    "web url": ({"path": "https://example.org/a.png"}, "it is a URL"),
    "data url as a path": (
        {"path": "data:image/png;base64," + "A" * 1000},
        "750 bytes are not a file of type Jpeg",
    ),
    "url key": (
        {"url": "https://example.org/a.png"},
        "it is a URL or an absolute path.*--image-urls",
    ),
    "link to a file": ({"path": "out.png"}, "a symbolic link leads out of --image-root"),
    "link to a folder": ({"path": "up/secret.png"}, "a symbolic link leads out of --image-root"),
    "missing": ({"path": "none.png"}, "no such file under --image-root"),
    "folder": ({"path": "sub"}, "'sub': it is a directory, not a regular file"),
    "pipe": ({"path": "pipe.png"}, "'pipe.png': it is a named pipe, not a regular file"),
    "file as a folder": ({"path": "sub/a.png/b"}, "no such file under --image-root"),
    "device": ({"path": "zero.png"}, "a symbolic link leads out of --image-root"),
    "links in a circle": (
        {"path": "round.png"},
        "it cannot be read .Too many levels of symbolic links",
    ),
    "long name": ({"path": "a" * 300}, "it cannot be read .File name too long"),
    "half a character": ({"path": "a\ud800.png"}, "half of a surrogate pair"),
    "damaged video": (
        {"type": "video", "path": "grey.mp4"},
        "grey.mp4': the video is damaged: its frame at",
    ),
    "zero byte": ({"path": "a\0.png"}, "it is a URL or an absolute path"),
    "empty path": ({"path": ""}, r"`content\[0\].path` is empty"),
    "no text": ({"path": 5}, r"`content\[0\].path` is a number \(5\), but it must be a string"),
    "not base64": ({"base64": "%%%"}, r"`content\[0\].base64`: it is not base64"),
    "empty base64": ({"base64": "data:image/png;base64,"}, "0 bytes are not a file of type Jpeg"),
    "base64 of text": ({"base64": "aGVsbG8="}, "of type Jpeg, Png"),
    "member elsewhere": ({"member": "../x.png"}, "the record has no such member; it has d/1.png"),
    "bytes as text": ({"bytes": "abc"}, "must be bytes"),
    "nothing": ({}, "needs exactly one of path, base64, member, bytes, .*none"),
    "two": ({"path": "a", "base64": "b"}, "needs exactly one of .*; it has path, base64"),
    "an image as video": (
        {"type": "video", "path": "bad.mp4"},
        "bad.mp4': the mov video is truncated or damaged",
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_a_bad_part_is_refused_with_its_place_and_reason(root: Path, name: str) -> None:
    part, message = BAD_PARTS[name]
    whole = (root / "v.mp4").read_bytes()
    (root / "bad.mp4").write_bytes(whole[: len(whole) // 2])
    (root / "grey.mp4").write_bytes(GREY)
    with pytest.raises(RecordError, match=message):
        expand([{"type": "image", **part}], root, {"d/1.png": PICTURE})


def test_a_link_that_is_exchanged_while_it_is_read_leads_nowhere(root: Path) -> None:
    """A thread keeps replacing a file in the root by a link to an outside file, and back."""
    (root.parent / "secret.png").write_bytes(b"a secret")
    changing, new = root / "changing.png", root / "new"
    changing.write_bytes(PICTURE)
    stopped = threading.Event()

    def exchange() -> None:
        while not stopped.is_set():
            new.symlink_to(root.parent / "secret.png")
            new.rename(changing)
            new.write_bytes(PICTURE)
            new.rename(changing)

    reader = MediaReader(TINY, str(root))
    thread = threading.Thread(target=exchange)
    thread.start()
    found: set[bytes] = set()
    try:
        for _ in range(1500):
            with contextlib.suppress(ImageError):
                found.add(reader._from_path("changing.png"))
    finally:
        stopped.set()
        thread.join()
    assert found == {PICTURE}


@pytest.mark.parametrize("part", ["sub", "sub/a.png"])
def test_a_link_that_replaces_a_file_after_the_check_is_not_followed(
    root: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = os.path.realpath
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "a.png").write_bytes(PICTURE)

    def exchanged_after(path: str) -> str:
        answer = resolved(path)
        (root / part).rename(root / "before")
        (root / part).symlink_to(outside if part == "sub" else outside / "a.png")
        return answer

    reader = MediaReader(TINY, str(root))
    monkeypatch.setattr("megacp.prepare.media.reader.os.path.realpath", exchanged_after)
    with pytest.raises(ImageError, match="Too many levels of symbolic links|no such file"):
        reader._from_path("sub/a.png")


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_file_above_its_bound_is_refused_with_the_flag(root: Path, kind: str) -> None:
    limits = {"image": 1 << 20, "video": 1 << 20, kind: 100}
    reader = MediaReader(TINY, str(root), (), limits)
    with pytest.raises(
        ImageError, match=f"it has more than 100 bytes: --max-{kind}-bytes N allows more"
    ):
        reader._from_path("sub/a.png", kind)
    with bad_server() as server:
        reader = MediaReader(TINY, None, [server.url], limits)
        with pytest.raises(
            ImageError, match=f"it has more than 100 bytes: --max-{kind}-bytes N allows more"
        ):
            reader._from_path(f"{server.url}/endless.png", kind)
        with pytest.raises(ImageError, match=r"it has more than 1,048,576 bytes"):
            reader._from_path(
                f"{server.url}/endless.png", {"image": "video", "video": "image"}[kind]
            )
    assert server.sent < 64 << 20  # including the buffers of the sockets
