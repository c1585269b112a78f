"""An object in a store, or a folder of them, by its URL: what fsspec can do with it, with retries.

A `Url` is text, as a Path is. Each call asks the store anew, since other machines write there.
Credentials and endpoints come from the files and variables that each library reads by itself.

A store that is not reached ends as one ValueError that names the object. It is no OSError: a reader
of records takes those for damage of the file, and would go on behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import io
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megacp.storage.files import TooLargeError
from megacp.storage.wording import for_terminal

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_WEB = ("http", "https")
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "blob_id",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""What stores say of an object's content, the surest first."""
_PART = 64 << 20
"""Bytes that are sent, or asked for, at a time."""
_CONNECT_SECONDS, _SILENT_SECONDS = 10, 30
_ANSWER_SECONDS = 30.0
"""A whole answer may take this long, however often a byte of it arrives, ..."""
_LEAST_RATE = 256 << 10
"""... and a second more for each of these bytes: a slow line still gets a large file."""
_LISTING_SECONDS = 1800.0
"""A list of a store's objects may take this long; it is many requests."""
_PAGE_BYTES = 64 << 20
"""Bytes of the longest answer of a web server that is not a file, such as an index page."""
_ATTEMPTS, _SECONDS = 6, 15.0
"""A request is not repeated once it was tried so often, or for so long."""
_TRANSIENT = (408, 425, 429)
"""Refusals of a server that pass; its own errors, 500 and above, do too."""


class UnreachableError(ValueError):
    """An object that cannot be read or written, however often it was tried; the message names
    it.
    """


def is_url(text: object) -> bool:
    """Whether a text names an object in a store, not a path."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


@dataclass(frozen=True, order=True)
class Url:
    """A URL that fsspec knows, without a slash at its end. FileNotFoundError and UnreachableError
    name it.
    """

    text: str
    guard: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """A middleware of aiohttp that sees each request to a web server, redirects too, and raises
    ValueError.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.rstrip("/"))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return replace(self, text=f"{self.text}/{name}")

    @property
    def scheme(self) -> str:
        """`s3` of `s3://bucket/key`; ValueError for a chain of URLs and for paths of this
        machine.
        """
        match = _SCHEME.match(self.text)
        # fsspec chains URLs by `::`; at a web server that is part of an IPv6 address or of a name
        is_chain = "::" in self.text and (match is None or match[1] not in _WEB)
        if match is None or is_chain:
            raise ValueError(f"{self.text} is no plain URL, such as s3://bucket/key")
        if match[1] in ("file", "local"):
            raise ValueError(f"{self.text}: give the path itself, without {match[0]}")
        return match[1]

    @property
    def lists(self) -> bool:
        """Whether the store can say what lies in a folder; a web server cannot."""
        return self.scheme not in _WEB

    @property
    def name(self) -> str:
        """What follows the last slash; without a query, where a server takes one."""
        last = self.text.rsplit("/", 1)[-1]
        return last.partition("?")[0] if self.text.startswith("http") else last

    @property
    def parent(self) -> Url:
        """The folder that it is in."""
        return Url(self.text.rsplit("/", 1)[0])

    def resolve(self) -> Url:
        """Itself: there are no links."""
        return self

    def info(self) -> dict[str, Any]:
        """What the store says of it; FileNotFoundError where nothing is."""
        return self._do(lambda fs, path: dict(fs.info(path)), _ANSWER_SECONDS)

    def exists(self) -> bool:
        """Whether an object or a folder has this name."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether objects have names that begin with it and a slash."""
        try:
            return self.info()["type"] == "directory"
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """Bytes of an object. ValueError for a folder, and where the server does not say."""
        info = self.info()
        if info["type"] == "directory":
            raise ValueError(f"{self} is a directory")
        if info.get("size") is None:
            raise ValueError(f"{self}: the server does not say how large it is; download it first")
        return int(info["size"])

    def version(self) -> str:
        """Some words that differ once the object's content does; empty where the store says nothing
        of it.
        """
        info = self.info()
        return next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from byte `offset` on, which must be there."""
        parts = [
            self._read(at, min(_PART, offset + count - at))
            for at in range(offset, offset + count, _PART)
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, offset: int, count: int) -> bytes:
        def attempt(fs: Any, path: str) -> bytes:
            if self.lists:
                data: bytes = fs.cat_file(path, start=offset, end=offset + count)
                found = len(data)
            else:
                data, found = _from_web(fs, path, count, offset)
            if found > count:
                raise ValueError(
                    f"{self}: the server gives {found} bytes where {count} were asked for"
                )
            if found < count:
                raise ConnectionError(f"{found} of {count} bytes at {offset} came")
            return data

        return self._do(attempt, _ANSWER_SECONDS + count / _LEAST_RATE)

    def content(self, limit: int) -> bytes:
        """Return all of an object. Raises TooLargeError above `limit` bytes."""
        if not self.lists:
            data, found = self._do(lambda fs, path: _from_web(fs, path, limit))
        else:
            info = self.info()
            if info["type"] == "directory":
                raise ValueError(f"{self} is a directory")
            stated = info.get("size") or 0
            if stated > limit:
                raise TooLargeError(
                    f"{self} has {stated:,} bytes, more than {limit:,}, the most that is read of it"
                )
            data = self._do(
                lambda fs, path: fs.cat_file(path), _ANSWER_SECONDS + stated / _LEAST_RATE
            )
            found = len(data)
        if found > limit:
            raise TooLargeError(
                f"{self} has more than {limit:,} bytes, the most that is read of it"
            )
        return data

    def write(self, data: bytes) -> None:
        """Make or replace the object: others see the old or the new content, never a part."""
        self._do(lambda fs, path: fs.pipe_file(path, data))

    def upload(self, source: Path) -> None:
        """Make or replace the object by the content of a file."""
        self._do(lambda fs, path: fs.put_file(str(source), path))

    def stream(self, fill: Callable[[BinaryIO], None]) -> tuple[int, str]:
        """Make or replace the object by what `fill` writes; its size and sha256. A second try calls
        `fill` again.
        """

        def attempt(fs: Any, path: str) -> tuple[int, str]:
            with _Written(fs.open(path, "wb", block_size=_PART)) as written:
                fill(written)  # type: ignore[arg-type]  # `write` is all that is called
            return written.size, written.hash.hexdigest()

        return self._do(attempt)

    def children(self) -> list[Url]:
        """What lies directly in a folder, sorted; empty where there is no such folder."""
        try:
            names = self._do(
                lambda fs, path: [fs.unstrip_protocol(name) for name in fs.ls(path, detail=False)],
                _LISTING_SECONDS,
            )
        except FileNotFoundError:
            return []
        return sorted({self / Url(name).name for name in names} - {self})

    def sizes_below(self) -> dict[str, int]:
        """Bytes of all objects below a folder, by their names from there on; empty where there is
        no such folder.
        """

        def attempt(fs: Any, path: str) -> dict[str, int]:
            found = fs.find(path, detail=True)
            start = len(path.rstrip("/")) + 1
            return {name[start:]: int(info["size"]) for name, info in found.items() if name[start:]}

        try:
            return self._do(attempt, _LISTING_SECONDS)
        except FileNotFoundError:
            return {}

    def matches(self) -> list[Url]:
        """The objects that fit a pattern with `*`, sorted."""

        def attempt(fs: Any, path: str) -> list[Url]:
            found = fs.glob(path, detail=True)
            return [
                Url(fs.unstrip_protocol(name))
                for name, info in found.items()
                if info["type"] == "file"
            ]

        try:
            return sorted(self._do(attempt, _LISTING_SECONDS))
        except FileNotFoundError:
            return []

    def unlink(self, recursive: bool = False) -> None:
        """Remove an object, if it is there; `recursive`: all objects of a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda fs, path: fs.rm(path, recursive=recursive))

    def remove_below(self) -> None:
        """Remove all objects of a folder, if there are any."""
        self.unlink(recursive=True)

    def _do(self, action: Callable[[Any, str], _T], seconds: float | None = None) -> _T:
        """Return what `action` returns, with retries. `seconds`: of one try at a store; a web
        client has a clock.
        """
        fs, path = _client(self)
        if seconds is None or not self.lists:
            return _retried(lambda: action(fs, path), self.text)
        return _retried(lambda: _in_time(lambda: action(fs, path), seconds, self.text), self.text)


