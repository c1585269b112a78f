"""Servers on this machine: reads, writes, retries, and errors for objects that cannot be read."""

from __future__ import annotations

import hashlib
import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
from werkzeug.serving import make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from megacp.storage.place import (
    digest_of,
    expanded,
    folders_in,
    open_stream,
    place_of,
    read_content,
    suffix_of,
    write_content,
    write_stream,
)
from megacp.storage.url import UnreachableError, Url
from megacp.training.data.reader import DataCache, PackedDataset
from tests.storage.s3_server import FaultyServer, QuietHandler, S3Server, s3_server
from tests.storage.stores import FlakyStore, flaky, memory, under_flaky
from tests.training.data.datasets import random_packs, write_dataset


def test_a_store_that_fails_every_third_request_gives_the_same_bytes() -> None:
    url = memory()
    data = bytes(range(256)) * 50
    with flaky(0.3) as store:
        place = under_flaky(url)
        for number in range(10):
            (place / f"{number}").write(data)
            assert (place / f"{number}").read(100, 12_000) == data[100:12_100]
        assert place.sizes_below() == {f"{number}": len(data) for number in range(10)}
    assert store.failed["short read"] and store.failed["write"]
    assert (url / "3").content(1 << 20) == data


@pytest.mark.parametrize(
    ("error", "times"), [(PermissionError("no"), 1), (ConnectionResetError("cut"), 6)]
)
def test_what_passes_is_tried_six_times_and_all_else_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    asked = []

    def refuse(self: FlakyStore, path: str, value: bytes, **kwargs: object) -> None:
        asked.append(1)
        raise error

    monkeypatch.setattr(FlakyStore, "pipe_file", refuse)
    with flaky(0.0), pytest.raises(UnreachableError, match=rf"/a: .*\(tried {times} times\)"):
        (under_flaky(memory()) / "a").write(b"1")
    assert len(asked) == times and not issubclass(UnreachableError, OSError)


@pytest.mark.slow
def test_a_store_that_accepts_and_closes_connections_ends_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def close_all() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=close_all, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")

    s3fs.S3FileSystem.clear_instance_cache()
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="s3://bucket/a"):
        Url("s3://bucket/a").content(10)
    assert time.monotonic() - begin < 60
    s3fs.S3FileSystem.clear_instance_cache()
    listener.close()


