"""Places: paths and URLs answer alike, and a path needs no fsspec."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from megacp.core.storage.place import (
    expanded,
    folders_in,
    open_stream,
    place_of,
    read_content,
    sha256_of,
    suffix_of,
    write_content,
    write_stream,
)
from megacp.core.storage.url import Url
from tests.storage.stores import memory

DATA = bytes(range(256)) * 1000


@pytest.fixture(params=["path", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    """A folder of either kind."""
    return tmp_path if request.param == "path" else memory()


def test_what_is_written_is_read_back(place) -> None:
    write_content(place / "a", DATA)
    assert read_content(place / "a") == DATA
    assert sha256_of(place / "a", len(DATA)) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    with open_stream(place / "a") as stream:
        stream.seek(-300, io.SEEK_END)
        assert stream.read() == DATA[-300:]
        stream.seek(70_001)
        assert stream.read(10) == DATA[70_001:70_011] and stream.tell() == 70_011


def test_a_stream_states_its_size_and_hash(place) -> None:
    stated = write_stream(place / "a", lambda out: [out.write(DATA[:1000]), out.write(DATA[1000:])] and None)
    assert stated == sha256_of(place / "a") == (len(DATA), hashlib.sha256(DATA).hexdigest())


def test_a_file_of_another_size_or_above_the_limit_is_refused_by_name(place) -> None:
    write_content(place / "a", DATA)
    with pytest.raises(ValueError, match=r"a has 256000 bytes, expected 1"):
        open_stream(place / "a", 1)
    with pytest.raises(ValueError, match=r"a has (more than 1,000|256,000) bytes"):
        read_content(place / "a", 1000)
    with pytest.raises(FileNotFoundError):
        read_content(place / "b")


def test_folders_are_listed_in_order(place) -> None:
    for name in ("b", "a"):
        if isinstance(place, Path):
            (place / name).mkdir()
        write_content(place / name / "x", b"1")
    assert [str(folder) for folder in folders_in(place)] == [f"{place}/a", f"{place}/b"]
    assert folders_in(place / "none") == []


def test_patterns_name_the_files_that_fit(place) -> None:
    for name in ("2.jsonl", "1.jsonl", "3.txt"):
        write_content(place / name, b"{}")
    assert [place_of(name).name for name in expanded(f"{place}/*.jsonl")] == ["1.jsonl", "2.jsonl"]
    assert expanded(f"{place}/2.jsonl") == [f"{place}/2.jsonl"]
    with pytest.raises(ValueError, match=r"no file fits .*\*\.zst"):
        expanded(f"{place}/*.zst")


@pytest.mark.parametrize(
    ("path", "suffix"),
    [("a/b.jsonl.gz", ".gz"), ("s3://b/c.tar", ".tar"), ("https://h/x.parquet?download=true", ".parquet")],
)
def test_a_query_is_no_part_of_a_suffix(path: str, suffix: str) -> None:
    assert suffix_of(path) == suffix


@pytest.mark.parametrize("text", ["file:///etc/passwd", "local://a", "simplecache::s3://a/b"])
def test_urls_of_this_machine_and_chains_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give the path itself|no plain URL"):
        Url(text).info()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match="gs://b/c: .*gcsfs"):
        Url("gs://b/c").info()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"URLs need the package fsspec: pip install 'megacp\[store\]'"):
        Url("s3://b/c").info()


def test_paths_need_no_fsspec(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from megacp.prepare.records.read import input_files, plan_units, read_extent\n"
        f"units = plan_units(input_files([{str(tmp_path / '*.jsonl')!r}]), 100)\n"
        "assert len(list(read_extent(units[0].extents[0]))) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
