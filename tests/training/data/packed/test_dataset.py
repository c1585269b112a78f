"""The packed dataset on disk: exact round trips, atomic shards, and messages about bad files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.lib.recfunctions as rfn
import pytest
from zlib_ng.zlib_ng import crc32

from megacp.prepare.packs.writer import IndexedWriter, Segment, ShardWriter, write_table
from megacp.prepare.verify import verify
from megacp.training.data import tables
from megacp.training.data.manifest import DatasetManifest
from megacp.training.data.reader import OPEN_SHARDS, PackedDataset
from megacp.training.data.tables import IndexedReader, StoredFile, token_dtype, with_suffix
from tests.training.data.datasets import (
    IMAGE_RULES,
    damage,
    random_packs,
    sign,
    weighted_images,
    write_dataset,
)


@pytest.mark.parametrize("weighted", [False, True])
def test_packs_come_back_exactly(tmp_path: Path, weighted: bool) -> None:
    rng = np.random.default_rng(3)
    shards = [random_packs(rng, 6, vocab_size=100_000), random_packs(rng, 3, vocab_size=100_000)]
    if weighted:  # weights begin in the middle of the first shard: what came before is ones
        for pack in shards[0][3:]:
            pack[0] = dataclasses.replace(
                pack[0], weights=rng.random(len(pack[0].tokens)).astype(np.float32)
            )
    manifest = write_dataset(tmp_path, shards, vocab_size=100_000, pad_multiple=4)
    dataset = PackedDataset(tmp_path)
    assert len(dataset) == 9 and dataset.manifest == manifest
    for i, segments in enumerate(shards[0] + shards[1]):
        pack = dataset.pack(i)
        assert pack.index == i and np.array_equal(
            pack.tokens, np.concatenate([s.tokens for s in segments])
        )
        assert pack.segments["source_offset"].tolist() == [s.source_offset for s in segments]
        assert (pack.segments["padded_length"] % 4 == 0).all()
        expected = np.concatenate(
            [np.ones(len(s.tokens)) if s.weights is None else s.weights for s in segments]
        )
        assert (pack.weights is not None) == (weighted and i < 6)
        assert pack.weights is None or np.array_equal(pack.weights, expected.astype(np.float32))
    assert verify(tmp_path) == []
    assert dataset.manifest.num_tokens == sum(
        len(s.tokens) for shard in shards for pack in shard for s in pack
    )
    with pytest.raises(IndexError, match="pack 9 of"):
        dataset.pack(9)


def test_weights_of_one_are_not_stored_and_change_no_byte(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 3)
    ones = [
        [dataclasses.replace(s, weights=np.ones(len(s.tokens), np.float32)) for s in pack]
        for pack in packs
    ]
    manifest = write_dataset(tmp_path / "a", [packs])
    assert manifest == write_dataset(tmp_path / "b", [ones])  # with the hashes of all files
    assert "weights.bin" not in [file.name for file in manifest.shards[0].files]


def test_a_shard_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 2)
    target = tmp_path / "shard_00000"
    with pytest.raises(KeyboardInterrupt), ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[0])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = ShardWriter(target, 100, 32)  # a killed build leaves its temporary directory
    killed.add_pack(packs[0])
    killed._tokens.data.abandon()  # the operating system closes the files of a killed process
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        entry = writer.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["shard_00000"]
    assert {file.name: file.size for file in entry.files} == {
        p.name: p.stat().st_size for p in target.iterdir()
    }
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        assert writer.commit() == entry
    with (
        ShardWriter(tmp_path / "empty", 100, 32) as writer,
        pytest.raises(ValueError, match="at least one pack"),
    ):
        writer.commit()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "0 segments"),
        (
            [Segment(np.arange(20)), Segment(np.arange(13))],
            "2 segments with 36 padded tokens.*--seq-length 32",
        ),
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
                with pytest.raises(ValueError, match=message):
                    writer.add_pack(segments)
            writer.add_pack(good)
            entries.append(dataclasses.replace(writer.commit(), name=""))
    assert entries[0] == entries[1]


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    """Write two shards, of 3 and 2 packs with weights and images."""
    rng = np.random.default_rng(0)
    write_dataset(
        tmp_path / "d", [weighted_images(rng, n) for n in (3, 2)], image_rules=IMAGE_RULES
    )
    return tmp_path / "d"


def read_all(path: Path) -> None:
    dataset = PackedDataset(path)
    for i in range(len(dataset)):
        images = dataset.pack(i).images
        for item in np.unique(images.units["item"]).tolist():
            images.read(item)


def test_each_flipped_bit_is_told_at_open_or_when_its_pack_is_read(dataset_path: Path) -> None:
    read_all(dataset_path)
    rng = np.random.default_rng(1)
    for path in [*sorted((dataset_path / "shard_00001").iterdir()), dataset_path / "manifest.json"]:
        for bit in rng.choice(8 * path.stat().st_size, 12, replace=False).tolist():
            sound = path.read_bytes()
            damage(path, bit // 8, bytes([sound[bit // 8] ^ 1 << bit % 8]))
            try:
                same = path.name == "manifest.json" and json.loads(path.read_bytes()) == json.loads(
                    sound
                )
            except ValueError:
                same = False
            if not same:  # a space in place of a tab has the same meaning
                with pytest.raises(ValueError, match=path.name):
                    read_all(dataset_path)
            path.write_bytes(sound)


def exchanged(path: Path, how: str) -> None:
    """Truncate a file, or replace it by something that a reader would wait for forever."""
    if how == "cut":
        return os.truncate(path, path.stat().st_size - 2)
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    if how == "folder":
        path.mkdir()
    if how == "device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("how", ["missing", "cut", "pipe", "folder", "device"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "shard_00001/tokens.bin", "shard_00001/images.idx"]
)
def test_a_file_that_is_none_or_not_whole_is_named_and_not_read(
    dataset_path: Path, name: str, how: str
) -> None:
    exchanged(dataset_path / name, how)
    with pytest.raises(ValueError, match=name):
        PackedDataset(dataset_path)
    (found,) = verify(dataset_path)
    assert name in found


def test_an_edited_manifest_one_that_leads_out_of_its_folder_and_one_that_forgets_a_file_are_refused(
    dataset_path: Path,
) -> None:
    path, manifest = dataset_path / "manifest.json", DatasetManifest.read(dataset_path)
    sound, (first, second) = json.loads(path.read_text()), manifest.shards
    for change in (
        {"format_version": 1},
        {"seq_length": 33},
        {"tokenizer": {}},
        {"shards": 3},
        {"colour": 1},
    ):
        path.write_text(json.dumps({**sound, **change}))
        with pytest.raises(ValueError, match=r"manifest\.json: "):
            PackedDataset(dataset_path)
    for shard, told in (
        (dataclasses.replace(first, name="../d"), "plain file name"),
        (
            dataclasses.replace(
                first, files=tuple(f for f in first.files if f.name != "packs.npy")
            ),
            "packs",
        ),
    ):
        dataclasses.replace(manifest, shards=(shard, second)).write(dataset_path)
        with pytest.raises(ValueError, match=told):
            PackedDataset(dataset_path)


def test_two_shards_swapped_and_a_file_cut_while_it_is_open_are_named(dataset_path: Path) -> None:
    dataset = PackedDataset(dataset_path)
    os.truncate(dataset_path / "shard_00001/tokens.bin", 5)
    with pytest.raises(ValueError, match=r"shard_00001/tokens\.bin: has 5 bytes, but had 60"):
        dataset.pack(4)
    for old, new in (("shard_00000", "x"), ("shard_00001", "shard_00000"), ("x", "shard_00001")):
        (dataset_path / old).rename(dataset_path / new)
    with pytest.raises(ValueError, match="shard_00000/"):
        PackedDataset(dataset_path)


def test_a_table_of_other_columns_or_a_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "packs.npy"
    for table in (np.zeros(5), np.array([{}], object), np.zeros(3, tables.SEGMENT_DTYPE)):
        np.save(path, table, allow_pickle=True)
        with pytest.raises(ValueError, match=r"packs\.npy: is not a table of"):
            tables.table_of(StoredFile(path), tables.PACK_DTYPE)
    write_table(path, np.zeros(3, tables.PACK_DTYPE))
    assert len(tables.table_of(StoredFile(path), tables.PACK_DTYPE)) == 3


def test_a_dataset_whose_branches_know_no_leave_says_to_build_it_again(tmp_path: Path) -> None:
    write_dataset(tmp_path, [[[Segment(np.arange(9), branch_starts=(3, 6))]]])
    # the format before trees were supported
    table = np.load(tmp_path / "shard_00000/branches.npy")[["start", "length"]]
    np.save(tmp_path / "shard_00000/branches.npy", rfn.repack_fields(table))
    sign(tmp_path)
    with pytest.raises(
        ValueError, match=r"branches\.npy: is not a table of .*'leave'.*: rebuild the dataset$"
    ):
        PackedDataset(tmp_path)


def test_verify_tells_each_damaged_file_in_one_line(dataset_path: Path) -> None:
    assert verify(dataset_path) == []
    damage(dataset_path / "shard_00000/tokens.bin", 3, b"\xff")
    damage(dataset_path / "shard_00001/images.bin", 0, b"\x00\x00")
    (dataset_path / "shard_00001/units.npy").unlink()
    told = [line.split("shard_0000")[1].split(":")[0] for line in verify(dataset_path)]
    assert told == ["0/tokens.bin", "1/images.bin", "1/units.npy"]


@pytest.mark.parametrize(
    ("name", "offset", "value", "told"),
    [
        ("tokens.bin", 40, b"\xff\xff", "token ids"),
        ("weights.bin", 80, np.array([np.nan], "<f4").tobytes(), "loss weights"),
    ],
)
def test_verify_reads_what_hashes_cannot_tell(
    dataset_path: Path, name: str, offset: int, value: bytes, told: str
) -> None:
    folder = dataset_path / "shard_00000"
    damage(folder / name, offset, value)
    sign(dataset_path)
    shard = PackedDataset(dataset_path).shard(0)
    checksums = np.array(shard.checksums)
    for column, reader in (("tokens", shard.tokens), ("weights", shard.weights)):
        checksums[column] = [
            crc32(reader.stored(*pair)) for pair in itertools.pairwise(reader.boundaries.tolist())
        ]
    write_table(folder / "checksums.npy", checksums)
    sign(dataset_path)
    assert any(told in line for line in verify(dataset_path))


@pytest.mark.slow
def test_a_pack_outlives_the_shard_it_came_from(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_dataset(
        tmp_path, [weighted_images(rng, 1) for _ in range(OPEN_SHARDS + 2)], image_rules=IMAGE_RULES
    )
    dataset = PackedDataset(tmp_path)
    first = dataset.pack(0).images
    before, descriptors = first.read(0), len(os.listdir("/proc/self/fd"))
    for i in range(1, len(dataset)):
        dataset.pack(i)
    assert first.read(0) == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3 * OPEN_SHARDS


def megatron() -> ModuleType:
    """Return Megatron-core's own indexed dataset, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and megatron at import
        return pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
        )


