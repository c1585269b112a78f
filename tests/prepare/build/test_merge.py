"""Merging: all documents of all parts, or every reason why not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megacp.core.data.manifest import DatasetManifest
from megacp.prepare.build.merge import merge
from megacp.prepare.verify import verify
from tests.prepare.build.builds import documents, expected, run, write_records


def test_merged_datasets_hold_the_documents_of_all(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    records = [write_records(path, 40, seed) for seed, path in enumerate(paths)]
    for path in paths:
        run([path], tmp_path / path.stem)
    manifest = merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "both"))
    assert documents(tmp_path / "both") == expected(records[0]) + expected(records[1])
    assert manifest.sources == tuple(map(str, paths)) and verify(tmp_path / "both") == []
    with pytest.raises(ValueError, match="merged dataset; nothing was overwritten"):
        run([paths[0]], tmp_path / "both")


def test_datasets_that_do_not_fit_are_refused_with_all_mismatches(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    run([a], tmp_path / "one")
    run([a], tmp_path / "two", seq_length=256, pad_multiple=2)
    with pytest.raises(ValueError, match="two has seq_length 256, not 128, pad_multiple 2, not 1$"):
        merge([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "both"))
    with pytest.raises(ValueError, match="at least two"):
        merge([str(tmp_path / "one")], str(tmp_path / "both"))
    with pytest.raises(ValueError, match="is one of the datasets"):
        merge([str(tmp_path / "one"), str(tmp_path / "one")], str(tmp_path / "one"))
    assert not (tmp_path / "both").exists()


def test_documents_with_and_without_an_end_are_not_merged_and_datasets_of_before_are(tmp_path: Path) -> None:
    """Would catch a dataset in which some documents end with a token and some do not, with nothing that says so."""
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    run([a], tmp_path / "ends")
    run([a], tmp_path / "open", append_eod=False)
    run([a], tmp_path / "old")
    names = {name: str(tmp_path / name) for name in ("ends", "open", "old")}
    before = dataclasses.replace(DatasetManifest.read(names["old"]), document_end=None)
    before.write(names["old"])
    for first in ("ends", "old"):
        told = r"open has document_end.token none, not 256 \(.*build with the same --append-eod and --eod-token"
        with pytest.raises(ValueError, match=told):
            merge([names[first], names["ends"], names["open"]], str(tmp_path / "no"))
    assert merge([names["ends"], names["ends"]], str(tmp_path / "1")).document_end == {"token": 256}
    assert merge([names["open"], names["open"]], str(tmp_path / "2")).document_end == {"token": None}
    assert merge([names["open"], names["old"]], str(tmp_path / "3")).document_end is None


def test_a_damaged_part_is_not_merged(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    run([a], tmp_path / "one")
    run([a], tmp_path / "two")
    path = tmp_path / "two/shard_00000/tokens.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="two/shard_00000/tokens.bin: sha256"):
        merge([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "both"))
    assert not (tmp_path / "both/manifest.json").exists()
