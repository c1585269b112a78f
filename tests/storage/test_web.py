"""Answers of web servers and stores are limited in time and size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megacp.storage import url as url_module
from megacp.storage.files import TooLargeError
from megacp.storage.place import expanded, open_stream
from megacp.storage.url import UnreachableError, Url
from tests.storage.stores import FlakyStore, flaky, memory, under_flaky
from tests.storage.web_server import PLAIN, Server, bad_server

READS: dict[str, Callable[[Url], Any]] = {
    "content": lambda url: url.content(1 << 20),
    "a range": lambda url: url.read(0, 1 << 20),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with bad_server() as running:
        yield running


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_module, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(url_module, "_SECONDS", 0.1)  # an attempt that is late is the last one


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["drip", "drip_of_known_size"])
def test_a_server_that_sends_a_byte_at_a_time_is_left(
    server: Server, half_a_second: None, name: str, read: str
) -> None:
    begin = time.monotonic()
    reading = READS[read] if name == "drip" else lambda url: url.content(1 << 41)
    with pytest.raises(
        UnreachableError, match=rf"/{name}: \d+ bytes arrived in \d s, which is too slow"
    ):
        reading(Url(f"{server.url}/{name}"))
    assert time.monotonic() - begin < 3


def test_headers_that_come_a_byte_at_a_time_are_left(server: Server, half_a_second: None) -> None:
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="Timeout"):
        Url(f"{server.url}/slow_headers").size()
    assert time.monotonic() - begin < 5


def test_a_fast_answer_may_take_longer_than_the_bound(
    server: Server, half_a_second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_module, "_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(url_module, "_LEAST_RATE", 10)  # a byte each 0.02 s is five times as fast
    begin = time.monotonic()
    with pytest.raises(TooLargeError, match="has more than 20 bytes"):
        Url(f"{server.url}/drip").content(20)
    assert time.monotonic() - begin > 0.3


@pytest.mark.parametrize("name", ["endless", "large"])
@pytest.mark.parametrize("read", READS)
def test_a_body_without_an_end_is_left_at_its_bound(server: Server, name: str, read: str) -> None:
    before = server.sent
    with pytest.raises(
        ValueError, match=r"has more than 1,048,576 bytes|bytes, but 1048576 were requested"
    ):
        READS[read](Url(f"{server.url}/{name}"))
    assert server.sent - before < 64 << 20  # includes the buffers of the sockets


def test_an_index_page_without_an_end_is_left_at_its_bound(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_module, "_PAGE_BYTES", 1 << 20)
    with pytest.raises(
        ValueError, match="has more than 1,048,576 bytes, the size limit for a page"
    ):
        expanded(f"{server.url}/index/*.jsonl")


def test_a_store_that_does_not_answer_is_left(
    half_a_second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = under_flaky(memory()) / "a"
    place.write(b"12345")
    begin = time.monotonic()
    with flaky(0.0):
        monkeypatch.setattr(FlakyStore, "cat_file", lambda *_, **__: begin_waiting())
        for read in (lambda: place.read(0, 5), lambda: place.content(10)):
            with pytest.raises(UnreachableError, match=r"/a: the response took longer than \d s"):
                read()
    assert time.monotonic() - begin < 5


def begin_waiting() -> bytes:
    """Wait longer than any test; `time.sleep` returns immediately while a flaky store is used."""
    threading.Event().wait(10)
    return b""


def test_the_error_of_a_store_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> bytes:
        raise TimeoutError("the store itself is late")

    place = under_flaky(memory()) / "a"
    place.write(b"12345")
    with flaky(0.0):
        monkeypatch.setattr(FlakyStore, "cat_file", late)
        with pytest.raises(UnreachableError, match=r"the store itself is late \(tried 6 times\)"):
            place.read(0, 5)


def test_a_server_that_is_not_there_is_no_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(UnreachableError, match="Cannot connect to host"):
        Url("http://127.0.0.1:9/a.png").size()


def test_an_ipv6_address_is_a_url() -> None:
    try:
        running = bad_server("::1")
        server = running.__enter__()
    except OSError as error:
        pytest.skip(f"this machine has no ::1 ({error})")
    try:
        url = Url(f"{server.url}/plain.jsonl")
        assert (url.scheme, url.name, url.size()) == ("http", "plain.jsonl", len(PLAIN))
        assert url.content(1000) == PLAIN
        with open_stream(url) as stream:
            assert stream.readline() == PLAIN
    finally:
        running.__exit__(None, None, None)


@pytest.mark.parametrize("text", ["zip://a::http://[::1]/b.zip", "simplecache::http://[::1]/a"])
def test_a_chain_of_urls_is_refused_also_with_an_ipv6_address(text: str) -> None:
    with pytest.raises(ValueError, match="not a plain URL"):
        Url(text).info()
