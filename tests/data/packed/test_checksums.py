"""What tells a damaged or exchanged file of a dataset: checksums of packs, images, tables and of the manifest."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.core.data.manifest import DatasetManifest
from megacp.core.data.reader import PackedDataset
from megacp.core.data.verify import verify
from megacp.prepare.build.merge import merge
from tests.data.datasets import (
    IMAGE_RULES,
    damage,
    random_packs,
    sign,
    weighted_images,
    write_dataset,
    write_older,
)


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "d", [weighted_images(rng, n) for n in (3, 2)], image_rules=IMAGE_RULES)
    return tmp_path / "d"


def read_all(dataset: PackedDataset) -> None:
    for i in range(len(dataset)):
        images = dataset.pack(i).images
        assert images is not None
        for item in np.unique(images.units["item"]).tolist():
            images.read(item)


def flip(path: Path, bit: int) -> None:
    damage(path, bit // 8, bytes([path.read_bytes()[bit // 8] ^ 1 << bit % 8]))


@pytest.mark.parametrize("name", ["tokens.bin", "weights.bin", "images.bin"])
def test_each_flipped_bit_of_a_bin_is_told_when_it_is_read(dataset_path: Path, name: str) -> None:
    """Would catch a token, a weight or an image that is trained on as the disk happens to give it."""
    read_all(PackedDataset(dataset_path))
    path = dataset_path / "shard_00001" / name
    bits = np.random.default_rng(1).choice(8 * path.stat().st_size, 40, replace=False).tolist()
    what = "item" if name == "images.bin" else "pack"
    for bit in bits:
        flip(path, bit)
        with pytest.raises(
            ValueError, match=rf"shard_00001/{name}: {what} \d+ has the checksum .* damaged or replaced"
        ):
            read_all(PackedDataset(dataset_path))
        flip(path, bit)
    read_all(PackedDataset(dataset_path))


@pytest.mark.slow
def test_each_flipped_bit_of_a_table_or_the_manifest_is_told_at_open(dataset_path: Path) -> None:
    rng = np.random.default_rng(2)
    for path in [*sorted((dataset_path / "shard_00000").glob("*.[in]*")), dataset_path / "manifest.json"]:
        for bit in rng.choice(8 * path.stat().st_size, 10, replace=False).tolist():
            text = path.read_bytes()
            flip(path, bit)
            try:
                changed = json.loads(path.read_bytes()) != json.loads(text)
            except ValueError:
                changed = True
            if changed or path.name != "manifest.json":  # a space for a tab between two fields says the same
                with pytest.raises(ValueError, match=path.name):
                    PackedDataset(dataset_path)
            path.write_bytes(text)
    PackedDataset(dataset_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_id", 2), ("pad_id", 0), ("sha256", "1" * 64), ("kind", "gpt2"), ("cp_degrees", [1, 2]), ("sources", ["x"])],
)
def test_an_edited_manifest_is_refused(dataset_path: Path, field: str, value: object) -> None:
    """Would catch another end token, tokenizer or plan that still adds up."""
    path = dataset_path / "manifest.json"
    values = json.loads(path.read_text())
    (values["tokenizer"] if field in values["tokenizer"] else values)[field] = value
    path.write_text(json.dumps(values))
    for found in (*verify(dataset_path), str(pytest.raises(ValueError, PackedDataset, dataset_path).value)):
        assert "manifest.json: its checksum is" in found and "damaged or edited" in found


def test_other_documents_of_the_same_lengths_are_told_at_the_start_and_when_read(tmp_path: Path) -> None:
    """Would catch ranks that train on different data under one manifest."""
    packs = random_packs(np.random.default_rng(0), 6)
    others = [[dataclasses.replace(s, tokens=99 - s.tokens) for s in pack] for pack in packs]
    for write, name in ((write_dataset, "now"), (write_older, "older")):
        write(tmp_path / name / "a", [packs])
        write(tmp_path / name / "b", [others])
        copied = "manifest.json", *((f"shard_00000/{n}.npy") for n in ("checksums",) if write is write_dataset)
        for file in copied:
            (tmp_path / name / "b" / file).write_bytes((tmp_path / name / "a" / file).read_bytes())
        one, two = (PackedDataset(tmp_path / name / side) for side in "ab")
        assert one.manifest.fingerprint == two.manifest.fingerprint and one.fingerprint != two.fingerprint
        if name == "now":
            with pytest.raises(ValueError, match=r"b/shard_00000/tokens\.bin: pack 3 has the checksum"):
                two.pack(3)


def test_a_dataset_lies_anywhere_with_one_fingerprint(dataset_path: Path) -> None:
    before = PackedDataset(dataset_path).fingerprint
    dataset_path.rename(dataset_path.with_name("moved"))
    assert PackedDataset(dataset_path.with_name("moved")).fingerprint == before


def test_a_file_that_is_cut_or_changed_while_it_is_open_is_named(dataset_path: Path) -> None:
    """Would catch a memory map, which ends the process with SIGBUS."""
    dataset = PackedDataset(dataset_path)
    path = dataset_path / "shard_00001/tokens.bin"
    os.truncate(path, 5)
    with pytest.raises(ValueError, match=r"shard_00001/tokens\.bin: has 5 bytes, it had 60 when it was opened"):
        dataset.pack(4)


# ---- verify


def test_verify_tells_each_damaged_file_in_one_line_with_the_packs_that_changed(dataset_path: Path) -> None:
    damage(dataset_path / "shard_00000/tokens.bin", 3, b"\xff")
    damage(dataset_path / "shard_00001/images.bin", 0, b"\x00\x00")
    damage(dataset_path / "shard_00001/weights.bin", 20, b"\xff\xff")
    (dataset_path / "shard_00001/units.npy").unlink()
    found = verify(dataset_path)
    assert [line.split("shard_0000")[1].split(" ")[0] for line in found] == [
        "0/tokens.bin:",
        "1/images.bin:",
        "1/units.npy:",
        "1/weights.bin:",
    ]
    assert found[0].endswith("; changed packs: 0") and "no such file, the manifest says" in found[2]
    found = verify(dataset_path)
    damage(dataset_path / "shard_00000/tokens.bin", 0, bytes(90))
    assert verify(dataset_path)[0].endswith("; changed packs: 0, 1, 2")


@pytest.mark.parametrize("write", [write_dataset, write_older])
def test_verify_reads_what_hashes_cannot_tell(tmp_path: Path, write: Any) -> None:
    """Would catch a builder that stores ids beyond the vocabulary or weights that are no numbers, with right hashes."""
    write(tmp_path, [weighted_images(np.random.default_rng(0), 3)], image_rules=IMAGE_RULES)
    assert verify(tmp_path) == []
    damage(tmp_path / "shard_00000/tokens.bin", 2 * 20, b"\xff\xff")
    damage(tmp_path / "shard_00000/tokens.bin", 2 * 31, b"\x06")
    damage(tmp_path / "shard_00000/weights.bin", 4 * 20, np.array([-1, np.nan], "<f4").tobytes())
    sign(tmp_path)
    found = verify(tmp_path)
    if write is write_dataset:
        assert len(found) == 2 and all("has the checksum" in line for line in found), found
    else:
        assert found[0] == "pack 1: token ids 5..65535, the vocabulary is 0..99"
        assert found[1] == "pack 1: loss weights that are negative or not finite"
        assert found[2].startswith("pack 2: 3 image features and 2 image-patch tokens") and len(found) == 3


# ---- datasets of the earlier format


def test_a_dataset_without_checksums_opens_and_says_what_is_not_checked(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 3)
    older, newer = write_older(tmp_path / "older", [packs]), write_dataset(tmp_path / "newer", [packs])
    text = (tmp_path / "older/manifest.json").read_text()
    assert "checksum" not in text and DatasetManifest.read(tmp_path / "older").to_text() == text
    assert older.fingerprint == DatasetManifest.read(tmp_path / "older").fingerprint != newer.fingerprint
    dataset = PackedDataset(tmp_path / "older")
    assert np.array_equal(dataset.pack(1).tokens, PackedDataset(tmp_path / "newer").pack(1).tokens)
    assert "without checksums of packs" in older.unchecked and not newer.unchecked
    damage(tmp_path / "older/shard_00000/tokens.bin", 0, b"\x01\x00\x01")
    assert "tokens.bin: sha256 is" in verify(tmp_path / "older")[0]


def test_merging_older_datasets_gives_them_checksums(tmp_path: Path) -> None:
    parts = [weighted_images(np.random.default_rng(seed), 3) for seed in (0, 1)]
    again = [weighted_images(np.random.default_rng(seed), 3) for seed in (0, 1)]
    for name, packs, write in zip("abcd", parts + again, [write_dataset] * 2 + [write_older] * 2, strict=True):
        write(tmp_path / name, [packs], image_rules=IMAGE_RULES)
    merge([str(tmp_path / name) for name in "ab"], str(tmp_path / "new"))
    merge([str(tmp_path / name) for name in "cd"], str(tmp_path / "old"))
    assert DatasetManifest.read(tmp_path / "new").shards == DatasetManifest.read(tmp_path / "old").shards
    assert verify(tmp_path / "old") == []