def opened(prefix: Path) -> IndexedReader:
    return IndexedReader(*(StoredFile(with_suffix(prefix, suffix)) for suffix in (".idx", ".bin")))


def values_of(reader: IndexedReader, start: int, stop: int) -> np.ndarray:
    """Return the concatenated sequences start..stop."""
    return np.frombuffer(reader.stored(start, stop), reader.dtype)


def test_ids_have_megatrons_dtype() -> None:
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.slow
def test_we_read_files_of_megatron_core_exactly_and_write_the_same_bytes(
    tmp_path: Path, multimodal: bool
) -> None:
    import torch

    theirs = megatron()
    rng = np.random.default_rng(1)
    documents = [
        [rng.integers(0, 60_000, n) for n in lengths] for lengths in ((4, 9), (1,), (30, 2, 2))
    ]
    builder = theirs.IndexedDatasetBuilder(
        str(tmp_path / "t.bin"), dtype=np.uint16, multimodal=multimodal
    )
    writer = IndexedWriter(tmp_path / "o", np.dtype("<u2"))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.from_numpy(sequence))
            writer.add_sequence(sequence)
        builder.end_document()
        writer.end_document()
    builder.finalize(str(tmp_path / "t.idx"))
    writer.close()
    reader = opened(tmp_path / "t")
    for i, document in enumerate(documents):
        assert np.array_equal(
            values_of(reader, *reader.boundaries[i : i + 2].tolist()), np.concatenate(document)
        )
    assert (tmp_path / "t.bin").read_bytes() == (tmp_path / "o.bin").read_bytes()
    modes = len(reader) if multimodal else 0
    assert (tmp_path / "t.idx").read_bytes() == (tmp_path / "o.idx").read_bytes() + bytes(modes)


