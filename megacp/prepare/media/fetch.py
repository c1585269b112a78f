"""Images that records name by URL or object key: fetched ahead by threads, kept in a folder, told when they fail.

Nothing is fetched that does not lie in a place which the user has allowed, as the client reads the URL. Redirects are
followed below --image-root alone, where they are the user's own. Each URL is asked for once by a worker, also where it
fails, and once by all builds that share the folder where it does not. The bytes in a dataset are those that were
fetched, so a link that dies later harms nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megacp.core.data.decoding import ImageError
from megacp.core.storage import files
from megacp.core.storage.url import Url, is_url

_THREADS = 16
"""Requests of a worker side by side: they wait, and take no core."""


class FetchError(ImageError):
    """An image that did not come; `url` names it."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"it could not be fetched: {reason}")
        self.url = url


class ImageFetcher:
    """What one worker fetches; `limit` is the most bytes of an image, `root` an --image-root that is a URL."""

    def __init__(self, folder: Path, prefixes: Sequence[str], limit: int, root: str | None = None) -> None:
        self._folder, self._prefixes, self._limit = folder, tuple(prefixes), limit
        self._roots = (root,) if root is not None else ()
        self._pool = ThreadPoolExecutor(_THREADS, "image-fetcher")
        self._asked: dict[str, Future[bytes | None]] = {}
        self._failed: dict[str, str] = {}
        self._changes = threading.Lock()

    def allows(self, url: str) -> bool:
        """Whether a URL lies in a place that the user has allowed by its prefix."""
        return _lies_in_any(url, self._prefixes)

    def is_of_root(self, url: str) -> bool:
        """Whether a URL lies below `root`."""
        return _lies_in_any(url, self._roots)

    def want(self, url: str) -> None:
        """Begin to fetch an image that `get` will be asked for."""
        with self._changes:
            if url not in self._asked and url not in self._failed and not self._place(url).exists():
                self._asked[url] = self._pool.submit(self._fetch, url)

    def get(self, url: str) -> bytes:
        """The bytes of an image. FetchError when it does not come."""
        with self._changes:
            asked = self._asked.pop(url, None)
        data = asked.result() if asked is not None else self._kept(url)
        if data is None and url not in self._failed:
            data = self._fetch(url)
        if data is None:
            raise FetchError(url, self._failed[url])
        return data

    def close(self) -> None:
        """Stop fetching ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _place(self, url: str) -> Path:
        name = hashlib.sha256(url.encode()).hexdigest()
        return self._folder / name[:2] / name

    def _kept(self, url: str) -> bytes | None:
        try:
            return files.read_regular(self._place(url), self._limit)
        except FileNotFoundError:
            return None

    def _fetch(self, url: str) -> bytes | None:
        """The bytes, also kept in the folder; None with a line in `_failed`."""
        try:
            data = Url(url).content(self._limit, redirects=self.is_of_root(url))
        except FileNotFoundError:
            self._failed[url] = "the store has no such object"
            return None
        except ValueError as error:
            self._failed[url] = str(error).removeprefix(f"{url}: ")
            return None
        place = self._place(url)
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(place, data)
        return data


def prefix_problem(prefix: str) -> str | None:
    """Why a text names no place that images may be fetched from; None when it does."""
    example = "give how they begin, such as https://images.example/photos/"
    if not is_url(prefix):
        return f"begins no URL; {example}"
    try:
        place = Url(prefix)
        if not place.lies_in(place) or (not place.lists and any(mark in prefix for mark in "@?#")):
            return f"is more than a scheme, a host and a folder; {example}"
    except ValueError as error:
        return f"names no place ({error}); {example}"
    return None


def _lies_in_any(url: str, places: Sequence[str]) -> bool:
    try:
        return any(Url(url).lies_in(Url(place)) for place in places)
    except ValueError:  # no client reads it
        return False
