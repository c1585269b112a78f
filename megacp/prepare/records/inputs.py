"""The input files of a build: what is wrong with one, and by what a changed one is told.

Key property: neither reads more than the edges of a file. A file at a URL is told from another by what its store says
of it (an ETag, a checksum, a time), and by its first and last bytes where a store says nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacp.core.storage.files import open_regular
from megacp.core.storage.place import open_input, place_of, size_of
from megacp.core.storage.url import Url, is_url

SAMPLED_BYTES = 1 << 16


def identity(path: str) -> list[Any]:
    """Name, size, and what differs once the content does."""
    place = place_of(path)
    size = size_of(place)
    version = place.version() if isinstance(place, Url) else ""
    return [path, size, version or _sample_hash(path, size)]


def _sample_hash(path: str, size: int) -> str:
    """sha256 of a file's first and last 64 KiB: a file that was replaced is noticed without reading all of it."""
    with open_input(path) as stream:
        data = stream.read(SAMPLED_BYTES)
        stream.seek(max(0, size - SAMPLED_BYTES))
        data += stream.read()
    return hashlib.sha256(data).hexdigest()


def notes_of_newer(paths: Sequence[str], built: Path) -> Iterator[str]:
    """A line for each local input that was written after the file `built`, as its middle may have changed unseen."""
    since = built.stat().st_mtime
    for path in paths:
        if not is_url(path) and os.stat(path).st_mtime > since:
            yield (
                f"note: --input {path} was written after what was built of it, with equal size, beginning and end; "
                "if it changed, --overwrite starts again\n"
            )


def problem(path: str) -> str | None:
    """Why an input file cannot be read, as far as opening it tells; None when it can."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"{path!r} is no path in UTF-8: rename it"
    if is_url(path):
        return _problem_of_url(Url(path))
    if os.path.isdir(path):
        return f"{path} is a directory; give the files in it"
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return f"no such file: {path}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except ValueError as error:  # a pipe could be read once, and units are read by several workers
        return str(error)
    return None


def _problem_of_url(url: Url) -> str | None:
    try:
        if url.is_dir():
            return f"{url} is a directory; give the files in it, as {url}/*.jsonl"
        url.size()
    except FileNotFoundError:
        return f"no such file: {url}"
    except ValueError as error:
        return str(error)
    return None


def refuse_changed(now: list[list[Any]], before: list[list[Any]]) -> None:
    """ValueError when a file at a URL is no more what it was when the build began."""
    changed = [entry[0] for entry in now if is_url(entry[0]) and entry not in before]
    if changed:
        raise ValueError(
            f"--input: changed while it was read: {', '.join(changed)}; no dataset was made, give --overwrite"
        )
