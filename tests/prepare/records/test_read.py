"""Readers yield each record exactly once for any cut and format, and report where bad ones are."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp.prepare.records.read import (
    Extent,
    LinesBefore,
    input_problem,
    plan_units,
    read_extent,
    records_before,
)
from megacp.prepare.records.record import Record, Refusal
from tests.prepare.packs import builds

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}
ROWS = [{"text": "a"}, {"text": "b", "meta": {"x": 1, "y": None}}, {"text": None, "id": "3"}]
READ = [{"text": "a"}, {"text": "b", "meta": {"x": 1}}, {"id": "3"}]


def read(path: Path, limit: int = 1 << 20) -> tuple[list[Record], list[Refusal]]:
    items = list(read_extent(Extent(0, str(path), 0, path.stat().st_size), limit))
    return [i for i in items if isinstance(i, Record)], [i for i in items if isinstance(i, Refusal)]


def values(path: Path, limit: int = 1 << 20) -> list[Any]:
    return [record.value for record in read(path, limit)[0]]


def lines(count: int) -> bytes:
    return b"".join(
        json.dumps({"text": f"document {i} " + "x" * (i % 7)}).encode() + b"\n"
        for i in range(count)
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    path.write_bytes(b"\xef\xbb\xbf" * ends + data + (newline if ends else b""))
    extents = [extent for unit in plan_units([str(path)], unit_bytes) for extent in unit.extents]
    records = [item for extent in extents for item in read_extent(extent)]
    assert [item.value["text"] for item in records if isinstance(item, Record)] == texts
    before = LinesBefore()
    for order in (1, -1):
        numbers = [
            before(extent) + item.line
            for extent in extents[::order]
            for item in read_extent(extent)
        ]
        assert sorted(numbers) == list(range(1, len(texts) + 1))


def test_units_group_small_files_and_cut_large_ones(tmp_path: Path) -> None:
    for name, count in (("a.jsonl", 1), ("b.jsonl", 1), ("c.jsonl", 40), ("d.jsonl.gz", 40)):
        (tmp_path / name).write_bytes(lines(count))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    paths = [
        str(tmp_path / name)
        for name in ("a.jsonl", "b.jsonl", "empty.jsonl", "c.jsonl", "d.jsonl.gz")
    ]
    units = plan_units(paths, 400)
    assert [e.source for e in units[0].extents] == [0, 1]
    size = (tmp_path / "c.jsonl").stat().st_size
    cut = [e for unit in units for e in unit.extents if e.source == 3]
    assert len(cut) == -(-size // 400) and (cut[0].start, cut[-1].stop) == (0, size)
    assert all(a.stop == b.start for a, b in zip(cut, cut[1:], strict=False))
    assert len([e for unit in units for e in unit.extents if e.source == 4]) == 1
    assert [unit.index for unit in units] == list(range(len(units)))


@pytest.mark.parametrize("bad", [b"{", b'{"text": "\xfe"}', b'"' + b"x" * 300 + b'"'])
@pytest.mark.parametrize("suffix", PACK)
def test_a_bad_line_is_refused_with_its_place_and_reading_goes_on(
    tmp_path: Path, bad: bytes, suffix: str
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    # blank lines are not records
    path.write_bytes(PACK[suffix](lines(5) + bad + b"\n" + lines(3) + b"\n  \r\n"))
    records, (refusal,) = read(path, 200)
    assert len(records) == 8 and (refusal.file, refusal.line, refusal.offset) == (
        str(path),
        6,
        len(lines(5)),
    )
    assert str(refusal).startswith(f"{path}:6: ")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_several_members_is_read_whole_and_a_cut_or_damaged_one_is_told(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](lines(3)) + PACK[suffix](lines(4)))
    assert len(values(path)) == 7
    whole = PACK[suffix](lines(20_000))
    for data in (whole[: len(whole) * 3 // 4], whole[:-1], b"this is no compressed file"):
        path.write_bytes(data)
        records, (refusal,) = read(path)
        assert [r.value for r in records] == [
            json.loads(line) for line in lines(20_000).splitlines()[: len(records)]
        ]
        assert refusal.line == len(records) + 1 and (len(records) > 5_000) == (data[:4] != b"this")


# ---- tables


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(
        pa.table(
            {key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}}
        ),
        path,
    )
    return path


def test_rows_of_a_table_are_records_and_a_cut_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    records, _ = read(write(path, ROWS))
    assert [r.value for r in records] == READ and [(r.line, r.offset) for r in records] == [
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    rows = [{"text": "a"}, {"text": "x" * 5000}, {"text": "c"}]
    records, (refusal,) = read(write(path, rows), 1000)
    assert [r.value for r in records] == [rows[0], rows[2]] and refusal.line == 2
    whole = write(path, ROWS * 2).read_bytes()
    for size in range(0, len(whole), 8):
        path.write_bytes(whole[:size])
        records, refusals = read(path)
        assert len(records) <= 6 and len(refusals) == 1
    arrow = pytest.importorskip("pyarrow")
    texts = arrow.array(["1", "{", "3"]).cast(arrow.json_())
    columns = [arrow.array(["a", "b", "c"]), arrow.array([1, 2, 3]), texts]
    pq.write_table(arrow.Table.from_arrays(columns, names=["text", "id", "id"]), path)
    records, (refusal,) = read(path)
    assert [r.value for r in records] == [
        {"text": "a", "id": 1},
        {"text": "c", "id": 3},
    ] and refusal.line == 2


# ---- tars


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_members_of_one_name_in_a_tar_are_one_record_and_a_cut_one_is_told(tmp_path: Path) -> None:
    twice = b'{"id": 1, "caption": "one"}'  # as img2dataset writes it
    members = [
        ("d/1.json", twice),
        ("d/1.txt", b"one"),
        ("d/2.json", b'{"text": "two"}'),
        ("d/3.v2.TXT", b"3"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    records, refusals = read(path)
    assert [r.value for r in records] == [
        {"id": 1, "text": "one"},
        {"text": "two"},
        {"text": "3"},
    ] and not refusals
    assert [r.line for r in records] == [1, 2, 3]
    assert [r.value["text"] for r in read(write_tar(path, [*members[2:], *members[2:]]))[0]] == [
        "two",
        "3",
    ] * 2
    apart = [
        ("d/1.json", b'{"text": "x"}'),
        ("d/2.json", b'{"text": "y"}'),
        ("d/1.txt", b"one"),
        ("d/2.txt", b"two"),
    ]
    records, refusals = read(write_tar(path, apart))
    assert [r.value["text"] for r in records] == ["x", "y"] and [r.line for r in refusals] == [3, 4]
    assert "'d/1' are not consecutive (bytes 0 and 2048)" in refusals[0].reason
    whole = write_tar(path, [("1.txt", b"one"), ("2.txt", b"two" * 100)]).read_bytes()
    for keep in (100, 512, 600, 1024, 1100):
        path.write_bytes(whole[:keep])
        assert len(read(path)[1]) == 1


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("../1.txt", b"x")], "../1.txt"),
        ([("/1.txt", b"x")], "/1.txt"),
        ([("1.txt", b"x"), ("1.jpg", b"x")], "1.jpg"),
        ([("1.json", b"{")], "column 2"),
        ([("1.txt", b"\xff")], "byte 1"),
        ([("1.txt", b"x"), ("1.txt", b"y")], "1.txt"),
        ([("1.a.txt", b"x"), ("1.b.txt", b"y")], "'1.b.txt' is not the only .txt"),
        ([("1.json", b'{"text": "x"}'), ("1.txt", b"y")], ".txt"),
        ([("1.txt", b"x" * 300)], "--max-record-bytes 200"),
    ],
)
def test_a_bad_record_in_a_tar_is_refused_and_the_next_is_read(
    tmp_path: Path, members: list[tuple[str, bytes]], named: str
) -> None:
    records, (refusal,) = read(write_tar(tmp_path / "a.tar", [*members, ("z.txt", b"last")]), 200)
    assert (
        [r.value for r in records] == [{"text": "last"}]
        and named in refusal.reason
        and refusal.line == 1
    )


# ---- JSON without one record per line

TALKS = [
    [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}\u00e9"}]
    for i in range(40)
]
RECORDS = [{"messages": talk, "id": i} for i, talk in enumerate(TALKS)]


def test_objects_over_many_lines_are_read_as_jq_prints_them(tmp_path: Path) -> None:
    """The lines and numbers of records stay correct if units cut the file."""
    for name, indent in (("a.jsonl", 2), ("b.json", "\t")):
        text = "\n".join(
            json.dumps(record, indent=indent, ensure_ascii=False) for record in RECORDS
        )
        path = tmp_path / name
        path.write_text(text + "\n", encoding="utf-8")
        assert values(path) == RECORDS
        extents = [extent for unit in plan_units([str(path)], 700) for extent in unit.extents]
        assert len(extents) > 5
        found, before = list[Record](), LinesBefore()
        for extent in extents:
            for item in read_extent(extent):
                assert isinstance(item, Record)
                assert records_before(extent) + item.number == item.value["id"] + 1
                line = (
                    text[
                        : text.index(json.dumps(item.value, indent=indent, ensure_ascii=False))
                    ].count("\n")
                    + 1
                )
                assert before(extent) + item.line == line
                found.append(item)
        assert [item.value for item in found] == RECORDS
        data = path.read_bytes()
        assert all(
            json.loads(data[item.offset : item.offset + item.size]) == item.value for item in found
        )
    path.write_text(json.dumps(RECORDS[0], indent=2))
    assert values(path) == RECORDS[:1]
    path.write_text(json.dumps(RECORDS[0]).replace("}, ", "},\n  "))  # as formatted by hand
    assert values(path) == RECORDS[:1]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert values(tmp_path / "c.jsonl.gz") == RECORDS


def test_a_list_of_messages_is_one_record_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for count in (1, 40):
        path.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS[:count]))
        assert values(path) == TALKS[:count]
        assert [e for unit in plan_units([str(path)], 300) for e in unit.extents][0].start == 0
    path.write_text(json.dumps(TALKS))  # an array of lists has one record per list
    assert values(path) == TALKS
    path.write_text(json.dumps(RECORDS) + "\n")
    assert values(path) == RECORDS
    # read as an array, its elements are not records; the parser refuses them later
    path.write_text(json.dumps(TALKS[0], indent=1))
    assert values(path) == TALKS[0]


@pytest.mark.parametrize("first", ["{", '{"text": "cut', '{"text": "a"} {', "{\n"])
def test_a_bad_first_line_of_lines_is_still_one_bad_line(tmp_path: Path, first: str) -> None:
    """A single brace is different: only a multi-line object begins with it."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(first.encode() + b"\n" + lines(3))
    records, refusals = read(path)
    assert len(refusals) == 1 and len(records) == (0 if first.strip() == "{" else 3)


