"""Readers: each line exactly once whatever the cuts, and a place for each bad one."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp.prepare.records.jsonl import line_number
from megacp.prepare.records.read import Extent, plan_units, read_extent
from megacp.prepare.records.record import Record, Refusal


def whole(path: Path) -> Extent:
    return Extent(0, str(path), 0, path.stat().st_size)


def split(items: list[Record | Refusal]) -> tuple[list[Record], list[Refusal]]:
    return [i for i in items if isinstance(i, Record)], [i for i in items if isinstance(i, Refusal)]


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"text": f"document {i} " + "x" * (i % 7)}).encode() + b"\n" for i in range(count))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(alphabet="ab\u00e9 ", max_size=12), min_size=1, max_size=20),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_every_line_is_read_exactly_once_however_the_file_is_cut(
    tmp_path: Path, texts: list[str], unit_bytes: int, ends: bool, newline: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    data = newline.join(json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts)
    path.write_bytes(data + (newline if ends else b""))
    units = plan_units([str(path)], unit_bytes)
    records = [item for unit in units for extent in unit.extents for item in read_extent(extent)]
    assert [item.value["text"] for item in records if isinstance(item, Record)] == texts
    assert [line_number(str(path), item.offset) for item in records] == list(range(1, len(texts) + 1))


def test_units_group_small_files_and_cut_large_ones(tmp_path: Path) -> None:
    for name, count in (("a.jsonl", 1), ("b.jsonl", 1), ("c.jsonl", 40), ("d.jsonl.gz", 40)):
        (tmp_path / name).write_bytes(lines(count))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "empty.jsonl", "c.jsonl", "d.jsonl.gz")]
    units = plan_units(paths, 400)
    assert [e.source for e in units[0].extents] == [0, 1]
    size = (tmp_path / "c.jsonl").stat().st_size
    cut = [e for unit in units for e in unit.extents if e.source == 3]
    assert len(cut) == -(-size // 400) and (cut[0].start, cut[-1].stop) == (0, size)
    assert all(a.stop == b.start for a, b in zip(cut, cut[1:], strict=False))
    assert len([e for unit in units for e in unit.extents if e.source == 4]) == 1
    assert [unit.index for unit in units] == list(range(len(units)))


BAD = {
    b"": "an empty line",
    b"   ": "an empty line",
    b"{": "invalid JSON",
    b'{"text": "\xfe"}': "not UTF-8: byte 0xfe at column 11",
    b'"' + b"x" * 300 + b'"': "a line of 303 bytes, more than --max-record-bytes 200",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_bad_line_is_refused_with_its_place_and_reading_goes_on(tmp_path: Path, bad: bytes, suffix: str) -> None:
    before = lines(5)
    data = before + bad + b"\n" + lines(3)
    path = tmp_path / f"a.jsonl{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path.write_bytes(pack(data))
    records, refusals = split(list(read_extent(whole(path), max_record_bytes=200)))
    assert len(records) == 8
    (refusal,) = refusals
    assert (refusal.file, refusal.line, refusal.offset) == (str(path), 6, len(before))
    assert refusal.reason.startswith(BAD[bad].replace("303", str(len(bad) + 1)))
    assert str(refusal).startswith(f"{path}:6: ") and str(refusal).endswith(f"(byte offset {len(before)})")


def test_a_bad_line_in_a_later_range_has_its_true_line_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(30) + b"oops\n" + lines(30) + b"oops\n")
    items = [i for unit in plan_units([str(path)], 100) for e in unit.extents for i in read_extent(e)]
    assert [refusal.line for refusal in split(items)[1]] == [31, 62]


def test_crlf_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    records, refusals = split(list(read_extent(whole(path))))
    assert [record.value for record in records] == [{"text": "a"}, {"text": "b"}] and not refusals


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_compressed_file_gives_what_is_whole_and_says_that_it_is_cut(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    data = pack(lines(2000))
    path.write_bytes(data[: len(data) * 3 // 4])
    records, refusals = split(list(read_extent(whole(path))))
    assert [r.value for r in records] == [json.loads(line) for line in lines(2000).splitlines()[: len(records)]]
    assert len(refusals) == 1 and "cut short" in refusals[0].reason and refusals[0].line == len(records) + 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_refused_and_ends(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"this is no compressed file")
    records, refusals = split(list(read_extent(whole(path))))
    assert not records and "damaged" in refusals[0].reason


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_compressed_members_in_one_file_are_all_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path.write_bytes(pack(lines(3)) + pack(lines(4)))
    records, refusals = split(list(read_extent(whole(path))))
    assert len(records) == 7 and not refusals


def test_parquet_rows_are_records_and_nulls_are_absent(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c" * 300], "id": ["1", "2", "3"]}), path)
    records, refusals = split(list(read_extent(whole(path), max_record_bytes=200)))
    assert [(r.line, r.offset, r.value) for r in records] == [(1, 0, {"text": "a", "id": "1"}), (2, 1, {"id": "2"})]
    assert refusals[0].line == 3 and "more than --max-record-bytes 200" in refusals[0].reason
    path.write_bytes(path.read_bytes()[:-20])
    records, refusals = split(list(read_extent(whole(path))))
    assert not records and "damaged or cut short" in refusals[0].reason


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_members_of_one_name_in_a_tar_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    first = [("d/1.json", b'{"id": 1}'), ("d/1.txt", b"one")]
    write_tar(path, [*first, ("d/2.json", b'{"text": "two"}'), ("d/3.txt", b"3")])
    records, refusals = split(list(read_extent(whole(path))))
    assert [r.value for r in records] == [{"id": 1, "text": "one"}, {"text": "two"}, {"text": "3"}] and not refusals
    assert [r.line for r in records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../1.txt", b"x")], "named outside the archive"),
        ([("/1.txt", b"x")], "named outside the archive"),
        ([("1.txt", b"x"), ("1.jpg", b"x")], "images need the vision build"),
        ([("1.json", b"{")], "invalid JSON"),
        ([("1.txt", b"\xff")], "not UTF-8 at byte 1"),
        ([("1.txt", b"x"), ("1.txt", b"y")], "occurs twice"),
        ([("1.json", b'{"text": "x"}'), ("1.txt", b"y")], "both"),
        ([("1.txt", b"x" * 300)], "more than --max-record-bytes 200"),
    ],
)
def test_a_bad_record_in_a_tar_is_refused_and_the_next_is_read(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [*members, ("z.txt", b"last")])
    records, refusals = split(list(read_extent(whole(path), max_record_bytes=200)))
    assert [r.value for r in records] == [{"text": "last"}]
    assert len(refusals) == 1 and message in refusals[0].reason and refusals[0].line == 1


@pytest.mark.parametrize("keep", [100, 512, 600, 1024, 1100])
def test_a_cut_tar_is_noticed_also_between_members(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [("1.txt", b"one"), ("2.txt", b"two" * 100)])
    path.write_bytes(path.read_bytes()[:keep])
    _, refusals = split(list(read_extent(whole(path))))
    assert len(refusals) == 1 and "damaged or cut short" in refusals[0].reason
