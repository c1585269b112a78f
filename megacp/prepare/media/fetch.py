"""Images below an --image-root that is a URL: fetched ahead by threads, kept in a folder while the build runs.

Each object is asked for once by a worker, also where it fails, and once by all workers where it does not.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megacp.core.data.decoding import ImageError
from megacp.core.storage import files
from megacp.core.storage.url import Url

_THREADS = 16
"""Requests of a worker side by side: they wait, and take no core."""


class ImageFetcher:
    """What one worker fetches below `root`; `limit` is the most bytes of an image."""

    def __init__(self, root: str, folder: Path, limit: int) -> None:
        self._root, self._folder, self._limit = Url(root), folder, limit
        self._pool = ThreadPoolExecutor(_THREADS, "image-fetcher")
        self._asked: dict[str, Future[bytes]] = {}
        self._failed: dict[str, str] = {}
        self._changes = threading.Lock()

    def want(self, name: str) -> None:
        """Begin to fetch an image that `get` will be asked for."""
        with self._changes:
            if name not in self._asked and name not in self._failed and not self._place(name).exists():
                self._asked[name] = self._pool.submit(self._fetch, name)

    def get(self, name: str) -> bytes:
        """The bytes of an image. ImageError when it does not come."""
        with self._changes:
            asked = self._asked.pop(name, None)
        try:
            if asked is not None:
                return asked.result()
            if name not in self._failed:
                place = self._place(name)
                return files.read_regular(place, self._limit) if place.exists() else self._fetch(name)
        except FileNotFoundError:
            self._failed[name] = "the store has no such object"
        except ValueError as error:
            self._failed[name] = str(error)
        raise ImageError(f"it could not be fetched: {self._failed[name]}")

    def close(self) -> None:
        """Stop fetching ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _place(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return self._folder / digest[:2] / digest

    def _fetch(self, name: str) -> bytes:
        data = (self._root / name).content(self._limit)
        place = self._place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(place, data)
        return data
