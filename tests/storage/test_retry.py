"""Retries: what passes is tried again, for a bounded time, and nothing else is."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from megacp.core.storage.url import UnreachableError, Url
from tests.storage.stores import FlakyStore, flaky, memory, under_flaky


def test_a_store_that_fails_every_third_request_gives_the_same_bytes() -> None:
    url = memory()
    data = bytes(range(256)) * 50
    with flaky(0.3) as store:
        place = under_flaky(url)
        for number in range(10):
            (place / f"{number}").write(data)
            assert (place / f"{number}").read(100, 12_000) == data[100:12_100]
        assert place.sizes_below() == {f"{number}": len(data) for number in range(10)}
    assert store.failed["short read"] and store.failed["write"]
    assert (url / "3").content(1 << 20) == data


@pytest.mark.parametrize(("error", "times"), [(PermissionError("no"), 1), (ConnectionResetError("cut"), 6)])
def test_what_passes_is_tried_six_times_and_all_else_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    """Would catch a reader that takes an unreached store for a damaged file, and skips the rest of it."""
    asked = []

    def refuse(self: FlakyStore, path: str, value: bytes, **kwargs: object) -> None:
        asked.append(1)
        raise error

    monkeypatch.setattr(FlakyStore, "pipe_file", refuse)
    with flaky(0.0), pytest.raises(UnreachableError, match=rf"/a: .*\(tried {times} times\)"):
        (under_flaky(memory()) / "a").write(b"1")
    assert len(asked) == times and not issubclass(UnreachableError, OSError)


@pytest.mark.slow
def test_a_store_that_accepts_and_closes_connections_ends_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch retries around retries around retries, which took minutes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def close_all() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=close_all, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="s3://bucket/a"):
        Url("s3://bucket/a").content(10)
    assert time.monotonic() - begin < 60
    s3fs.S3FileSystem.clear_instance_cache()
    listener.close()