def _retried(action: Callable[[], _T], what: str) -> _T:
    """`action`, again while it fails in a way that may pass; `what` names the object in the log and
    in errors.
    """
    begin = time.monotonic()
    for failures in range(1, _ATTEMPTS + 1):
        try:
            return action()
        except Exception as raised:
            error = _uncovered(raised)
            transient = _is_transient(error)
            refusal = (
                error.__cause__ if isinstance(error, FileNotFoundError) else error
            )  # fsspec covers a guard's
            if isinstance(refusal, ValueError) and not transient:
                raise refusal from None
            if isinstance(error, FileNotFoundError) and not transient:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what) from error
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            if failures == _ATTEMPTS or not transient or time.monotonic() - begin >= _SECONDS:
                raise UnreachableError(f"{what}: {reason} (tried {failures} times)") from error
            _log.warning(
                "%s: %s; again (%d of %d)",
                for_terminal(what),
                for_terminal(reason),
                failures,
                _ATTEMPTS,
            )
        time.sleep(
            min(5.0, 0.2 * 2**failures) * random.uniform(0.5, 1.0)
        )  # ranks do not come back together
    raise AssertionError("the last attempt returns or raises")


def _is_transient(error: BaseException) -> bool:
    """Whether a request may succeed later: not where the server or this program refuses it."""
    cause = error.__cause__
    answer = getattr(cause, "response", None)  # botocore keeps the status in a table
    botos = (
        answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(answer, dict)
        else None
    )
    found = [getattr(one, "status", None) or getattr(one, "code", None) for one in (error, cause)]
    status = next((one for one in [*found, botos] if isinstance(one, int)), 0)
    if status:
        return status in _TRANSIENT or status >= 500
    return not isinstance(
        error, FileNotFoundError | PermissionError | ValueError | NotImplementedError | RuntimeError
    )