def test_an_error_in_an_array_has_the_records_number_in_every_unit(tmp_path: Path) -> None:
    bad = {5: {"text": 3}, 33: {"body": 1}}
    records = [bad.get(i, {"text": f"document {i}"}) for i in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(records))
    builds.run([path], tmp_path / "d", unit_bytes=200, on_error="skip")
    rejects = [
        json.loads(line) for line in (tmp_path / "d" / "rejects.jsonl").read_text().splitlines()
    ]
    assert [reject["number"] for reject in rejects] == [6, 34] and {
        reject["line"] for reject in rejects
    } == {1}
    with pytest.raises(
        ValueError, match=r"a.json:1: `text` is a number .*\(record 6, byte offset \d+\)"
    ):
        builds.run([path], tmp_path / "e", unit_bytes=200)
    path.write_text(json.dumps(records[:3])[:-1] + ', {"text": }]')
    _, (refusal,) = read(path)
    assert refusal.number == 4 and "(record 4, byte offset" in str(refusal)
    path.write_bytes(lines(2) + b"{")
    _, (refusal,) = read(path)
    assert "record" not in str(refusal)


# ---- files without records


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (
            "a.xlsx",
            "pandas.read_excel('{path}').to_json('{folder}/a.jsonl', orient='records', lines=True)",
        ),
        ("a.arrow", "datasets.Dataset.from_file('{path}').to_parquet('{folder}/a.parquet')"),
        ("a.jsonl.bz2", "bunzip2 -k {path}"),
        ("a.tar.gz", "gunzip -c {path} > {folder}/a.tar"),
    ],
)
def test_a_file_that_is_not_read_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, name: str, way: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"anything")
    problem = input_problem(str(path))
    assert problem is not None and f"{path}: " in problem and "use .jsonl" in problem
    assert way.format(path=path, folder=tmp_path) in problem


def test_a_folder_is_refused_with_what_to_give_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    assert "without a supported file (.jsonl" in str(input_problem(str(folder)))
    (folder / "data" / "train-0.parquet").write_bytes(b"")
    assert f"give the files in it, as '{folder}/*/*.parquet'" in str(input_problem(str(folder)))
    (folder / "a.jsonl").write_bytes(b"")
    assert f"as '{folder}/*.jsonl'" in str(input_problem(str(folder)))


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_for_datasets_folders_and_arrow_files_work(tmp_path: Path) -> None:
    """Run the commands of the messages in separate interpreters."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "split"))
    (arrow,) = (tmp_path / "one").glob("*.arrow")
    for path in (tmp_path / "one", tmp_path / "split", arrow):
        problem = str(input_problem(str(path)))
        command = problem.partition("To convert it: python -c ")[2].strip('"')
        subprocess.run(
            [sys.executable, "-c", command], check=True, capture_output=True, timeout=100
        )
    for made in (
        tmp_path / "one.parquet",
        tmp_path / "split.parquet",
        arrow.with_suffix(".parquet"),
    ):
        assert values(made) == [{"text": "a"}, {"text": "b"}]
