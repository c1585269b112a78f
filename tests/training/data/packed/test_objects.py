"""Datasets at URLs: the same packs as on disk, files cached by hash, partial uploads refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megacp.engine.rows.rank import DataRank
from megacp.prepare.describe import statistics
from megacp.prepare.verify import verify
from megacp.storage.url import Url
from megacp.training.data.loader import LoaderOptions, PackedLoader
from megacp.training.data.manifest import MANIFEST_NAME
from megacp.training.data.reader import DataCache, PackedDataset
from tests.storage.stores import flaky, memory, under_flaky
from tests.training.data.datasets import IMAGE_RULES, random_packs, weighted_images, write_dataset


def uploaded(folder: Path, leave_out: str = "") -> Url:
    """Upload a local dataset, except for one file."""
    url = memory()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != leave_out:
            (url / name).upload(path)
    return url


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Write two shards of 20 packs with weights and images."""
    rng = np.random.default_rng(0)
    shards = [weighted_images(rng, 20), weighted_images(rng, 20)]
    write_dataset(tmp_path / "data", shards, image_rules=IMAGE_RULES)
    return tmp_path / "data"


def everything(dataset: PackedDataset) -> list[list[object]]:
    found: list[list[object]] = []
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        images = [pack.images.read(int(unit["item"])) for unit in pack.images.units]
        found.append([pack.tokens.tolist(), pack.weights.tolist(), images, pack.segments.tolist()])
    return found


@pytest.mark.parametrize("gib", [1.0, 0.0], ids=["copied", "by packs"])
def test_packs_and_images_at_a_url_are_those_of_the_disk(
    local: Path, tmp_path: Path, gib: float
) -> None:
    there, here = (
        PackedDataset(uploaded(local), DataCache(tmp_path / "cache", gib)),
        PackedDataset(local),
    )
    assert everything(there) == everything(here)
    assert there.fingerprint == here.fingerprint


def test_statistics_and_verify_read_a_url(local: Path) -> None:
    url = uploaded(local)
    assert verify(url) == []
    assert {**statistics(url), "directory": ""} == {**statistics(local), "directory": ""}
    bin_file = url / "shard_00001" / "tokens.bin"
    data = bin_file.content(1 << 20)
    bin_file.write(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = verify(url)
    assert str(bin_file) in problem


@pytest.mark.parametrize("gib", [1.0, 0.0], ids=["copied", "by packs"])
def test_a_flipped_bit_is_told_when_its_pack_is_read(
    local: Path, tmp_path: Path, gib: float
) -> None:
    url = uploaded(local)
    bin_file = url / "shard_00000" / "weights.bin"
    data = bin_file.content(1 << 20)
    bin_file.write(bytes([data[0] ^ 1]) + data[1:])
    dataset = PackedDataset(url, DataCache(tmp_path / "cache", gib))
    dataset.pack(1)
    with pytest.raises(ValueError, match=rf"{bin_file}: its pack 0 has the checksum"):
        dataset.pack(0)


def test_half_an_upload_and_a_cut_object_are_refused_by_name(local: Path) -> None:
    for name in (MANIFEST_NAME, "shard_00001/tokens.bin", "shard_00001/segments.npy"):
        url = uploaded(local, leave_out=name)
        with pytest.raises(ValueError, match=rf"{url / name}: no such file"):
            PackedDataset(url)
    url = uploaded(local)
    file = url / "shard_00000" / "images.bin"
    file.write(file.content(1 << 20)[:-5])
    with pytest.raises(ValueError, match=rf"{file}: \d+ bytes, the manifest says \d+ bytes"):
        PackedDataset(url)


def test_files_are_fetched_once_for_all_ranks_and_again_when_a_copy_is_damaged(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, fetched, original = uploaded(local), [], Url.read
    monkeypatch.setattr(
        Url, "read", lambda self, *range: fetched.append(self.name) or original(self, *range)
    )
    PackedDataset(url, DataCache(tmp_path / "cache"))
    assert {"segments.npy", "tokens.bin"} <= set(fetched)
    fetched.clear()
    PackedDataset(url, DataCache(tmp_path / "cache"))
    assert fetched == []
    largest = max(
        (tmp_path / "cache").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    largest.write_bytes(b"0" * largest.stat().st_size)
    assert everything(PackedDataset(url, DataCache(tmp_path / "cache"))) == everything(
        PackedDataset(local)
    )
    assert len(set(fetched)) == 1


def test_the_loader_gives_the_batches_of_the_disk_while_the_store_fails(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(1), 40)
    write_dataset(tmp_path / "data", [packs[:25], packs[25:]])
    url = uploaded(tmp_path / "data")
    options = LoaderOptions(global_batch_size=4, num_threads=3)

    def steps(dataset: PackedDataset) -> list[list[int]]:
        with PackedLoader(dataset, options, DataRank(), 0) as loader:
            return [batch.tokens.tolist() for _ in range(12) for batch in loader.next_step()]

    with flaky(0.1) as store:
        found = steps(PackedDataset(under_flaky(url), DataCache(tmp_path / "cache", gib=0.0)))
    assert sum(store.failed.values()) > 3 and found == steps(PackedDataset(tmp_path / "data"))
