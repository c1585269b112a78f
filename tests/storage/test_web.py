"""A web server on this machine: files are read by ranges, and what cannot be read so is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from werkzeug.serving import make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from megacp.core.data.reader import DataCache, PackedDataset
from megacp.core.storage.place import open_stream
from megacp.core.storage.url import Url
from tests.data.datasets import random_packs, write_dataset
from tests.storage.s3_server import FaultyServer, QuietHandler

DATA = bytes(range(256)) * 100


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Url, FaultyServer]]:
    """The files of `tmp_path`; `/whole/` gives no ranges, and `/endless/` no sizes."""

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
    assert (url.size(), url.read(1000, 300), url.content(1 << 20)) == (len(DATA), DATA[1000:1300], DATA)
    assert "ETag" in url.version() or "mtime" in url.version() or url.version() == ""
    with open_stream(url) as stream:
        stream.seek(-3, 2)
        assert stream.read() == DATA[-3:]


def test_a_dataset_is_read_from_a_failing_web_server(web: tuple[Url, FaultyServer], tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [random_packs(np.random.default_rng(0), 12)])
    web[1].share = 0.05
    there = PackedDataset(web[0] / "ranges" / "data", DataCache(tmp_path / "cache"))
    here = PackedDataset(tmp_path / "data")
    assert [there.pack(i).tokens.tolist() for i in range(12)] == [here.pack(i).tokens.tolist() for i in range(12)]


def test_what_is_not_there_and_what_has_no_ranges_or_sizes_is_told(
    web: tuple[Url, FaultyServer], tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    with pytest.raises(FileNotFoundError, match="ranges/none"):
        (web[0] / "ranges" / "none").size()
    with pytest.raises(ValueError, match=r"whole/a.bin: .*25600 bytes where 100 were asked for"):
        (web[0] / "whole" / "a.bin").read(0, 100)
    with pytest.raises(ValueError, match=r"endless/a.bin: the server does not say how large it is"):
        (web[0] / "endless" / "a.bin").size()
    assert not (web[0] / "ranges").lists