DATA = bytes(range(256)) * 100


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Url, FaultyServer]]:
    """Serve the files of `tmp_path`; `/whole/` ignores ranges, and `/endless/` reports no sizes."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        kind, _, name = environ["PATH_INFO"].lstrip("/").partition("/")
        path = tmp_path / name
        if not path.is_file():
            answer = Response(status=404)
        elif kind == "ranges":
            answer = send_file(path, environ, conditional=True)
        elif kind == "whole":
            answer = Response(path.read_bytes(), headers={"Accept-Ranges": "none"})
        else:
            answer = Response(part for part in [path.read_bytes()])
        return answer(Request(environ).environ, start_response)

    faults = FaultyServer(application)
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=QuietHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Url(f"http://127.0.0.1:{server.server_port}"), faults
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_file_is_read_by_ranges(web: tuple[Url, FaultyServer], tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    url = web[0] / "ranges" / "a.bin"
    assert (url.size(), url.read(1000, 300), url.content(1 << 20)) == (
        len(DATA),
        DATA[1000:1300],
        DATA,
    )
    assert "ETag" in url.version() or "mtime" in url.version() or url.version() == ""
    with open_stream(url) as stream:
        stream.seek(-3, 2)
        assert stream.read() == DATA[-3:]


def test_a_dataset_is_read_from_a_failing_web_server(
    web: tuple[Url, FaultyServer], tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", [random_packs(np.random.default_rng(0), 12)])
    web[1].share = 0.05
    there = PackedDataset(web[0] / "ranges" / "data", DataCache(tmp_path / "cache"))
    here = PackedDataset(tmp_path / "data")
    assert [there.pack(i).tokens.tolist() for i in range(12)] == [
        here.pack(i).tokens.tolist() for i in range(12)
    ]


def test_what_is_not_there_and_what_has_no_ranges_or_sizes_is_told(
    web: tuple[Url, FaultyServer], tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    with pytest.raises(FileNotFoundError, match="ranges/none"):
        (web[0] / "ranges" / "none").size()
    with pytest.raises(ValueError, match=r"whole/a.bin: .*25600 bytes, but 100 were requested"):
        (web[0] / "whole" / "a.bin").read(0, 100)
    with pytest.raises(ValueError, match=r"endless/a.bin: the server does not report its size"):
        (web[0] / "endless" / "a.bin").size()
    assert not (web[0] / "ranges").lists


LARGE = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def folder(server: S3Server, request: pytest.FixtureRequest) -> Url:
    """Return a separate folder for a test."""
    server.faults.share = 0.0
    return server.bucket / request.node.name.replace("[", "_").replace("]", "")


def test_what_is_written_is_read_back(folder: Url, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LARGE)
    (folder / "a").upload(tmp_path / "a")
    (folder / "b" / "c").write(b"12345")
    assert (folder / "d").stream(lambda out: [out.write(LARGE), out.write(b"1")] and None) == (
        len(LARGE) + 1,
        hashlib.sha256(LARGE + b"1").hexdigest(),
    )
    assert folder.sizes_below() == {"a": len(LARGE), "b/c": 5, "d": len(LARGE) + 1}
    assert [child.name for child in folder.children()] == ["a", "b", "d"]
    assert (folder / "a").read(1_000_003, 500) == LARGE[1_000_003:1_000_503]
    assert digest_of(folder / "a") == (len(LARGE), hashlib.sha256(LARGE).hexdigest())
    assert (folder / "*").matches() == [folder / "a", folder / "d"]
    assert folder.is_dir() and (folder / "b").exists() and not (folder / "b").parent.name == "b"


def test_a_failed_stream_leaves_no_object(folder: Url) -> None:
    def fails(out: object) -> None:
        out.write(LARGE)  # type: ignore[attr-defined]
        raise RuntimeError("the disk of this rank is gone")

    with pytest.raises(UnreachableError, match="the disk of this rank is gone"):
        (folder / "a").stream(fails)
    assert not (folder / "a").exists()


@pytest.mark.slow
def test_a_server_that_fails_one_request_in_twenty_and_cuts_connections_gives_the_same_bytes(
    server: S3Server, folder: Url, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(LARGE[:100_000])
    server.faults.share = 0.05
    server.faults.faults.clear()

    def round_trip(number: int) -> bool:
        url = folder / f"{number}"
        url.upload(tmp_path / "a")
        return (
            url.content(1 << 20) == LARGE[:100_000]
            and url.read(50_000, 1000) == LARGE[50_000:51_000]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(80)))
    assert len(folder.sizes_below()) == 80
    assert {"busy", "cut", "gone"} <= set(server.faults.faults), server.faults.faults


def test_wrong_names_are_told_at_once(server: S3Server, folder: Url) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{folder}/none"):
        (folder / "none").content(10)
    nowhere = Url("s3://no-such-bucket-of-this-server/a")
    assert not nowhere.exists() and nowhere.sizes_below() == {} and nowhere.children() == []
    with pytest.raises((UnreachableError, FileNotFoundError), match="no-such-bucket"):
        nowhere.write(b"1")


SMALL = bytes(range(256)) * 1000


@pytest.fixture(params=["path", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    """Return a local or a remote folder."""
    return tmp_path if request.param == "path" else memory()


def test_what_is_written_at_a_place_is_read_back(place) -> None:
    write_content(place / "a", SMALL)
    assert read_content(place / "a") == SMALL
    assert digest_of(place / "a", len(SMALL)) == (len(SMALL), hashlib.sha256(SMALL).hexdigest())
    with open_stream(place / "a") as stream:
        stream.seek(-300, io.SEEK_END)
        assert stream.read() == SMALL[-300:]
        stream.seek(70_001)
        assert stream.read(10) == SMALL[70_001:70_011] and stream.tell() == 70_011


def test_a_stream_states_its_size_and_hash(place) -> None:
    stated = write_stream(
        place / "a", lambda out: [out.write(SMALL[:1000]), out.write(SMALL[1000:])] and None
    )
    assert stated == digest_of(place / "a") == (len(SMALL), hashlib.sha256(SMALL).hexdigest())


def test_a_file_of_another_size_or_above_the_limit_is_refused_by_name(place) -> None:
    write_content(place / "a", SMALL)
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
    with pytest.raises(ValueError, match=r"no file matches .*\*\.zst"):
        expanded(f"{place}/*.zst")


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        ("a/b.jsonl.gz", ".gz"),
        ("s3://b/c.tar", ".tar"),
        ("https://h/x.parquet?download=true", ".parquet"),
    ],
)
def test_a_query_is_no_part_of_a_suffix(path: str, suffix: str) -> None:
    assert suffix_of(path) == suffix


@pytest.mark.parametrize("text", ["file:///etc/passwd", "local://a", "simplecache::s3://a/b"])
def test_urls_of_this_machine_and_chains_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give the path itself|not a plain URL"):
        Url(text).info()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match="gs://b/c: .*gcsfs"):
        Url("gs://b/c").info()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        ValueError, match=r"URLs need the package fsspec: pip install -e '\.\[store\]'"
    ):
        Url("s3://b/c").info()


def test_paths_need_no_fsspec(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from megacp.prepare.records.read import plan_units, read_extent\n"
        f"units = plan_units([{str(tmp_path / 'a.jsonl')!r}], 100)\n"
        "assert len(list(read_extent(units[0].extents[0]))) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
