"""The benchmark of reading from a store: the same packs on a disk and at a URL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megacp.core.storage.url import Url
from tests.data.datasets import random_packs, write_dataset
from tests.storage.stores import memory
from tools import bench_store


def stored(folder: Path) -> Url:
    url = memory()
    for path in folder.rglob("*"):
        if path.is_file():
            (url / path.relative_to(folder).as_posix()).upload(path)
    return url


def test_disk_and_store_are_read_by_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "packs", [random_packs(np.random.default_rng(0), 3)])
    flags = ["--block-mib", "1", "64", "--json", str(tmp_path / "figures.json")]
    assert bench_store.main([str(tmp_path / "packs"), str(stored(tmp_path / "packs")), *flags]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["first_and_later"]) == ["disk", "blocks of 1 MiB", "blocks of 64 MiB"]
    assert all(speed > 0 for pair in figures["first_and_later"].values() for speed in pair)
    assert [goal["limit"] for goal in figures["goals"]] == [0.8]
    assert "over the disk" in capsys.readouterr().out


def test_another_dataset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a ratio of two different things."""
    for name, count in (("one", 3), ("two", 4)):
        write_dataset(tmp_path / name, [random_packs(np.random.default_rng(0), count)])
    with pytest.raises(SystemExit):
        bench_store.main([str(tmp_path / "one"), str(stored(tmp_path / "two"))])
    assert "are not the same dataset" in capsys.readouterr().err
