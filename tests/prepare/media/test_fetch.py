"""What may be fetched for a record: places that the user has allowed, as the client reads a URL, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from megacp.prepare.media.fetch import FetchError, ImageFetcher, prefix_problem
from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.parts import Media, SamplePart
from megacp.prepare.records.record import RecordError
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.storage.s3_server import QuietHandler

LIMIT = 1 << 20
PICTURE = encoded(noise(16, 16))


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server of one picture, and the paths that it was asked for; `jump` leads to `/metadata`."""
    asked: list[str] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        asked.append(request.path)
        to_elsewhere = Response(b"moved", 302, {"Location": f"{request.host_url}metadata"})
        return (to_elsewhere if "jump" in request.path else Response(PICTURE))(environ, start_response)

    made = make_server("127.0.0.1", 0, application, threaded=True, request_handler=QuietHandler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}", asked
    made.shutdown()
    thread.join(10)
    made.server_close()


@pytest.mark.parametrize("prefix", ["https://images.example/photos/", "https://images.example:443/photos"])
@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://images.example/photos/a.png", True),
        ("https://IMAGES.example:443/photos/b/a%20b.png?size=2", True),
        ("https://images.example/photos/a..b.png", True),
        ("https://images.example/photos/x/%2e%2e/a.png", False),
        ("https://images.example/photos/%2e%2e/secret.png", False),
        ("https://images.example/photos/.%2E/secret.png", False),
        ("https://images.example/photos/..%2fsecret.png", False),
        ("https://images.example/photos/..%5csecret.png", False),
        ("https://images.example/photos/..;/secret.png", False),
        ("https://images.example/photos/.\t./secret.png", False),
        ("https://images.example/photos-of-others/a.png", False),
        ("https://images.example/", False),
        ("http://images.example/photos/a.png", False),
        ("https://images.example:444/photos/a.png", False),
        ("https://images.example.evil/photos/a.png", False),
        ("https://images.example@evil/photos/a.png", False),
        ("https://user@images.example/photos/a.png", False),
        ("https://images.example\\@evil/photos/a.png", False),
        ("https://images.example:x/photos/a.png", False),
        ("https://images.example/photos/a.png::file:///etc/passwd", False),
    ],
)
def test_a_web_url_is_allowed_where_its_client_finds_it_below_the_prefix(
    tmp_path: Path, prefix: str, url: str, allowed: bool
) -> None:
    assert ImageFetcher(tmp_path, [prefix], LIMIT).allows(url) is allowed


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://photos/a.png", True),
        ("s3://photos/a%20b.png", True),
        ("s3://photos-of-others/a.png", False),
        ("s3://photos/../others/a.png", False),
        ("gs://photos/a.png", False),
        ("file:///etc/passwd", False),
    ],
)
@pytest.mark.parametrize("prefix", ["s3://photos", "s3://photos/"])
def test_an_object_is_allowed_in_the_bucket_of_the_prefix_alone(
    tmp_path: Path, prefix: str, url: str, allowed: bool
) -> None:
    assert ImageFetcher(tmp_path, [prefix], LIMIT).allows(url) is allowed


def test_no_redirect_is_followed_for_a_url_of_a_record(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    """Would catch an allowed server that sends the build to one inside of the user's network."""
    address, asked = server
    fetcher = ImageFetcher(tmp_path, [f"{address}/photos/"], LIMIT)
    assert fetcher.get(f"{address}/photos/a.png") == PICTURE
    with pytest.raises(FetchError, match=rf"redirects to {address}/metadata \(status 302\), which is not followed"):
        fetcher.get(f"{address}/photos/jump.png")
    assert "/metadata" not in asked


def test_redirects_below_an_image_root_are_followed(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    fetcher = ImageFetcher(tmp_path, [], LIMIT, f"{address}/photos")
    assert fetcher.get(f"{address}/photos/jump.png") == PICTURE and "/metadata" in asked


def test_escaped_dots_leave_no_image_root_that_is_a_url(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    root = f"{address}/photos"
    reader = MediaReader(TINY, root, ImageFetcher(tmp_path, [], LIMIT, root))
    pieces = [SamplePart(None, 0.0, Media("image", "path", "%2e%2e/secret.png", "path"))]
    with pytest.raises(RecordError, match=r"climbs with escaped dots"):
        reader.expand(pieces, {}, [])
    assert asked == []


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ("images.example", "begins no URL"),
        ("https://", "names no place"),
        ("https:///photos", "names no host"),
        ("s3:///photos", "names no host or bucket"),
        ("file:///photos", "give the path itself"),
        ("https://user@images.example/", "more than a scheme, a host and a folder"),
        ("https://images.example/get?file=", "more than a scheme, a host and a folder"),
        ("https://images.example/a/..%2fb", "more than a scheme, a host and a folder"),
    ],
)
def test_a_prefix_that_names_no_place_is_told_with_what_to_write(prefix: str, told: str) -> None:
    problem = prefix_problem(prefix)
    assert problem is not None and told in problem and "such as https://images.example/photos/" in problem
    assert prefix_problem("https://images.example") is None and prefix_problem("s3://photos/") is None
