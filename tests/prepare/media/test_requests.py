"""Records in the form of Qwen-VL: file:// URLs, sizes and frames of an image or a video."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.documents import Placed, RecordPart
from megacp.prepare.records.record import RecordError, RecordRules
from megacp.prepare.records.sample import parse_record
from megacp.training.data.vision.rules import VisionRules
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.media.test_qwen3_5_rules import SMALL

pytest.importorskip("av")
RULES = RecordRules(media=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with an image of 100 x 50 pixels and a video of 2 s with 20 frames."""
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a b.png").write_bytes(encoded(noise(100, 50)))
    (folder / "c%20d.png").write_bytes(encoded(noise(100, 50)))
    (folder / "v.mp4").write_bytes(video(20))
    (tmp_path / "secret.png").write_bytes(encoded(noise(9, 9)))
    return folder


def expand(
    part: dict[str, Any], root: Path, vision: VisionRules = SMALL, rules: RecordRules = RULES
) -> tuple[RecordPart, ...]:
    """Return the parts of a record with one image or video."""
    pieces = parse_record({"content": [part]}, rules).prefix
    return MediaReader(vision, str(root)).expand(pieces, {}, [])


def units(parts: tuple[RecordPart, ...]) -> list[Placed]:
    return [part for part in parts if isinstance(part, Placed)]


# ---- file:// URLs


@pytest.mark.parametrize("name", ["ROOT/a b.png", "ROOT/a%20b.png", "localhostROOT/a b.png"])
@pytest.mark.parametrize("key", ["image", "path", "url", "image_url"])
def test_a_file_url_is_the_local_path(root: Path, name: str, key: str) -> None:
    url = "file://" + name.replace("ROOT", str(root))
    kind = "image_url" if key == "image_url" else "image"
    (unit,) = units(expand({"type": kind, key: url}, root))
    assert unit.layout is SMALL.layout_of_image(100, 50)


def test_a_name_with_an_escape_is_read_as_it_is(root: Path) -> None:
    assert units(expand({"type": "image", "image": f"file://{root}/c%20d.png"}, root))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file://ROOT/none.png", "no such file under --image-root"),
        ("file://ROOT/../secret.png", "climbs with `..`"),
        ("file://ROOT/%2e%2e/secret.png", "climbs with `..`"),
        ("file:///etc/passwd", "is a URL or an absolute path; allowed are"),
    ],
)
def test_a_file_url_stays_inside_the_root(root: Path, url: str, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        expand({"type": "image", "image": url.replace("ROOT", str(root))}, root)


# ---- sizes and frames

IMAGE = {"type": "image", "image": "a b.png"}
VIDEO = {"type": "video", "video": "v.mp4"}
FOLLOWED: list[dict[str, Any]] = [
    {**IMAGE, "min_pixels": 10, "max_pixels": 6000},
    {**IMAGE, "max_pixels": 5000.0},
    {**IMAGE, "min_pixels": None, "max_pixels": None},
    {**IMAGE, "resized_height": 48, "resized_width": 98},
    {**VIDEO, "fps": 2},
    {**VIDEO, "nframes": 4, "fps": 2.0},
    {**VIDEO, "min_pixels": 500, "max_pixels": 7500},
    {**VIDEO, "max_pixels": 7500},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {**IMAGE, "max_pixels": 1000},
        r"`max_pixels` 1000 would resize it from 100 x 50 to 40 x 16 pixels, but the build resizes "
        r"it to 96 x 48.*set --resize-pixels for all records, or remove `max_pixels` "
        r"\(--ignore-keys max_pixels\)",
    ),
    (
        {**IMAGE, "min_pixels": 20_000, "max_pixels": 40_000},
        r"`min_pixels` 20000 and `max_pixels` 40000 would .*--ignore-keys min_pixels,max_pixels",
    ),
    (
        {**IMAGE, "resized_height": 24, "resized_width": 24},
        "`resized_width` 24 and `resized_height` 24 would .* to 24 x 24 .*resize the file itself",
    ),
    (
        {**IMAGE, "resized_height": 24},
        "has only `resized_height`; give both",
    ),
    (
        {**IMAGE, "max_pixels": "1000"},
        r"content\[0\].max_pixels` is a string, but it must be above 0",
    ),
    ({**IMAGE, "max_pixels": 0}, r"`content\[0\].max_pixels` is a number \(0\)"),
    ({**IMAGE, "fps": 2}, "`fps` is unknown here and would be lost"),
    (
        {**VIDEO, "fps": 6.0},
        r"`fps` 6 would take 12 of its 20 frames, but the build takes 4.*set --video-fps 6 for all "
        r"records, or remove `fps` \(--ignore-keys fps\)",
    ),
    ({**VIDEO, "nframes": 8}, "`nframes` 8 would take 8 of its 20 frames.*set --max-frames 8"),
    ({**VIDEO, "max_pixels": 300}, "`max_pixels` 300 would .*set --video-resize-pixels"),
    ({**VIDEO, "video": ["a.png", "b.png"]}, "is a list of frames.*join the frames"),
]


