"""An S3 server on this machine: a URL of it is written, read, listed, patterned and removed, also while it fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import s3fs

from megacp.core.storage.place import open_stream, sha256_of
from megacp.core.storage.url import UnreachableError, Url
from tests.storage.s3_server import S3Server, s3_server

DATA = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def folder(server: S3Server, request: pytest.FixtureRequest) -> Url:
    """A folder of the test's own."""
    server.faults.share = 0.0
    return server.bucket / request.node.name.replace("[", "_").replace("]", "")


def test_what_is_written_is_read_back(folder: Url, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    (folder / "a").upload(tmp_path / "a")
    (folder / "b" / "c").write(b"12345")
    assert (folder / "d").stream(lambda out: [out.write(DATA), out.write(b"1")] and None) == (
        len(DATA) + 1,
        hashlib.sha256(DATA + b"1").hexdigest(),
    )
    assert folder.sizes_below() == {"a": len(DATA), "b/c": 5, "d": len(DATA) + 1}
    assert [child.name for child in folder.children()] == ["a", "b", "d"]
    assert (folder / "a").read(1_000_003, 500) == DATA[1_000_003:1_000_503]
    assert sha256_of(folder / "a") == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert (folder / "*").matches() == [folder / "a", folder / "d"]
    assert folder.is_dir() and (folder / "b").exists() and not (folder / "b").parent.name == "b"


def test_a_stream_seeks(folder: Url) -> None:
    (folder / "a").write(DATA)
    with open_stream(folder / "a", len(DATA)) as stream:
        for offset in (9_000_000, 5, 4_194_300, 10_239_990):
            stream.seek(offset)
            assert stream.read(50) == DATA[offset : offset + 50]


def test_what_is_replaced_or_removed_is_seen_at_once(folder: Url) -> None:
    """Would catch a listing or an ETag that is remembered, while another machine writes."""
    url = folder / "a"
    url.write(b"1")
    before = url.version()
    assert before.startswith("ETag ") and folder.sizes_below() == {"a": 1}
    url.write(b"2")
    assert url.version() != before
    elsewhere = s3fs.S3FileSystem(skip_instance_cache=True)
    elsewhere.pipe_file((folder / "b").text, b"3")
    assert folder.sizes_below() == {"a": 1, "b": 1} and folder.children() == [folder / "a", folder / "b"]
    elsewhere.pipe_file((folder / "b").text, b"33")
    assert (folder / "b").size() == 2
    url.unlink()
    url.unlink()
    assert not url.exists() and [child.name for child in folder.children()] == ["b"]
    folder.remove_below()
    assert not folder.exists() and folder.children() == [] and folder.sizes_below() == {}


def test_a_failed_stream_leaves_no_object(folder: Url) -> None:
    def fails(out: object) -> None:
        out.write(DATA)  # type: ignore[attr-defined]
        raise RuntimeError("the disk of this rank is gone")

    with pytest.raises(UnreachableError, match="the disk of this rank is gone"):
        (folder / "a").stream(fails)
    assert not (folder / "a").exists()


@pytest.mark.slow
def test_a_server_that_fails_one_request_in_twenty_and_cuts_connections_gives_the_same_bytes(
    server: S3Server, folder: Url, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(DATA[:100_000])
    server.faults.share = 0.05
    server.faults.faults.clear()

    def round_trip(number: int) -> bool:
        url = folder / f"{number}"
        url.upload(tmp_path / "a")
        return url.content(1 << 20) == DATA[:100_000] and url.read(50_000, 1000) == DATA[50_000:51_000]

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
