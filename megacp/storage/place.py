"""A local path or a URL: one set of calls for what is read and written at either; fsspec is not
imported for a path.
"""

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
"""Bytes that a stream from a store asks for at a time."""
_KEPT = 4
"""Blocks that a stream keeps: containers are read at several places by turns."""


def at_home(text: str) -> str:
    """Return a path in which `~` and `~user` are the folders of users; a URL as it is.

    Raises ValueError for a user that is not known: a folder of that name would be made.
    """
    if is_url(text) or not text.startswith("~"):
        return text
    found = os.path.expanduser(text)
    if found == text:
        user = text.partition("/")[0]
        raise ValueError(
            f"{text}: {user} is not the folder of a user; write ./{text} for a file of that name"
        )
    return found


def place_of(text: files.StrPath | Url) -> Place:
    """A URL as such, anything else as a path."""
    if isinstance(text, Url):
        return text
    return Url(text) if isinstance(text, str) and is_url(text) else Path(text)


def suffix_of(path: str) -> str:
    """What follows the last dot of a name, with the dot; a query of a URL is no part of it."""
    return Path(Url(path).name if is_url(path) else path).suffix


def expanded(path: str) -> list[str]:
    """The files that a path or URL names: those that fit where it is a pattern and no file, else
    itself.
    """
    if is_url(path):
        found = [str(url) for url in Url(path).matches()] if "*" in path else [path]
    else:
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        found = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
    if not found:
        raise ValueError(f"no file fits {path}")
    return found


def size_of(place: Place) -> int:
    """Bytes of a file. Raises as its kind of place does."""
    return place.size() if isinstance(place, Url) else place.stat().st_size


def open_stream(path: files.StrPath | Url, size: int | None = None) -> io.BufferedReader:
    """Open a file for reading bytes, from front to back or by seeking; of a URL some blocks are in
    memory at a time.

    ValueError: it is no regular file, or has not `size` bytes. OSError when there is none.
    """
    place = place_of(path)
    if isinstance(place, Path):
        return files.open_regular(place, size)
    found = place.size()
    if size is not None and found != size:
        raise ValueError(f"{place} has {found} bytes, expected {size}")
    return io.BufferedReader(_Ranges(place, found), _BUFFER)


def open_input(path: str) -> io.BufferedReader:
    """Open what --input names, for reading bytes: a path as it is, through a larger buffer."""
    if is_url(path):
        return open_stream(path)
    return io.BufferedReader(open(path, "rb", buffering=0), _BUFFER)


def read_content(place: Place, limit: int = files.TEXT_LIMIT) -> bytes:
    """All of a file. ValueError above `limit` bytes; else as `open_stream`."""
    return place.content(limit) if isinstance(place, Url) else files.read_regular(place, limit)


def digest_of(place: Place, size: int | None = None) -> tuple[int, str]:
    """Size in bytes and sha256 (hexadecimal) of a file. Raises as `open_stream`."""
    if isinstance(place, Path):
        return files.sha256_of(place, size)
    digest, count = hashlib.sha256(), 0
    with open_stream(place, size) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            count += len(block)
    return count, digest.hexdigest()


def write_content(place: Place, data: bytes) -> None:
    """Make a file that does not exist; an object of the name is replaced."""
    place.write(data) if isinstance(place, Url) else files.write_new(place, data)


def write_stream(
    place: Place, fill: Callable[[BinaryIO], None], seconds: float = 0.0
) -> tuple[int, str]:
    """Write what `fill` writes, as `write_content` does; size and sha256. A local folder is waited
    for `seconds`.
    """
    if isinstance(place, Url):
        return place.stream(fill)
    with files.new_file(place, seconds) as stream:
        fill(stream)
    return files.sha256_of(place)


def folders_in(place: Place) -> list[Place]:
    """What lies in a folder and may be one, sorted; empty where there is no folder."""
    if isinstance(place, Url):
        return list(place.children())
    return [child for child in sorted(place.iterdir()) if child.is_dir()] if place.is_dir() else []


def fetched(folder: Url, key: str) -> Path:
    """A local copy of a small folder, kept under `key`, which names its content, and its URL."""

    def download(local: Path) -> None:
        for child in folder.children():
            files.write_new(local / child.name, read_content(child))

    of_url = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return kept_folder(f"{key}-{of_url}", download)


class _Ranges(io.RawIOBase):
    """An object as a file that can seek; fsspec keeps a few blocks, as containers are read here and
    there by turns.
    """

    def __init__(self, url: Url, size: int) -> None:
        from fsspec.caching import BlockCache

        self._size, self._at = size, 0
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
