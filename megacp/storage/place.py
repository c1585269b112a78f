"""Functions that read and write both local paths and URLs; fsspec is imported only for URLs."""

from __future__ import annotations

import glob
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megacp.storage import files
from megacp.storage.cache import kept_folder
from megacp.storage.url import Url, is_url

Place = Path | Url

_BUFFER = 1 << 20
_BLOCK = 4 << 20
"""Bytes that a stream requests from a store at a time."""
_KEPT = 4
"""Number of blocks that a stream keeps; containers are read alternately at several positions."""


def at_home(text: str) -> str:
    """Return a path with `~` and `~user` replaced by home folders; return a URL unchanged.

    Raise ValueError if the user is unknown, instead of creating a folder with that name.
    """
    if is_url(text) or not text.startswith("~"):
        return text
    found = os.path.expanduser(text)
    if found == text:
        user = text.partition("/")[0]
        raise ValueError(
            f"{text}: {user} is not a user's home folder; write ./{text} for a path with this name"
        )
    return found


def place_of(text: files.StrPath | Url) -> Place:
    """Return a URL as `Url`, anything else as `Path`."""
    if isinstance(text, Url):
        return text
    return Url(text) if isinstance(text, str) and is_url(text) else Path(text)


def suffix_of(path: str) -> str:
    """Return the suffix of a name, including the dot but not the query of a URL."""
    return Path(Url(path).name if is_url(path) else path).suffix


def expanded(path: str) -> list[str]:
    """Return the files that match a path, URL or pattern.

    A URL without `*` and an existing path match only themselves. Raise ValueError if no file
    matches.
    """
    if is_url(path):
        found = [str(url) for url in Url(path).matches()] if "*" in path else [path]
    else:
        # an existing file is never treated as a pattern
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        found = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
    if not found:
        raise ValueError(f"no file matches {path}")
    return found


def size_of(place: Place) -> int:
    """Return the size of a file in bytes. Raise the errors of `Path.stat` or `Url.size`."""
    return place.size() if isinstance(place, Url) else place.stat().st_size


def open_stream(path: files.StrPath | Url, size: int | None = None) -> io.BufferedReader:
    """Open a file for reading bytes, sequentially or with seeks.

    A URL is read in blocks, and only a few blocks are kept in memory. Raise ValueError if the path
    is not a regular file or does not have `size` bytes, and OSError if it does not exist.
    """
    # local files are opened directly, which also rejects pipes and devices
    place = place_of(path)
    if isinstance(place, Path):
        return files.open_regular(place, size)
    # one request for the size; contents are requested block by block
    found = place.size()
    if size is not None and found != size:
        raise ValueError(f"{place} has {found} bytes, expected {size}")
    return io.BufferedReader(_Ranges(place, found), _BUFFER)


def open_input(path: str) -> io.BufferedReader:
    """Open a path or URL given with --input for reading bytes; a path may also be a pipe."""
    if is_url(path):
        return open_stream(path)
    # the file itself is unbuffered, so that the large buffer is the only one
    return io.BufferedReader(open(path, "rb", buffering=0), _BUFFER)


def read_content(place: Place, limit: int = files.TEXT_LIMIT) -> bytes:
    """Return the content of a file.

    Raise TooLargeError if it has more than `limit` bytes; see `open_stream` for other errors.
    """
    return place.content(limit) if isinstance(place, Url) else files.read_regular(place, limit)


def digest_of(place: Place, size: int | None = None) -> tuple[int, str]:
    """Return the size in bytes and the sha256 (hexadecimal) of a file.

    Raise the errors of `open_stream`.
    """
    if isinstance(place, Path):
        return files.sha256_of(place, size)
    digest = hashlib.sha256()
    count = 0
    with open_stream(place, size) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            count += len(block)
    return count, digest.hexdigest()


def write_content(place: Place, data: bytes) -> None:
    """Write a new local file, or create or replace an object in a store.

    Raise FileExistsError if a local file exists.
    """
    if isinstance(place, Url):
        place.write(data)
    else:
        files.write_new(place, data)


def write_stream(
    place: Place, fill: Callable[[BinaryIO], None], seconds: float = 0.0
) -> tuple[int, str]:
    """Write the output of `fill` as `write_content` does, and return its size and sha256.

    If the local folder does not exist, wait up to `seconds` for it.
    """
    if isinstance(place, Url):
        return place.stream(fill)
    with files.new_file(place, seconds) as stream:
        fill(stream)
    return files.sha256_of(place)


def folders_in(place: Place) -> list[Place]:
    """Return the subfolders of a folder, sorted; empty if the folder does not exist.

    For a URL, the result may also contain objects.
    """
    if isinstance(place, Url):
        return list(place.children())
    # a path that is not a folder has no subfolders
    return [child for child in sorted(place.iterdir()) if child.is_dir()] if place.is_dir() else []


def fetched(folder: Url, key: str) -> Path:
    """Return a local copy of a small remote folder.

    The copy is cached under the URL and `key`, which must identify the content.
    """

    def download(local: Path) -> None:
        for child in folder.children():
            files.write_new(local / child.name, read_content(child))

    # the same key may be used for folders of several URLs
    of_url = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return kept_folder(f"{key}-{of_url}", download)


class _Ranges(io.RawIOBase):
    """An object as a seekable raw file.

    fsspec keeps a few blocks, because containers are read alternately at several positions.
    """

    def __init__(self, url: Url, size: int) -> None:
        from fsspec.caching import BlockCache

        # the wrapped cache takes absolute ranges; the last block may be short
        self._size = size
        self._at = 0
        self._blocks = BlockCache(
            _BLOCK, lambda start, stop: url.read(start, min(stop, size) - start), size, _KEPT
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._blocks._fetch(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
