"""Arrow files and saved datasets: rows are records, whatever the format and the number of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.read import Extent, input_files, plan_units, read_extent
from megacp.prepare.records.record import Record, Refusal
from tests.prepare.build.builds import documents, run
from tests.prepare.media.pictures import TINY, encoded, noise

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ROWS = [{"text": "a"}, {"text": "b", "meta": {"x": 1, "y": None}}, {"text": None, "id": "3"}]
READ = [{"text": "a"}, {"text": "b", "meta": {"x": 1}}, {"id": "3"}]


def write(path: Path, rows: list[dict[str, Any]], kind: str, batch: int = 2) -> Path:
    table = pa.table({key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}})
    if kind == "parquet":
        pq.write_table(table, path)
        return path
    opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def read(path: Path, limit: int = 1 << 20) -> list[Record | Refusal]:
    return list(read_extent(Extent(0, str(path), 0, path.stat().st_size), limit))


def values(found: list[Record | Refusal]) -> list[Any]:
    return [each.value for each in found if isinstance(each, Record)]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_rows_of_an_arrow_file_are_records_and_nulls_are_absent(tmp_path: Path, kind: str) -> None:
    found = read(write(tmp_path / "a.arrow", ROWS, kind))
    assert values(found) == READ and [each.line for each in found] == [1, 2, 3]
    assert values(read(write(tmp_path / "a.parquet", ROWS, "parquet"))) == READ


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_row_that_is_too_large_is_refused_and_the_next_is_read(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "a"}, {"text": "x" * 5000}, {"text": "c"}]
    found = read(write(tmp_path / "a.arrow", rows, kind, batch=3), 1000)
    assert values(found) == [rows[0], rows[2]]
    (refusal,) = (each for each in found if isinstance(each, Refusal))
    assert refusal.line == 2 and "more than --max-record-bytes 1000" in refusal.reason


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_that_is_cut_anywhere_is_noticed(tmp_path: Path, kind: str) -> None:
    """A stream that ends between two batches looks whole to the library."""
    path = write(tmp_path / "a.arrow", ROWS * 2, kind)
    whole = path.read_bytes()
    for size in range(0, len(whole), 8):
        path.write_bytes(whole[:size])
        *rest, last = read(path)
        assert isinstance(last, Refusal) and "damaged or cut short" in last.reason and len(rest) <= 6


def saved(folder: Path, shards: list[list[dict[str, Any]]], **state: Any) -> Path:
    """A folder as `save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write(folder / name, rows, "stream")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train", **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_the_files_of_a_saved_dataset_are_read_in_its_order(tmp_path: Path) -> None:
    shards = [[{"text": f"{i}.{j}"} for j in range(3)] for i in range(3)]
    folder = saved(tmp_path / "saved", shards)
    (folder / "cache-1.arrow").write_bytes(b"left by a map")
    paths = input_files([str(folder), "other.jsonl"])
    assert [Path(path).name for path in paths[:3]] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert paths[3:] == ("other.jsonl",)
    found = [each for unit in plan_units(paths[:3], 1 << 20) for e in unit.extents for each in read_extent(e)]
    assert values(found) == [row for rows in shards for row in rows]
    run([folder], tmp_path / "d")
    assert documents(tmp_path / "d") == [[*row["text"].encode(), 256] for rows in shards for row in rows]


def test_a_folder_that_cannot_be_read_as_it_was_saved_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "both" / "train", [[{"text": "a"}]])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match=f"--input: .*both holds several splits; give one of {tmp_path}/both/train"):
        run([tmp_path / "both"], tmp_path / "d")
    with pytest.raises(ValueError, match="rows are chosen by an indices file"):
        run([saved(tmp_path / "a", [[{"text": "a"}]], _indices_data_files=[{"filename": "i.arrow"}])], tmp_path / "d")
    with pytest.raises(ValueError, match="`_data_files` names no files of the folder"):
        run([saved(tmp_path / "b", [], _data_files=[{"filename": "../x.arrow"}])], tmp_path / "d")
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="c is a directory; give the files in it"):
        run([tmp_path / "c"], tmp_path / "d")


def test_images_of_a_saved_dataset_are_those_of_its_bytes(tmp_path: Path) -> None:
    """The `Image` feature: a struct of bytes and path, of which bytes alone are read where there are some."""
    picture = encoded(noise(20, 30), "PNG")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Noise."}]
    row = {"image": {"bytes": picture, "path": "elsewhere.png"}, "conversations": turns}
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.png").write_bytes(picture)
    content = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "\nWhat?"}]
    told = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Noise."}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(told))
    values: dict[str, Any] = {"image_rules": TINY, "image_root": str(tmp_path / "root"), "seq_length": 512}
    run([tmp_path / "a.jsonl"], tmp_path / "one", **values)
    for kind, source in (
        ("saved", saved(tmp_path / "folder", [[row]])),
        ("parquet", write(tmp_path / "b.parquet", [row], "parquet")),
    ):
        run([source], tmp_path / kind, **values)
        assert documents(tmp_path / kind) == documents(tmp_path / "one")
        for name in ("images.bin", "units.npy"):
            found, expected = (tmp_path / each / "shard_00000" / name for each in (kind, "one"))
            assert found.read_bytes() == expected.read_bytes()


def compressed(path: Path, tables: list[Any], kind: str, codec: str) -> Path:
    """A batch of each table."""
    opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with opened(str(path), tables[0].schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for table in tables:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_batch_that_decompresses_to_far_more_is_refused_unread(tmp_path: Path, kind: str, codec: str) -> None:
    """4 MB of one letter in some kB; would catch a batch that is decompressed whole because nobody compared its sizes.

    A stream ends there, a file has its other rows. Compressed rows of the usual kind are read.
    """
    small, large = pa.table({"text": ["a", None]}), pa.table({"text": ["x" * 40_000] * 100})
    usual = compressed(tmp_path / "usual.arrow", [small, small], kind, codec)
    assert values(read(usual, 10_000)) == [{"text": "a"}, {}] * 2
    path = compressed(tmp_path / "a.arrow", [small, large, small], kind, codec)
    assert path.stat().st_size < 40_000
    found = read(path, 10_000)
    refusals = [each for each in found if isinstance(each, Refusal)]
    assert refusals[0].line == 3 and "batch 1 of 100 rows: " in refusals[0].reason
    assert "decompress to 4000000, more than 100 times as many and 4 times --max-record-bytes" in refusals[0].reason
    if kind == "file":
        assert len(refusals) == 1 and [each.line for each in found] == [1, 2, 3, 103, 104]
    else:
        assert "what follows that batch is not read" in refusals[1].reason and len(found) == 4
    assert len(values(read(path, 2_000_000))) == 104


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_dictionary_that_decompresses_to_far_more_ends_the_file(tmp_path: Path, kind: str) -> None:
    """Its values are decompressed before the first row."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["x" * 4_000_000, "y"]))
    path = compressed(tmp_path / "a.arrow", [pa.table({"text": column})], kind, "zstd")
    (refusal,) = read(path, 10_000)
    assert (
        isinstance(refusal, Refusal)
        and "a dictionary: " in refusal.reason
        and "decompress to 4000001" in refusal.reason
    )
