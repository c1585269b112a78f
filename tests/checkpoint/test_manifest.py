"""The manifest: its own checksum, and what it says of damaged files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.checkpoint.commit import load_checkpoint, peek
from megacp.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointManifest,
    FileRecord,
    checksum_of,
    damage,
    read_manifest,
    to_json,
)
from megacp.core.storage.files import sha256_of
from tests.checkpoint.test_commit import WORLD, save
from tests.test_files import odd_file


def written(folder: Path) -> CheckpointManifest:
    (folder / "data").write_bytes(b"0123456789")
    manifest = CheckpointManifest(
        7, 3, 4, {"tp": 2, "dp": 2}, {"data": FileRecord(*sha256_of(folder / "data"))}, {"samples": 12, "by": {"1": 2}}
    )
    (folder / MANIFEST_FILE).write_text(to_json(manifest))
    return manifest


def test_a_manifest_comes_back_equal(tmp_path: Path) -> None:
    """Would catch a field that is not written."""
    manifest = written(tmp_path)
    assert read_manifest(tmp_path) == manifest


def test_every_flipped_digit_of_the_manifest_is_found(tmp_path: Path) -> None:
    """Would catch a manifest without a checksum: a flipped bit in `step` would load silently wrong."""
    written(tmp_path)
    text = (tmp_path / MANIFEST_FILE).read_text()
    for place in [i for i, c in enumerate(text) if c.isdigit()]:
        flipped = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        (tmp_path / MANIFEST_FILE).write_text(flipped)
        with pytest.raises(ValueError, match=MANIFEST_FILE):
            read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"step": 1}', "\x00\x01"])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    """Would catch a KeyError or a JSON error as the user's message."""
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{MANIFEST_FILE} is damaged"):
        read_manifest(tmp_path)


def test_truncation_deletion_and_a_flipped_bit_are_told_apart(tmp_path: Path) -> None:
    """Would catch a check of sizes alone."""
    files = written(tmp_path).files
    assert damage(tmp_path, files, ["data"]) == {}
    (tmp_path / "data").write_bytes(b"012345678")
    assert "has 9 bytes, expected 10" in damage(tmp_path, files, ["data"])["data"]
    (tmp_path / "data").write_bytes(b"0123456788")
    assert "sha256" in damage(tmp_path, files, ["data"])["data"]
    (tmp_path / "data").unlink()
    assert "cannot be read" in damage(tmp_path, files, ["data"])["data"]