@pytest.mark.parametrize("part", FOLLOWED)
def test_a_request_with_the_result_of_the_rules_is_followed(
    root: Path, part: dict[str, Any]
) -> None:
    plain = {key: part[key] for key in ("type", part["type"])}
    found = [unit.layout for unit in units(expand(part, root))]
    assert found == [unit.layout for unit in units(expand(plain, root))]


@pytest.mark.parametrize(("part", "reason"), REFUSED)
def test_a_request_with_another_result_is_refused_with_advice(
    root: Path, part: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecordError, match=reason):
        expand(part, root)


def test_an_ignored_request_is_left_out(root: Path) -> None:
    rules = RecordRules(media=True, ignore_keys=("max_pixels",))
    assert units(expand({**IMAGE, "max_pixels": 1000}, root, rules=rules))


def test_a_family_of_crops_has_no_size_to_request(root: Path) -> None:
    reason = "`max_pixels` 5000: the rules of molmo2 do not resize to a size; remove `max_pixels`"
    with pytest.raises(RecordError, match=reason):
        expand({**IMAGE, "max_pixels": 5000}, root, TINY)
    assert len(units(expand({**VIDEO, "fps": 4}, root, TINY))) == 8


def test_a_request_at_a_placeholder_applies_to_the_image_of_the_record(root: Path) -> None:
    asked = {"type": "image", "max_pixels": 1000}
    record = {
        "images": ["a b.png"],
        "messages": [
            {"role": "user", "content": [asked, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A cat."},
        ],
    }
    pieces = parse_record(record, RULES).prefix
    with pytest.raises(RecordError, match="`max_pixels` 1000 would resize it"):
        MediaReader(SMALL, str(root)).expand(pieces, {}, [])


# ---- images in the text


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("key", ["value", "content"])
def test_the_first_form_of_qwen_vl_is_refused_with_a_command_that_works(
    tmp_path: Path, media: bool, key: str
) -> None:
    role = "from" if key == "value" else "role"
    record = {
        "conversations": [
            {
                role: "user",
                key: "Picture 1: <img>a.jpg</img>\nPicture 2: <img>b/c.jpg</img>\nSame?",
            },
            {role: "assistant", key: "No."},
        ]
    }
    reason = r"`conversations\[0\]` names an image as '<img>a.jpg</img>'"
    with pytest.raises(RecordError, match=reason) as refused:
        parse_record(record, RecordRules(media=media))
    assert parse_record(record, RecordRules(ignore_keys=("<img>",))).talks
    command = re.search("jq -c '(.*)' FILE", str(refused.value))
    assert command is not None
    (tmp_path / "old.jsonl").write_text(json.dumps(record))
    done = subprocess.run(
        ["jq", "-c", command[1], tmp_path / "old.jsonl"], capture_output=True, text=True, check=True
    )
    converted = json.loads(done.stdout)
    assert converted["images"] == ["a.jpg", "b/c.jpg"]
    sample = parse_record(converted, RULES)
    named = [piece.media.value for piece in sample.prefix if piece.media is not None]
    assert named == ["a.jpg", "b/c.jpg"]


def test_a_plain_text_about_tags_is_kept_in_a_build_without_images() -> None:
    record = {"text": "XML has <img>a.jpg</img>"}
    assert parse_record(record).prefix[0].text == record["text"]
    with pytest.raises(RecordError, match="`text` names an image"):
        parse_record(record, RULES)
    pair = {"prompt": "See <img>a.jpg</img>", "completion": "A cat."}
    with pytest.raises(RecordError, match="`prompt` names an image"):
        parse_record(pair)
