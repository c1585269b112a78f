"""Special files, links, sizes, truncated JSON and locks: each one is refused or handled
immediately.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from megacp.storage import files

pytestmark = pytest.mark.timeout(60)


def odd_file(kind: str, path: Path) -> None:
    """Create something other than a regular file at `path`."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a named pipe", "a directory", "a device"])
def test_what_is_no_regular_file_is_refused_by_its_kind_and_read_by_nobody(
    tmp_path: Path, kind: str
) -> None:
    odd_file(kind, tmp_path / "x")
    for read in (files.open_regular, files.read_regular, files.read_json, files.sha256_of):
        with pytest.raises(ValueError, match=f"x is {kind}, not a regular file"):
            read(tmp_path / "x")


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 5000, "{", ""])
def test_json_without_an_end_or_a_number_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not valid JSON: "):
        files.read_json(tmp_path / "x.json")


def test_a_new_file_and_a_lock_follow_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "link", b"")
    with pytest.raises(ValueError, match="link is a symbolic link, and links are not followed"):
        files.open_own(tmp_path / "link", os.O_RDWR)
    with pytest.raises(ValueError, match="is a symbolic link"):
        files.lock(tmp_path / "link")
    files.write_atomically(tmp_path / "link", b"new")  # replaces the link itself
    assert outside.read_text() == "precious" and (tmp_path / "link").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "outside"]


def test_a_file_of_another_machine_may_be_seen_late_but_not_forever(tmp_path: Path) -> None:
    path = tmp_path / "x"
    threading.Timer(0.3, lambda: files.write_atomically(path, json.dumps(1).encode())).start()
    assert files.seen(lambda: files.read_json(path), seconds=30) == 1
    with pytest.raises(FileNotFoundError):
        files.seen(lambda: files.read_json(tmp_path / "never"), seconds=0.2)


def test_an_atomic_write_never_shows_or_leaves_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.json"
    files.write_atomically(path, b"older")
    with open(path, "rb") as reader:  # a reader would notice a file that is rewritten in place
        files.write_atomically(path, b"old")
        assert reader.read() == b"older"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["m.json"]
