"""Merging: all documents of all parts, or every reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_documents_with_and_without_an_end_are_not_merged(tmp_path: Path) -> None:
    """Would catch a dataset in which some documents end with a token and some do not, with nothing that says so."""
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    ends, without = str(tmp_path / "ends"), str(tmp_path / "open")
    run([a], tmp_path / "ends")
    run([a], tmp_path / "open", append_eod=False)
    with pytest.raises(ValueError, match=r"open has a last token none, not 256 .--append-eod, --eod-token"):
        merge([ends, ends, without], str(tmp_path / "no"))
    assert merge([ends, ends], str(tmp_path / "1")).document_end == {"token": 256}
    assert merge([without, without], str(tmp_path / "2")).document_end == {"token": None}


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
