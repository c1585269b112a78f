"""manifest.json: canonical text, atomic writing, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megacp.core.data.manifest import DatasetManifest
from megacp.core.data.reader import PackedDataset
from tests.data.datasets import random_packs, write_dataset


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path, [random_packs(rng, n) for n in (5, 1, 4)])
    return tmp_path


def test_manifest_round_trips_and_its_text_is_canonical(dataset_path: Path) -> None:
    manifest = DatasetManifest.read(dataset_path)
    text = (dataset_path / "manifest.json").read_text()
    assert manifest.to_text() == text and DatasetManifest.read(dataset_path) == manifest
    assert json.loads(text)["num_packs"] == 10
    assert dataclasses.replace(manifest, seq_length=33).fingerprint != manifest.fingerprint


@pytest.mark.parametrize("end", [None, {"token": 1}, {"token": None}])
def test_what_ends_documents_comes_back_and_is_not_written_where_it_is_not_known(
    dataset_path: Path, end: dict[str, int | None] | None
) -> None:
    """Would catch a dataset of before whose checksum is another once it is read."""
    manifest = dataclasses.replace(DatasetManifest.read(dataset_path), document_end=end)
    manifest.write(dataset_path)
    assert DatasetManifest.read(dataset_path) == manifest
    assert ("document_end" in json.loads((dataset_path / "manifest.json").read_text())) == (end is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format_version 3, this program reads 1 to 2"),
        ({"num_tokens": 1}, "`num_tokens` is 1, but the shards add up to"),
        ({"colour": 1}, "unknown fields: 'colour'"),
        ({"document_end": 1}, "`document_end` is 1, it must be an object"),
        ({"document_end": {}}, "`document_end.token` is missing"),
        ({"document_end": {"token": 100}}, "`document_end.token` is 100, it must be null or an integer of 0 to 99"),
        ({"document_end": {"token": 1, "x": 1}}, "unknown fields of `document_end`: 'x'"),
        ({"tokenizer": {"kind": "byte"}}, "`tokenizer.vocab_size` is missing"),
        ({"shards": 3}, "`shards` is 3, it must be a list"),
        ({"shards": [3]}, r"`shards\[0\]` is 3, it must be an object"),
    ],
)
def test_a_manifest_that_is_wrong_says_where(dataset_path: Path, change: dict[str, object], message: str) -> None:
    path = dataset_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"manifest\.json: .*{message}"):
        DatasetManifest.read(dataset_path)


def test_a_manifest_cut_short_missing_or_pointing_elsewhere_is_refused(dataset_path: Path) -> None:
    path = dataset_path / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"shard_00000"', '"../shard_00000"'))
    with pytest.raises(ValueError, match=r"`shards\[0\]\.name` is '\.\./shard_00000', it must be a plain name"):
        PackedDataset(dataset_path)
    path.write_text(text)
    manifest = DatasetManifest.read(dataset_path)
    first = dataclasses.replace(manifest.shards[0], files=manifest.shards[0].files[1:])
    dataclasses.replace(manifest, shards=(first, *manifest.shards[1:])).write(dataset_path)
    with pytest.raises(ValueError, match=r"does not list \['checksums.npy'\]"):
        PackedDataset(dataset_path)
    path.write_text(text[:100])
    with pytest.raises(ValueError, match=r"manifest\.json"):
        PackedDataset(dataset_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: no such file; a finished dataset has one"):
        PackedDataset(dataset_path)
