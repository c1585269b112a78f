"""The packed dataset on disk: exact round trips, atomic shards, and damage of every kind named at open."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from megacp.core.data import tables
from megacp.core.data.checksums import with_checksums
from megacp.core.data.image_shards import BOUNDARY_DTYPE
from megacp.core.data.indexed import IndexedWriter
from megacp.core.data.manifest import FileEntry
from megacp.core.data.reader import PackedDataset
from megacp.core.data.verify import verify
from megacp.core.storage import files
from megacp.prepare.build.writer import Segment, ShardWriter
from tests.data.datasets import random_packs, sign, write_dataset


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.*"))}


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "d", [random_packs(rng, 5), random_packs(rng, 1), random_packs(rng, 4)])
    return tmp_path / "d"


@pytest.mark.parametrize("weighted", [False, True])
def test_packs_come_back_exactly(tmp_path: Path, weighted: bool) -> None:
    rng = np.random.default_rng(3)
    shards = [random_packs(rng, 6, vocab_size=100_000), random_packs(rng, 3, vocab_size=100_000)]
    if weighted:  # weights begin in the middle of the first shard: what came before is ones
        for pack in shards[0][3:]:
            pack[0] = dataclasses.replace(pack[0], weights=rng.random(len(pack[0].tokens)).astype(np.float32))
    manifest = write_dataset(tmp_path, shards, vocab_size=100_000, pad_multiple=4)
    dataset = PackedDataset(tmp_path)
    assert len(dataset) == 9 and dataset.manifest == manifest
    for i, segments in enumerate(shards[0] + shards[1]):
        pack = dataset.pack(i)
        assert pack.index == i and np.array_equal(pack.tokens, np.concatenate([s.tokens for s in segments]))
        assert pack.segments["source_offset"].tolist() == [s.source_offset for s in segments]
        assert (pack.segments["padded_length"] % 4 == 0).all()
        expected = np.concatenate([np.ones(len(s.tokens)) if s.weights is None else s.weights for s in segments])
        assert (pack.weights is not None) == (weighted and i < 6)
        assert pack.weights is None or np.array_equal(pack.weights, expected.astype(np.float32))
    assert verify(tmp_path) == []
    assert dataset.manifest.num_tokens == sum(len(s.tokens) for shard in shards for pack in shard for s in pack)
    with pytest.raises(IndexError, match="pack 9 of"):
        dataset.pack(9)


def test_weights_of_one_are_not_stored_and_change_no_byte(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 3)
    ones = [[dataclasses.replace(s, weights=np.ones(len(s.tokens), np.float32)) for s in pack] for pack in packs]
    assert write_dataset(tmp_path / "a", [packs]) == write_dataset(tmp_path / "b", [ones])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not (tmp_path / "a/shard_00000/weights.bin").exists()


def test_a_shard_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 2)
    target = tmp_path / "shard_00000"
    with pytest.raises(KeyboardInterrupt), ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[0])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = ShardWriter(target, 100, 32)  # a build that is killed leaves its temporary directory
    killed.add_pack(packs[0])
    killed._tokens.abandon()  # the operating system closes what a killed process held open
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        entry = writer.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["shard_00000"]
    assert {file.name: file.size for file in entry.files} == {p.name: p.stat().st_size for p in target.iterdir()}
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        with pytest.raises(ValueError, match="exists already; nothing was overwritten"):
            writer.commit()
        assert writer.commit(replace=True) == entry
    with ShardWriter(tmp_path / "empty", 100, 32) as writer, pytest.raises(ValueError, match="at least one pack"):
        writer.commit()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "0 segments"),
        ([Segment(np.arange(20)), Segment(np.arange(13))], "2 segments with 36 padded tokens.*--seq-length 32"),
        ([Segment(np.zeros(0, np.int64))], r"integers \[n\], n >= 1"),
        ([Segment(np.ones(3))], "got float64"),
        ([Segment(np.array([1, 100]), source_offset=77)], "offset 77: token ids 1..100, the vocabulary is 0..99"),
        ([Segment(np.array([-1]))], "token ids -1"),
        ([Segment(np.arange(3), weights=np.ones(2))], r"weights must be \(3,\)"),
        ([Segment(np.arange(3), weights=np.array([1, -1, 1]))], "not negative"),
        ([Segment(np.arange(3), weights=np.array([1, np.inf, 1]))], "finite"),
        ([Segment(np.arange(3), branch_starts=(0, 2))], "branches must start"),
        ([Segment(np.arange(3), branch_starts=(2, 2))], "branches must start"),
        ([Segment(np.arange(3), branch_starts=(3,))], "branches must start"),
    ],
)
def test_a_bad_pack_is_refused_and_leaves_the_shard_usable(
    tmp_path: Path, segments: list[Segment], message: str
) -> None:
    good = [Segment(np.arange(5))]
    entries = []
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name, 100, 32, pad_multiple=4) as writer:
            writer.add_pack(good)
            if name == "b":
                with pytest.raises(ValueError, match=f"b pack 1.*{message}"):
                    writer.add_pack(segments)
            writer.add_pack(good)
            entries.append(dataclasses.replace(writer.commit(), name=""))
    assert entries[0] == entries[1]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "packs.npy", "segments.npy"])
def test_a_truncated_or_missing_file_is_named_at_open(dataset_path: Path, name: str) -> None:
    path = dataset_path / "shard_00001" / name
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(ValueError, match=rf"shard_00001/{name}: {size - 2} bytes, the manifest says {size}"):
        PackedDataset(dataset_path)
    path.unlink()
    assert "no such file" in verify(dataset_path)[0]


def rewrite(dataset_path: Path, name: str, column: str, row: int, value: int) -> str:
    """Change one table value of the first shard, keeping the file's size; returns what opening says."""
    path = dataset_path / "shard_00000" / name
    table = np.load(path)
    table[column][row] = value
    tables.write_table(path, table)
    with pytest.raises(ValueError, match=rf"shard_00000/{name}: sha256 is"):
        PackedDataset(dataset_path)
    sign(dataset_path)
    with pytest.raises(ValueError, match="shard_00000") as error:
        PackedDataset(dataset_path)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("packs.npy", "first_segment", 3, "packs.npy: row 1: first_segment is 3, it must be "),
        ("packs.npy", "num_segments", 9, "row 1: num_segments is 9, it must be "),
        ("packs.npy", "num_tokens", 1000, "row 1: num_tokens is 1000, it must be "),
        ("packs.npy", "num_units", 1, "units.npy has 0 rows for 1 units of packs"),
        ("segments.npy", "true_length", 30, "segments.npy: row 1: true_length is 30, it must be "),
        ("segments.npy", "padded_length", 0, "row 1: padded_length is 0, it must be "),
        ("segments.npy", "source_file", 2, "row 1: source_file is 2, it must be 0 to 1"),
        ("segments.npy", "num_branches", 1, "branches.npy has 0 rows for 1 branches of segments"),
        ("segments.npy", "prefix_length", 0, "row 1: prefix_length is 0, it must be "),
    ],
)
def test_tables_that_contradict_each_other_are_named_at_open(
    dataset_path: Path, name: str, column: str, value: int, message: str
) -> None:
    assert message in rewrite(dataset_path, name, column, 1, value)