@pytest.mark.slow
def test_megatron_core_reads_a_packed_shard_document_by_document(tmp_path: Path) -> None:
    theirs = megatron()
    write_dataset(tmp_path, [random_packs(np.random.default_rng(0), n) for n in (5, 4)])
    dataset, stock = (
        PackedDataset(tmp_path),
        theirs.IndexedDataset(str(tmp_path / "shard_00001" / "tokens")),
    )
    for local, (start, stop) in enumerate(itertools.pairwise(stock.document_indices)):
        pack, sequences = dataset.pack(5 + local), [stock[i] for i in range(start, stop)]
        assert [len(s) for s in sequences] == pack.segments["true_length"].tolist()
        assert np.array_equal(np.concatenate(sequences), pack.tokens)


@pytest.mark.parametrize(
    ("file", "offset", "value"),
    [
        ("x.idx", 0, b"NUMPY"),  # the magic
        ("x.idx", 9, b"\x02"),  # the version
        ("x.idx", 17, b"\x63"),  # the dtype
        ("x.idx", 18, b"\x07"),  # sequences
        ("x.idx", 34, b"\xff\xff\xff\xff"),  # a length
        ("x.idx", 34 + 3 * 4 + 8, b"\x02"),  # a pointer
        ("x.idx", 40, None),
        ("x.idx", 20, None),
        ("x.bin", 12, None),
    ],
)
def test_a_damaged_or_cut_file_is_named(
    tmp_path: Path, file: str, offset: int, value: bytes | None
) -> None:
    writer = IndexedWriter(tmp_path / "x", np.dtype("<i4"))
    for length in (2, 3, 1):
        writer.add_sequence(np.arange(length))
    writer.end_document()
    writer.close()
    os.truncate(tmp_path / file, offset) if value is None else damage(
        tmp_path / file, offset, value
    )
    with pytest.raises(ValueError, match=file):
        opened(tmp_path / "x")
