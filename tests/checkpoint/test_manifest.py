"""The manifest: its own checksum, and what it says of damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import (
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
    assert damage(tmp_path, files, ["data"]) == []
    for harm, reason in ((b"012345678", "has 9 bytes, expected 10"), (b"0123456788", "sha256"), (None, "cannot be")):
        (tmp_path / "data").write_bytes(harm) if harm else (tmp_path / "data").unlink()
        (line,) = damage(tmp_path, files, ["data"])
        assert reason in line and str(tmp_path / "data") in line


WRONG: dict[str, dict[str, Any]] = {
    "a file above": {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
    "a whole path": {"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}},
    "files in a list": {"files": [1]},
    "a format of the future": {"format": 3},
    "an unknown field": {"more": 1},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_manifest_with_a_right_checksum_is_not_trusted_for_that(kind: str, tmp_path: Path) -> None:
    """Would catch files read outside the folder, and a TypeError in place of the earlier checkpoint."""
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    content = {**json.loads((newest / MANIFEST_FILE).read_text()), **WRONG[kind]}
    content.pop("checksum")
    (newest / MANIFEST_FILE).write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    with pytest.raises(ValueError, match=f"{MANIFEST_FILE} is damaged: "):
        read_manifest(newest)
    assert load_checkpoint(tmp_path, WORLD).path == older