@pytest.mark.parametrize(("dtype", "lengths"), [("<f4", []), ("<f4", [1]), ("<f8", None)])
def test_weights_of_other_lengths_or_type_are_named_at_open(
    tmp_path: Path, dtype: str, lengths: list[int] | None
) -> None:
    """Would catch an empty weights file that counts as none."""
    write_dataset(tmp_path, [[[Segment(np.arange(9), weights=np.arange(9.0))]]])
    writer = IndexedWriter(tmp_path / "shard_00000/weights", np.dtype(dtype))
    for length in [9] if lengths is None else lengths:
        writer.add_sequence(np.ones(length))
    writer.end_document()
    writer.close()
    sign(tmp_path)
    with pytest.raises(ValueError, match=r"weights.idx \(float..\) does not have the lengths of tokens.idx, float32"):
        PackedDataset(tmp_path)


def test_a_table_of_other_columns_or_a_pickle_is_refused(dataset_path: Path) -> None:
    path = dataset_path / "shard_00000" / "packs.npy"
    size = path.stat().st_size
    for table, message in ((np.zeros(5), "'<f8'"), (np.array([{}], object), "'|O'")):
        np.save(path, table, allow_pickle=True)
        with open(path, "ab") as stream:
            stream.write(bytes(max(0, size - path.stat().st_size)))
        os.truncate(path, size)
        sign(dataset_path)
        with pytest.raises(ValueError, match=rf"packs\.npy: is no table of .*{re.escape(message)}"):
            PackedDataset(dataset_path)


def test_two_shards_swapped_are_noticed(dataset_path: Path) -> None:
    (dataset_path / "shard_00000").rename(dataset_path / "x")
    (dataset_path / "shard_00002").rename(dataset_path / "shard_00000")
    (dataset_path / "x").rename(dataset_path / "shard_00002")
    with pytest.raises(ValueError, match="shard_00000/packs.npy"):
        PackedDataset(dataset_path)


