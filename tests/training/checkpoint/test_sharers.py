"""Ranks share the reading of files if they see the same files, whatever the names of their folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacp.distributed.grid import single_axis
from megacp.storage.place import Place
from megacp.storage.url import Url
from megacp.training.checkpoint import outcome
from megacp.training.checkpoint.outcome import sharers


def stated(files: list[Place], monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a rank's report about its files to the other ranks."""
    said: list[object] = []
    monkeypatch.setattr(outcome, "gather_objects", lambda own, world: said.append(own) or [own])
    assert sharers(files, single_axis("world")) == [0]
    return said[0]


def test_a_file_that_only_one_rank_sees_in_a_shared_folder_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container can mount another file over one in the folder, whose inode stays the same."""
    files: list[Place] = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        Path(str(path)).write_text("same")
    number, before = tmp_path.stat().st_ino, stated(files, monkeypatch)
    assert stated(files[::-1], monkeypatch) == before
    (tmp_path / "new").write_text("same")
    (tmp_path / "new").rename(tmp_path / "b")
    assert tmp_path.stat().st_ino == number and stated(files, monkeypatch) != before


def test_other_names_of_the_same_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other, linked = (tmp_path / name for name in ("folder", "other", "linked"))
    folder.mkdir()
    other.mkdir()
    (folder / "a").write_text("same")
    os.link(folder / "a", other / "a")
    linked.symlink_to(folder)
    before = stated([folder / "a"], monkeypatch)
    assert stated([other / "a"], monkeypatch) == stated([linked / "a"], monkeypatch) == before
    (other / "a").unlink()
    (other / "a").write_text("same")
    assert stated([other / "a"], monkeypatch) != stated([folder / "a"], monkeypatch), "a copy"
    assert stated([folder / "none"], monkeypatch) != before


def test_equal_numbers_on_two_machines_are_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("same")
    before = stated([tmp_path / "a"], monkeypatch)
    remote = stated([Url("s3://bucket/a")], monkeypatch)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert stated([tmp_path / "a"], monkeypatch) != before
    assert stated([Url("s3://bucket/a")], monkeypatch) == remote, "a store is the same for all"
