"""Stores for tests: `memory://`, and a wrapper that refuses, truncates and counts requests."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from megacp.storage.url import Url


def memory() -> Url:
    """Return a new folder in the memory of this process."""
    return Url(f"memory://{uuid.uuid4().hex}")


class Busy(OSError):
    """The answer of an overloaded store."""

    status = 503


class FlakyStore(MemoryFileSystem):
    """The same memory under `flaky://`: some requests fail, and some reads return too few bytes."""

    protocol = "flaky"
    cachable = False
    share = 0.0
    rng = random.Random(0)
    asked: Counter[str] = Counter()
    failed: Counter[str] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("flaky://"))

    def _fails(self, what: str) -> bool:
        self.asked[what] += 1
        fails = self.rng.random() < self.share
        self.failed[what] += fails
        return fails

    def _refuse(self, what: str) -> None:
        if self._fails(what):
            raise Busy("slow down") if self.rng.random() < 0.5 else ConnectionResetError("cut")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self._refuse("read")
        data = super().cat_file(path, start, end)
        return data[: len(data) // 2] if start is not None and self._fails("short read") else data

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._refuse("write")
        super().pipe_file(path, value, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._refuse("write")
        super().put_file(lpath, rpath, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._refuse("info")
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._refuse("list")
        return super().ls(path, detail, **kwargs)


fsspec.register_implementation("flaky", FlakyStore, clobber=True)


@contextmanager
def flaky(share: float, seed: int = 0) -> Iterator[type[FlakyStore]]:
    """Let this share of the requests of `flaky://` fail, without delays before retries."""
    FlakyStore.share, FlakyStore.rng = share, random.Random(seed)
    FlakyStore.asked.clear()
    FlakyStore.failed.clear()
    try:
        with mock.patch("time.sleep"):
            yield FlakyStore
    finally:
        FlakyStore.share = 0.0


def under_flaky(url: Url) -> Url:
    """Return the same folder of memory in the flaky store."""
    return Url(url.text.replace("memory://", "flaky://"))