def test_branches_that_leave_a_gap_are_named_at_open(tmp_path: Path) -> None:
    write_dataset(tmp_path, [[[Segment(np.arange(9), branch_starts=(3, 5))]]])
    path = tmp_path / "shard_00000" / "branches.npy"
    table = np.load(path)
    for row, column, value in ((0, "length", 1), (1, "start", 6), (1, "length", 3), (0, "start", 2)):
        changed = table.copy()
        changed[column][row] = value
        tables.write_table(path, changed)
        sign(tmp_path)
        with pytest.raises(
            ValueError, match=r"branches.npy: row \d: length is|segments.npy: row 0: prefix_length is 3, it must be 2"
        ):
            PackedDataset(tmp_path)


def test_the_format_holds_images_units_and_boundaries_beside_the_text(tmp_path: Path) -> None:
    # a reader of text opens a shard with image tables, and notices units that lie outside their segment
    manifest = write_dataset(tmp_path, [[[Segment(np.arange(9))], [Segment(np.arange(4))]]])
    shard = tmp_path / "shard_00000"
    packs = np.load(shard / "packs.npy")
    packs["num_units"], packs["num_crops"] = [2, 0], [3, 0]
    units = np.zeros(2, tables.UNIT_DTYPE)
    units["start"], units["num_tokens"], units["image_stop"], units["pooled_stop"] = [1, 4], [3, 5], [1, 3], [2, 6]
    images = IndexedWriter(shard / "images", np.dtype("u1"))
    for data in (b"\xff\xd8one", b"\x89PNGtwo"):
        images.add_sequence(np.frombuffer(data, np.uint8))
    images.end_document()
    images.end_document()
    images.close()

    def write(units: np.ndarray, boundaries: np.ndarray) -> None:
        tables.write_table(shard / "packs.npy", packs)
        tables.write_table(shard / "units.npy", units)
        tables.write_table(shard / "shards_cp2.npy", boundaries)
        names = [path.name for path in sorted(shard.iterdir()) if "checksums" not in path.name]
        listed = tuple(FileEntry(name, *files.sha256_of(shard / name)) for name in names)
        entry = with_checksums(shard, dataclasses.replace(manifest.shards[0], files=listed))
        rules = {"token_ids": {"image_patch": 5}}
        dataclasses.replace(manifest, shards=(entry,), image_rules=rules, cp_degrees=(2,)).write(tmp_path)

    write(units, np.zeros((2, 2), BOUNDARY_DTYPE))
    dataset = PackedDataset(tmp_path)
    assert dataset.pack(0).tokens.tolist() == list(range(9))
    first, second = dataset.pack(0).images, dataset.pack(1).images
    assert first is not None and second is not None and first.image_patch == 5
    assert first.units["pooled_stop"].tolist() == [2, 6] and first.boundaries[2].shape == (2,)
    assert [first.read(item) for item in (0, 1)] == [b"\xff\xd8one", b"\x89PNGtwo"]
    assert len(second.units) == 0
    units["item"][1] = 2
    write(units, np.zeros((2, 2), BOUNDARY_DTYPE))
    with pytest.raises(ValueError, match="units.npy: row 1: item is 2, it must be 0 to 1"):
        PackedDataset(tmp_path)
    units["item"][1] = 1
    write(units, np.zeros((2, 4), BOUNDARY_DTYPE))
    with pytest.raises(ValueError, match=r"shards_cp2.npy: is no table of .* with shape \(4, 2\): .*'shape': \(2, 4\)"):
        PackedDataset(tmp_path)
    units["num_tokens"][1] = 6
    write(units, np.zeros((2, 2), BOUNDARY_DTYPE))
    with pytest.raises(ValueError, match="units.npy: row 1: start is 4, it must be 0 to 3"):
        PackedDataset(tmp_path)


def test_a_random_pack_costs_microseconds(tmp_path: Path) -> None:
    # 200 us is a loose bound for a loaded machine; a reader that parses or copies the shard takes milliseconds
    rng = np.random.default_rng(0)
    write_dataset(tmp_path, [random_packs(rng, 2000, seq_length=512)], seq_length=512)
    dataset = PackedDataset(tmp_path)
    numbers = rng.integers(0, 2000, 2000).tolist()
    best = np.inf
    for _ in range(3):
        begin = time.perf_counter()
        for i in numbers:
            dataset.pack(i)
        best = min(best, (time.perf_counter() - begin) / len(numbers))
    assert best < 200e-6
