"""The manifest: its own checksum, and what it says of damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp.checkpoint.manifest import MANIFEST_FILE, Manifest, damage, hash_file, read_manifest, to_json


def written(folder: Path) -> Manifest:
    (folder / "data").write_bytes(b"0123456789")
    manifest = Manifest(
        7, 3, 4, {"tp": 2, "dp": 2}, {"data": hash_file(folder / "data")}, {"samples": 12, "by": {"1": 2}}
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
    assert damage(tmp_path, files, ["data"]) == []
    (tmp_path / "data").write_bytes(b"012345678")
    assert "has 9 bytes, the manifest says 10" in damage(tmp_path, files, ["data"])[0]
    (tmp_path / "data").write_bytes(b"0123456788")
    assert "sha256" in damage(tmp_path, files, ["data"])[0]
    (tmp_path / "data").unlink()
    assert "cannot be read" in damage(tmp_path, files, ["data"])[0]
