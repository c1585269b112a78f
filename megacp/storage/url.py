"""An object or a folder in a store, identified by its URL: fsspec's operations, with retries.

A `Url` is immutable text, like a Path. Each call queries the store again, because other machines
may have changed its contents. Credentials and endpoints come from the files and variables that each
library reads itself.

If a store cannot be reached, the error is a ValueError with the object's URL. It is not an OSError,
because record readers treat an OSError as a damaged file and would continue.
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
"""Fields of `info` that change with an object's content, most reliable first."""
_PART = 64 << 20
"""Number of bytes that are sent or requested at a time."""
_CONNECT_SECONDS, _SILENT_SECONDS = 10, 30
_ANSWER_SECONDS = 30.0
"""Time limit for a whole response, regardless of how often bytes arrive."""
_LEAST_RATE = 256 << 10
"""Bytes that extend the time limit by one second, so slow connections can load large files."""
_LISTING_SECONDS = 1800.0
"""Time limit for listing objects, which needs many requests."""
_PAGE_BYTES = 64 << 20
"""Maximum size in bytes of a web server's response that is not a file, such as an index page."""
_ATTEMPTS, _SECONDS = 6, 15.0
"""A request is not retried after this number of attempts or seconds."""
_TRANSIENT = (408, 425, 429)
"""Client errors (4xx) that may be temporary; server errors (500 and above) may be, too."""


class UnreachableError(ValueError):
    """An object cannot be read or written even after retries; the message contains its URL."""


def is_url(text: object) -> bool:
    """Return whether a text is the URL of an object in a store rather than a path."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


@dataclass(frozen=True, order=True)
class Url:
    """A URL that fsspec supports, without a trailing slash.

    FileNotFoundError and UnreachableError contain it in their messages.
    """

    text: str
    guard: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """An aiohttp middleware that checks each request to a web server, including redirects, and may
    raise ValueError.
    """

    def __post_init__(self) -> None:
        # the dataclass is frozen, so assign through `object`
        object.__setattr__(self, "text", self.text.rstrip("/"))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return replace(self, text=f"{self.text}/{name}")

    @property
    def scheme(self) -> str:
        """The scheme, such as `s3` in `s3://bucket/key`.

        Raise ValueError for URL chains and for local paths.
        """
        match = _SCHEME.match(self.text)
        # fsspec chains URLs with `::`; on a web server it is part of an IPv6 address or a name
        is_chain = "::" in self.text and (match is None or match[1] not in _WEB)
        if match is None or is_chain:
            raise ValueError(f"{self.text} is not a plain URL such as s3://bucket/key")
        if match[1] in ("file", "local"):
            raise ValueError(f"{self.text}: give the path itself, without {match[0]}")
        return match[1]

    @property
    def lists(self) -> bool:
        """Whether the store can list a folder; web servers cannot."""
        return self.scheme not in _WEB

    @property
    def name(self) -> str:
        """The part after the last slash, without the query if it is on a web server."""
        last = self.text.rsplit("/", 1)[-1]
        return last.partition("?")[0] if self.text.startswith("http") else last

    @property
    def parent(self) -> Url:
        """The folder that contains the object."""
        return Url(self.text.rsplit("/", 1)[0])

    def resolve(self) -> Url:
        """Return the URL itself, because stores have no links."""
        return self

    def info(self) -> dict[str, Any]:
        """Return fsspec's description of the object. Raise FileNotFoundError if it is missing."""
        return self._do(lambda fs, path: dict(fs.info(path)), _ANSWER_SECONDS)

    def exists(self) -> bool:
        """Return whether an object or a folder has this name."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether the names of some objects begin with this name and a slash."""
        try:
            return self.info()["type"] == "directory"
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """Return the size of an object in bytes. Raise ValueError for folders and unknown sizes."""
        info = self.info()
        # some stores report folders as objects of type directory
        if info["type"] == "directory":
            raise ValueError(f"{self} is a directory")
        if info.get("size") is None:
            raise ValueError(f"{self}: the server does not report its size; download it first")
        return int(info["size"])

    def version(self) -> str:
        """Return a text that changes with the object's content; empty if the store has none."""
        info = self.info()
        return next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes starting at `offset`; all of them must exist."""
        # large objects need several requests, because each one has a time limit
        parts = [
            self._read(at, min(_PART, offset + count - at))
            for at in range(offset, offset + count, _PART)
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, offset: int, count: int) -> bytes:
        """Return part of the object, using a single request."""

        def attempt(fs: Any, path: str) -> bytes:
            # a web server gets one request with limits on time and bytes
            if self.lists:
                data: bytes = fs.cat_file(path, start=offset, end=offset + count)
                found = len(data)
            else:
                data, found = _from_web(fs, path, count, offset)
            # a server may ignore the range, or close the connection early
            if found > count:
                raise ValueError(
                    f"{self}: the server returned {found} bytes, but {count} were requested"
                )
            if found < count:
                raise ConnectionError(f"only {found} of {count} bytes arrived from byte {offset}")
            return data

        return self._do(attempt, _ANSWER_SECONDS + count / _LEAST_RATE)

    def content(self, limit: int) -> bytes:
        """Return the content of an object. Raise TooLargeError above `limit` bytes."""
        if not self.lists:
            # a web server may not report sizes, so read up to the limit
            data, found = self._do(lambda fs, path: _from_web(fs, path, limit))
        else:
            info = self.info()
            if info["type"] == "directory":
                raise ValueError(f"{self} is a directory")
            stated = info.get("size") or 0
            if stated > limit:
                raise TooLargeError(
                    f"{self} has {stated:,} bytes, more than the limit of {limit:,}"
                )
            seconds = _ANSWER_SECONDS + stated / _LEAST_RATE
            data = self._do(lambda fs, path: fs.cat_file(path), seconds)
            found = len(data)
        if found > limit:
            raise TooLargeError(f"{self} has more than {limit:,} bytes, the limit for this file")
        return data

    def write(self, data: bytes) -> None:
        """Create or replace the object; readers get either the old or the new content."""
        self._do(lambda fs, path: fs.pipe_file(path, data))

    def upload(self, source: Path) -> None:
        """Create or replace the object with the content of a file."""
        self._do(lambda fs, path: fs.put_file(str(source), path))

    def stream(self, fill: Callable[[BinaryIO], None]) -> tuple[int, str]:
        """Create or replace the object with the output of `fill`; return its size and sha256.

        A retry calls `fill` again.
        """

        # the upload ends when the context exits without an error
        def attempt(fs: Any, path: str) -> tuple[int, str]:
            with _Written(fs.open(path, "wb", block_size=_PART)) as written:
                fill(written)  # type: ignore[arg-type]  # `write` is all that is called
            return written.size, written.hash.hexdigest()

        return self._do(attempt)

    def children(self) -> list[Url]:
        """Return the direct children of a folder, sorted; empty if the folder is missing."""
        try:
            names = self._do(
                lambda fs, path: [fs.unstrip_protocol(name) for name in fs.ls(path, detail=False)],
                _LISTING_SECONDS,
            )
        except FileNotFoundError:
            return []
        # some stores list a folder among its own children
        return sorted({self / Url(name).name for name in names} - {self})

    def sizes_below(self) -> dict[str, int]:
        """Return the sizes in bytes of all objects below a folder, by relative name.

        The result is empty if the folder is missing.
        """

        def attempt(fs: Any, path: str) -> dict[str, int]:
            found = fs.find(path, detail=True)
            # remove the folder's name; the folder itself then has an empty name
            start = len(path.rstrip("/")) + 1
            return {name[start:]: int(info["size"]) for name, info in found.items() if name[start:]}

        try:
            return self._do(attempt, _LISTING_SECONDS)
        except FileNotFoundError:
            return {}

    def matches(self) -> list[Url]:
        """Return the objects that match a pattern with `*`, sorted."""

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
        """Remove an object if it exists; with `recursive`, remove all objects in a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda fs, path: fs.rm(path, recursive=recursive))

    def remove_below(self) -> None:
        """Remove all objects in a folder if it exists."""
        self.unlink(recursive=True)

    def _do(self, action: Callable[[Any, str], _T], seconds: float | None = None) -> _T:
        """Return the result of `action`, with retries.

        `seconds` limits one attempt at a store. Web clients have their own time limits.
        """
        fs, path = _client(self)
        # writes have no limit
        if seconds is None or not self.lists:
            return _retried(lambda: action(fs, path), self.text)
        return _retried(lambda: _in_time(lambda: action(fs, path), seconds, self.text), self.text)


