"""moto's S3 server on this machine, with a proxy that refuses requests and truncates answers."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from megacp.storage.url import Url

_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class QuietHandler(WSGIRequestHandler):
    """A handler that logs no requests and keeps connections open, like a real store."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@dataclass
class FaultyServer:
    """Wrap an application and refuse, truncate or drop `share` of its requests."""

    application: Callable[..., Iterable[bytes]]
    share: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Counter[str] = field(default_factory=Counter)

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        kind = "sound"
        if self.rng.random() < self.share:
            kind = self.rng.choice(["busy", "cut", "gone"])
        self.faults[kind] += 1
        if kind == "busy":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(
                "503 Slow Down",
                [("Content-Type", "application/xml"), ("Content-Length", str(len(_BUSY)))],
            )
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [_BUSY]
        if kind == "gone":
            environ["werkzeug.socket"].shutdown(2)
            raise ConnectionResetError("cut before an answer")
        parts = self.application(environ, start_response)
        answer = b"".join(parts)
        getattr(parts, "close", lambda: None)()
        return self._cut(answer, environ) if kind == "cut" and len(answer) > 1 else [answer]

    def _cut(self, answer: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
        yield answer[: len(answer) // 2]
        environ["werkzeug.socket"].shutdown(2)


@dataclass
class S3Server:
    """A running server: its faults, an empty bucket, and the environment of its clients."""

    faults: FaultyServer
    bucket: Url
    environment: dict[str, str]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server with one bucket. Clients of this process and of its children find it through
    botocore's environment variables.
    """
    faults = FaultyServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=QuietHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        bucket = Url(f"s3://bucket-{server.server_port}-{time.time_ns()}")
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket.text)
        try:
            yield S3Server(faults, bucket, environment)
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.shutdown()
            thread.join(10)
            server.server_close()


def use(environment: dict[str, str]) -> None:
    """Let a rank that was forked before the server started find it."""
    os.environ.update(environment)