_FILE = {"size": 1, "sha256": "0" * 64}
WRONG: dict[str, dict[str, Any]] = {
    "a file above": {"files": {"../x": _FILE}},
    "the folder above": {"files": {"..": _FILE}},
    "a whole path": {"files": {"/etc/passwd": _FILE}},
    "a NUL byte": {"files": {"a\0b": _FILE}},
    "a size in words": {"files": {"x": {**_FILE, "size": "1"}}},
    "a hash that is none": {"files": {"x": {**_FILE, "sha256": 7}}},
    "a serial in words": {"serial": "9"},
    "a step that is true": {"step": True},
    "a grid in a list": {"grid": [1]},
    "extra state in a list": {"extra": []},
    "a step of thirty digits": {"step": 10**30},
    "a step below zero": {"step": -5},
    "half a step": {"step": 1.5},
    "no step": {"step": None},
    "a serial after which there is none": {"serial": 2**53 + 1},
    "an axis of no ranks in words": {"grid": {"tp": "2"}},
    "files in a list": {"files": [1]},
    "a file that is none": {"files": {"x": 1}},
    "a file name of half a letter": {"files": {"\ud800": _FILE}},
    "a file name over two lines": {"files": {"a\nb": _FILE}},
    "a format in words": {"format": "1"},
    "a format of the future": {"format": 3},
}
FIELDS = {
    "a step of thirty digits": "`step` is 1000.*000, it must be an integer of 0 to 9007199254740992",
    "no step": "`step` is None, it must",
    "a serial in words": "`serial` is '9', it must",
    "an axis of no ranks in words": "`grid.tp` is '2', it must",
    "a file that is none": "`files.x` is 1, it must be an object",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_manifest_with_a_right_checksum_is_not_trusted_for_that(kind: str, tmp_path: Path) -> None:
    """Would catch files read outside the folder, and a TypeError in place of the earlier checkpoint."""
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    content = {**json.loads((newest / MANIFEST_FILE).read_text()), **WRONG[kind]}
    content.pop("checksum")
    (newest / MANIFEST_FILE).write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    with pytest.raises(ValueError, match=f"{MANIFEST_FILE} is damaged: {FIELDS.get(kind, '')}"):
        read_manifest(newest)
    assert load_checkpoint(tmp_path, WORLD).path == older


def test_a_checkpoint_of_an_earlier_format_says_what_to_do(tmp_path: Path) -> None:
    """Would catch a run that takes a whole checkpoint for a damaged one, or starts without it."""
    folder = save(tmp_path, 1)
    content = {**json.loads((folder / MANIFEST_FILE).read_text()), "format": 1}
    content.pop("checksum")
    (folder / MANIFEST_FILE).write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    with pytest.raises(ValueError, match=r"has format 1, .*; this version reads format 2: finish the run with the ver"):
        load_checkpoint(tmp_path, WORLD)
    with pytest.raises(ValueError, match=r"has format 1, .*; this version reads format 2: finish the run with the ver"):
        peek(tmp_path)
    newer = save(tmp_path, 2)
    found = peek(tmp_path)
    assert found is not None and found[0] == newer


def test_a_manifest_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / MANIFEST_FILE).write_text('{"extra": ' + "[" * 100_000)
    assert load_checkpoint(tmp_path, WORLD).path == older


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["6", "\ud800", ".."]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_any_value_in_any_field_is_a_manifest_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Would catch a TypeError, an OverflowError or an AttributeError of a value that nobody thought of."""
    folder = tmp_path_factory.getbasetemp()
    manifest = CheckpointManifest(7, 3, 4, {"tp": 2}, {"data": FileRecord(1, "0" * 64)}, {"step": 7})
    content = json.loads(to_json(manifest))
    content.pop("checksum")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([content, content["files"], content.get("extra")]))
        if isinstance(place, dict):
            place[data.draw(st.sampled_from(list(content) + ["data", "x", "a/b"]))] = data.draw(_VALUES)
    (folder / MANIFEST_FILE).write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    try:
        found = read_manifest(folder)
    except ValueError as error:
        assert str(error).startswith(str(folder / MANIFEST_FILE)) and str(error).isprintable()
        return
    assert all(type(value) is int and 0 <= value <= 2**53 for value in (found.step, found.serial, found.world_size))
    assert all(type(record.size) is int for record in found.files.values())


def test_a_manifest_that_could_not_be_read_again_is_not_written() -> None:
    """Would catch a checkpoint that is committed and then found damaged: NaN, a number without an end."""
    manifest = CheckpointManifest(7, 3, 4, {}, {})
    for change in ({"extra": {"loss": float("nan")}}, {"step": 2**60}, {"grid": {"tp": -1}}):
        with pytest.raises(ValueError):
            to_json(dataclasses.replace(manifest, **change))


@pytest.mark.parametrize("name", ["a named pipe", "a directory", "a device"])
def test_a_manifest_that_is_no_regular_file_is_named_by_its_kind(tmp_path: Path, name: str) -> None:
    """Would catch a reader that waits for a pipe, or for the end of /dev/zero."""
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / MANIFEST_FILE).unlink()
    odd_file(name, newest / MANIFEST_FILE)
    with pytest.raises(ValueError, match=f"{MANIFEST_FILE} is {name}, no regular file"):
        read_manifest(newest)
    assert load_checkpoint(tmp_path, WORLD).path == older