def _uncovered(error: Exception) -> Exception:
    """The error of a connection where fsspec says instead that there is no such file; else the
    error itself.
    """
    cause = error.__cause__
    is_covered = isinstance(error, FileNotFoundError) and isinstance(
        cause, OSError
    )  # a TimeoutError is one
    if is_covered and not isinstance(cause, FileNotFoundError):
        return cause  # type: ignore[return-value]  # an OSError
    return error


def _in_time(action: Callable[[], _T], seconds: float, what: str) -> _T:
    """Return what `action` returns; UnreachableError when it takes longer.

    A thread of its own does it, as not every store's client can be told when to stop. One that is
    too late is left alone: it ends with its connection, or with the process.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="megacp request", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # its own error
            raise
        raise UnreachableError(f"{what}: the answer takes longer than {seconds:.0f} s") from None


def _from_web(fs: Any, path: str, most: int, offset: int | None = None) -> tuple[bytes, int]:
    """Return an answer of a web server, and how many bytes it has, as far as that is known.

    `offset`: the `most` bytes from there on are asked for. Reading stops once there are more than
    `most`, and does not begin where the server says so. Raises UnreachableError for an answer that
    comes too slowly.
    """
    import aiohttp
    from fsspec.asyn import sync

    request = dict(fs.kwargs)
    # the clock below replaces the client's own, which does not know how much has come
    request["timeout"] = aiohttp.ClientTimeout(
        None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
    )
    if offset is not None:
        request["headers"] = {**request["headers"], "Range": f"bytes={offset}-{offset + most - 1}"}

    async def answer() -> tuple[bytes, int]:
        session = await fs.set_session()
        content = io.BytesIO()
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS) as clock:
                async with session.get(fs.encode_url(path), **request) as response:
                    fs._raise_not_found_for_status(response, path)
                    stated = response.content_length or 0
                    if stated > most:
                        return b"", stated
                    async for part in response.content.iter_any():
                        content.write(part)
                        if content.tell() > most:
                            break
                        clock.reschedule(begin + _ANSWER_SECONDS + content.tell() / _LEAST_RATE)
        except TimeoutError:
            if not clock.expired():  # the connection's own, which may pass
                raise
            seconds = asyncio.get_running_loop().time() - begin
            raise UnreachableError(
                f"{path}: {content.tell():,} bytes came in {seconds:.0f} s, which is too slow"
            ) from None
        return content.getvalue(), content.tell()

    return sync(fs.loop, answer)


@functools.cache
def _bounded_response() -> type:
    """The class of the web client's answers, which reads no page of more than `_PAGE_BYTES` as a
    whole.
    """
    import aiohttp

    class Response(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                content = io.BytesIO()
                async for part in self.content.iter_any():
                    content.write(part)
                    if content.tell() > _PAGE_BYTES:
                        self.close()
                        raise TooLargeError(
                            f"{self.url} has more than {_PAGE_BYTES:,} bytes, the most of such a "
                            "page"
                        )
                self._body = content.getvalue()
            return self._body

    return Response


class _Written:
    """A stream into an object, with the size and the hash of what went in; an error leaves no
    object behind.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.hash, self.size = stream, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        self._stream.write(data)
        self.size += len(data)
        return len(data)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._stream.close()
        else:
            self._stream.discard()
            with contextlib.suppress(
                AttributeError
            ):  # else fsspec sends it when the stream is forgotten
                self._stream.closed = True


def _client(url: Url) -> tuple[Any, str]:
    """The file system of a URL and the path in it. ValueError says which package is missing."""
    scheme = url.scheme
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(
            f"{url}: URLs need the package fsspec: pip install 'megacp[store]'"
        ) from error
    options: dict[str, Any] = {}
    if scheme in (
        "s3",
        "s3a",
    ):  # s3fs has retries of its own above botocore's: one of both is enough
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENT_SECONDS}
        options = {"config_kwargs": {**limits, "retries": {"total_max_attempts": 1}}}
    try:
        if scheme in _WEB:
            import aiohttp

            limit = aiohttp.ClientTimeout(
                _ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            )
            web = {
                "timeout": limit,
                # what a server packs for the way comes as it is: a few bytes may unpack to many
                "auto_decompress": False,
                "middlewares": [url.guard] if url.guard else [],
                "response_class": _bounded_response(),
            }
            # by name, as fsspec would take the `::` of an IPv6 address for a chain of URLs
            headers = {"Accept-Encoding": "identity"}
            client = fsspec.filesystem(
                scheme, use_listings_cache=False, client_kwargs=web, headers=headers
            )
            return client, url.text
        return fsspec.core.url_to_fs(url.text, use_listings_cache=False, **options)
    except ImportError as error:
        raise ValueError(f"{url}: {scheme}:// needs a package: {error}") from error
