"""Small files that decompress to more than may be held: read in little memory or refused, and nothing else lost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.read import Extent, read_extent
from megacp.prepare.records.record import Record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads peak memory in /proc"),
]
ROOT = Path(__file__).resolve().parents[3]
WHOLE, LARGE = 750_000_000, 3_000_000
LIMIT_MIB = 600
PROGRAM = """
import sys
from pathlib import Path
from megacp.prepare.records.read import Extent
from megacp.prepare.records.read import read_extent
from megacp.prepare.records.record import Record
path = sys.argv[1]
items = read_extent(Extent(0, path, 0, Path(path).stat().st_size))
kinds = ["record" if isinstance(item, Record) else item.reason for item in items]
# of this program alone: what getrusage tells begins with the memory of the one that started it
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak // 1024, len(kinds), kinds[0], kinds[-1], sep="\\n")
"""


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """The memory of large tables goes back to the system: pyarrow keeps it for the life of the process."""
    yield
    if pyarrow := sys.modules.get("pyarrow"):
        pyarrow.default_memory_pool().release_unused()


def read_alone(path: Path) -> tuple[int, int, str, str]:
    """Peak memory in MiB of a process that reads a file, its items, the first and the last of them."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    peak, count, first, last = run.stdout.splitlines()
    return int(peak), int(count), first, last


def equal_rows(pa: Any, value: Any, count: int) -> Any:
    """A column that holds its value once in this process, however many rows it has."""
    return pa.chunked_array([pa.array([value])] * count)


def write_compressed(path: Path) -> None:
    """A line of 750 MB between two sound ones."""
    zstandard = pytest.importorskip("zstandard")
    sound = json.dumps({"text": "a"}).encode() + b"\n"
    block = b"x" * 1_000_000
    with open(path, "wb") as stream, zstandard.ZstdCompressor(level=1).stream_writer(stream) as writer:
        writer.write(sound + b'{"text": "')
        for _ in range(WHOLE // len(block)):
            writer.write(block)
        writer.write(b'"}\n' + sound)


def test_a_small_zst_of_a_huge_line_is_read_in_little_memory(tmp_path: Path) -> None:
    """Would catch a decoder that is given more than it can decompress at once."""
    path = tmp_path / "a.jsonl.zst"
    write_compressed(path)
    assert path.stat().st_size < 200_000
    items = list(read_extent(Extent(0, str(path), 0, path.stat().st_size), 1000))
    assert [isinstance(item, Record) for item in items] == [True, False, True]
    peak, count, first, last = read_alone(path)
    assert (count, first, last) == (3, "record", "record") and peak < LIMIT_MIB, peak


@pytest.mark.parametrize("nested", [False, True])
def test_a_small_parquet_of_equal_long_strings_is_read_in_little_memory(tmp_path: Path, nested: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    text = "x" * LARGE
    value: Any = [{"role": "assistant", "content": text}] if nested else text
    path = tmp_path / "a.parquet"
    table = pa.table({"messages" if nested else "text": equal_rows(pa, value, 250)})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 200_000
    peak, count, first, last = read_alone(path)
    assert (count, first, last) == (250, "record", "record") and peak < LIMIT_MIB, peak


def test_a_small_parquet_of_a_huge_page_is_refused_and_its_other_rows_are_read(tmp_path: Path) -> None:
    """Would catch a page that is decompressed whole because nobody compared its sizes."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    large, small = (pa.table({"text": equal_rows(pa, *column)}) for column in (("x" * LARGE, 250), ("a", 1)))
    one_page = {"use_dictionary": False, "data_page_size": 2**31 - 1}
    with pq.ParquetWriter(path, large.schema, compression="zstd", **one_page) as writer:
        for table in (small, large, small):
            writer.write_table(table)
    assert path.stat().st_size < 200_000
    peak, count, first, last = read_alone(path)
    assert (count, first, last) == (3, "record", "record") and peak < LIMIT_MIB, peak
    record, refusal, other = read_extent(Extent(0, str(path), 0, path.stat().st_size))
    assert refusal.line == 2 and other.line == 252 and isinstance(record, Record)
    assert "row group 1 of 250 rows: " in str(refusal) and "column text decompress to 750" in str(refusal)


def test_a_row_larger_than_the_limit_is_refused_and_its_neighbours_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows: list[Any] = [[{"role": "user", "content": "x" * size}] for size in (10, 150, 300, 10)]
    pq.write_table(pa.table({"messages": rows}), path)
    items = list(read_extent(Extent(0, str(path), 0, path.stat().st_size), 200))
    assert [isinstance(item, Record) for item in items] == [True, True, False, True]
    assert [item.line for item in items] == [1, 2, 3, 4]
    refused = items[2]
    assert not isinstance(refused, Record) and "more than --max-record-bytes 200" in refused.reason


def test_the_members_of_a_record_count_together(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, size in (("1.json", 10), ("1.a.png", 100), ("1.b.png", 100), ("2.txt", 5)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(b" " * size))
    items = list(read_extent(Extent(0, str(path), 0, path.stat().st_size), 200, media=True))
    assert [isinstance(item, Record) for item in items] == [False, True]
    assert "'1.b.png' have 210 bytes, more than --max-record-bytes 200" in str(items[0])