def _retried(action: Callable[[], _T], what: str) -> _T:
    """Return the result of `action`, retried after transient errors.

    `what` names the object in log lines and errors.
    """
    begin = time.monotonic()
    for failures in range(1, _ATTEMPTS + 1):
        try:
            return action()
        except Exception as raised:
            error = _uncovered(raised)
            transient = _is_transient(error)
            # fsspec wraps the error of a guard in a FileNotFoundError
            refusal = error.__cause__ if isinstance(error, FileNotFoundError) else error
            if isinstance(refusal, ValueError) and not transient:
                # a rejection by this program or the server is final
                raise refusal from None
            if isinstance(error, FileNotFoundError) and not transient:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what) from error
            # one line, at most 300 characters
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            if failures == _ATTEMPTS or not transient or time.monotonic() - begin >= _SECONDS:
                raise UnreachableError(f"{what}: {reason} (tried {failures} times)") from error
            _log.warning(
                "%s: %s; retrying (%d of %d)",
                for_terminal(what),
                for_terminal(reason),
                failures,
                _ATTEMPTS,
            )
        # random delays keep ranks from retrying at the same time
        delay = min(5.0, 0.2 * 2**failures)
        time.sleep(delay * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


def _is_transient(error: BaseException) -> bool:
    """Return whether a request may succeed later, because neither side has rejected it."""
    cause = error.__cause__
    # the HTTP status is in one of these places, depending on the library
    candidates = [
        getattr(one, "status", None) or getattr(one, "code", None) for one in (error, cause)
    ]
    answer = getattr(cause, "response", None)
    if isinstance(answer, dict):  # botocore
        candidates.append(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = next((one for one in candidates if isinstance(one, int)), 0)
    if status:
        return status in _TRANSIENT or status >= 500
    return not isinstance(
        error, FileNotFoundError | PermissionError | ValueError | NotImplementedError | RuntimeError
    )


def _uncovered(error: Exception) -> Exception:
    """Return the error, or the connection error that fsspec wrapped in a FileNotFoundError."""
    cause = error.__cause__
    # a TimeoutError is an OSError too
    is_covered = isinstance(error, FileNotFoundError) and isinstance(cause, OSError)
    if is_covered and not isinstance(cause, FileNotFoundError):
        return cause  # type: ignore[return-value]  # an OSError
    return error


def _in_time(action: Callable[[], _T], seconds: float, what: str) -> _T:
    """Return the result of `action`. Raise UnreachableError if it takes longer than `seconds`.

    The action runs in a separate thread, because some store clients cannot be stopped. A late
    thread is abandoned and ends with its connection or with the process.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    # a daemon thread does not keep the process alive
    threading.Thread(target=run, name="megacp request", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # the TimeoutError comes from the action
            raise
        raise UnreachableError(f"{what}: the response took longer than {seconds:.0f} s") from None


def _from_web(fs: Any, path: str, most: int, offset: int | None = None) -> tuple[bytes, int]:
    """Return a web server's response, and its number of bytes as far as known.

    With `offset`, request `most` bytes starting there. Reading stops after more than `most` bytes,
    and does not begin if the server reports a larger size. Raise UnreachableError if the response
    is too slow.
    """
    import aiohttp
    from fsspec.asyn import sync

    request = dict(fs.kwargs)
    # the clock below replaces the client's total timeout, which ignores how much has arrived
    request["timeout"] = aiohttp.ClientTimeout(
        None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
    )
    if offset is not None:
        # ranges include the last byte
        request["headers"] = {**request["headers"], "Range": f"bytes={offset}-{offset + most - 1}"}

    async def answer() -> tuple[bytes, int]:
        session = await fs.set_session()
        content = io.BytesIO()
        begin = asyncio.get_running_loop().time()
        try:
            # the deadline moves with every part that arrives
            async with asyncio.timeout(_ANSWER_SECONDS) as clock:
                async with session.get(fs.encode_url(path), **request) as response:
                    fs._raise_not_found_for_status(response, path)
                    stated = response.content_length or 0
                    # do not read a response that is too large
                    if stated > most:
                        return b"", stated
                    async for part in response.content.iter_any():
                        content.write(part)
                        if content.tell() > most:
                            break
                        clock.reschedule(begin + _ANSWER_SECONDS + content.tell() / _LEAST_RATE)
        except TimeoutError:
            if not clock.expired():  # a timeout of the connection, which may pass
                raise
            seconds = asyncio.get_running_loop().time() - begin
            raise UnreachableError(
                f"{path}: {content.tell():,} bytes arrived in {seconds:.0f} s, which is too slow"
            ) from None
        return content.getvalue(), content.tell()

    return sync(fs.loop, answer)


@functools.cache
def _bounded_response() -> type:
    """Return a response class for the web client that limits whole pages to `_PAGE_BYTES`."""
    import aiohttp

    class Response(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            # read at most the limit, whatever size the server reports
            if self._body is None:
                content = io.BytesIO()
                async for part in self.content.iter_any():
                    content.write(part)
                    if content.tell() > _PAGE_BYTES:
                        self.close()
                        raise TooLargeError(
                            f"{self.url} has more than {_PAGE_BYTES:,} bytes, the size limit for "
                            "a page"
                        )
                self._body = content.getvalue()
            return self._body

    return Response


class _Written:
    """A stream to an object that counts and hashes the data; after an error, no object remains."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()
        self.size = 0

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
            # otherwise fsspec uploads the data when the stream is garbage-collected
            with contextlib.suppress(AttributeError):
                self._stream.closed = True


def _client(url: Url) -> tuple[Any, str]:
    """Return the file system and path for a URL. Raise ValueError if a package is missing."""
    scheme = url.scheme
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(
            f"{url}: URLs need the package fsspec: pip install -e '.[store]'"
        ) from error
    options: dict[str, Any] = {}
    # turn off botocore's retries, because both s3fs and `_retried` also retry
    if scheme in ("s3", "s3a"):
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
                # responses stay compressed, because a few bytes may expand to many
                "auto_decompress": False,
                "middlewares": [url.guard] if url.guard else [],
                "response_class": _bounded_response(),
            }
            # create the client by name: fsspec would treat the `::` of an IPv6 address as a chain
            headers = {"Accept-Encoding": "identity"}
            client = fsspec.filesystem(
                scheme, use_listings_cache=False, client_kwargs=web, headers=headers
            )
            return client, url.text
        return fsspec.core.url_to_fs(url.text, use_listings_cache=False, **options)
    except ImportError as error:
        raise ValueError(f"{url}: {scheme}:// URLs need another package: {error}") from error
