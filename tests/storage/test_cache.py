"""The cache of folders: a copy is used while each of its files has its hash, and is made again
otherwise.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp.storage import cache
from megacp.storage.cache import cache_folder, kept_folder

CONTENT = {"a.json": b'{"a": 1}', "b.bin": bytes(range(64)), "below/c.txt": b"c"}


class Made:
    """Write CONTENT and count the calls."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        for name, content in CONTENT.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_made_once_and_then_taken_from_the_cache(root: Path) -> None:
    made = Made()
    for _ in range(3):
        assert content_of(kept_folder("key", made)) == CONTENT
    assert made.times == 1
    kept_folder("other", made)
    assert made.times == 2
    assert sorted(path.name for path in (root / "folders").iterdir()) == ["key", "other"]


def test_no_flipped_bit_in_the_cache_is_ever_believed(root: Path) -> None:
    made, drawn = Made(), random.Random(0)
    kept_folder("key", made)
    names = [path for path in (root / "folders" / "key").rglob("*") if path.is_file()]
    assert len(names) == len(CONTENT) + 1
    for turn in range(200):
        path = drawn.choice(names)
        content = bytearray(path.read_bytes())
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        assert content_of(kept_folder("key", made)) == CONTENT, (turn, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(kept: Path) -> None:
        _remove(kept)
        make(kept)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda kept: (kept / "files" / "b.bin").unlink(),
    "a file is more": lambda kept: (kept / "files" / "more").write_text("x"),
    "a file is cut": lambda kept: (kept / "files" / "b.bin").write_bytes(CONTENT["b.bin"][:-1]),
    "a file is a folder": lambda kept: _replaced(Path.mkdir)(kept / "files" / "b.bin"),
    "a file is a pipe": lambda kept: _replaced(os.mkfifo)(kept / "files" / "b.bin"),
    "no hashes": lambda kept: (kept / "sha256.json").unlink(),
    "hashes of nothing": lambda kept: (kept / "sha256.json").write_text("{}"),
    "hashes are no object": lambda kept: (kept / "sha256.json").write_text("[1"),
    "an older cache": lambda kept: [
        shutil.rmtree(kept),
        kept.mkdir(),
        (kept / "a.json").write_text("{}"),
    ],
    "an empty folder": _replaced(Path.mkdir),
    "a file in its place": _replaced(Path.touch),
    "a dead link in its place": _replaced(lambda kept: kept.symlink_to("nowhere")),
    "a link to a file in its place": _replaced(lambda kept: kept.symlink_to("/dev/null")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_made_again(name: str, root: Path) -> None:
    made = Made()
    kept_folder("key", made)
    DAMAGES[name](root / "folders" / "key")
    for _ in range(2):
        assert content_of(kept_folder("key", made)) == CONTENT
    assert made.times == 2
    assert [path.name for path in (root / "folders").iterdir()] == ["key"]


@pytest.mark.parametrize("place", ["", "folders"])
def test_a_file_in_the_place_of_the_cache_is_survived_and_kept(place: str, root: Path) -> None:
    made = Made()
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).write_text("mine")
    assert content_of(kept_folder("key", made)) == CONTENT
    assert (root / place).read_text() == "mine"
    (cache_folder("folders") / "x").write_text("can be written")


def test_a_folder_that_cannot_be_made_is_not_kept(root: Path) -> None:
    def failing(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            kept_folder("key", failing)
    assert list((root / "folders").iterdir()) == []


def test_files_are_on_disk_before_the_folder_gets_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def logged_replace(source: str, target: str) -> None:
        replace(source, target)
        done.append(f"renamed {target}")

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    kept_folder("key", Made())
    renamed = done.index(f"renamed {root / 'folders' / 'key'}")
    synced = {Path(path).name for path in done[:renamed]}
    assert {"a.json", "b.bin", "c.txt", "sha256.json", "files", "below"} <= synced
    assert done[renamed + 1 :] == [str(root / "folders")]


def test_processes_that_make_a_folder_at_once_all_get_it(root: Path) -> None:
    together, found = threading.Barrier(4), []

    def make(folder: Path) -> None:
        together.wait(10)
        Made()(folder)

    def use() -> None:
        found.append(content_of(kept_folder("key", make)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [CONTENT] * 4
    assert (
        json.loads((root / "folders" / "key" / "sha256.json").read_text()).keys() == CONTENT.keys()
    )
    assert [path.name for path in (root / "folders").iterdir()] == ["key"]
