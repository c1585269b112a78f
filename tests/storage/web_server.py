"""A web server for tests with bad answers: one byte at a time, endless, or none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAIN = b'{"text": "a word"}\n'
"""Content of `/plain`."""


class Handler(BaseHTTPRequestHandler):
    """Select the answer by the last part of the path: `plain`, `drip`, `slow_headers` or `index`;
    any other name is endless.
    """

    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):  # the client may disconnect early
            self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        kind = self.path.rsplit("/", 1)[-1].partition(".")[0]
        if kind == "slow_headers":
            self.send_byte_by_byte(b"HTTP/1.0 200 OK\r\nX-A: " + b"a" * 500)
        self.send_response(200)
        if kind == "index":
            self.send_header("Content-Type", "text/html")
        if kind == "plain":
            self.send_header("Content-Length", str(len(PLAIN)))
        if kind in ("large", "drip_of_known_size"):
            self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        if not with_body:
            return
        if kind == "plain":
            self.wfile.write(PLAIN)
        elif kind.startswith("drip"):
            self.send_byte_by_byte(b"a" * 500)
        else:
            while not self.server.stopped.is_set():
                self.wfile.write(bytes(1 << 20))
                self.server.sent += 1 << 20

    def send_byte_by_byte(self, data: bytes) -> None:
        for i in range(len(data)):
            if self.server.stopped.is_set():
                return
            self.wfile.write(data[i : i + 1])
            self.wfile.flush()
            time.sleep(0.02)

    def log_message(self, format: str, *words: object) -> None:
        """Do not log requests."""


class Server(ThreadingHTTPServer):
    """A server that counts the bytes it sends and stops when `stopped` is set."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.sent = 0
        self.stopped = threading.Event()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), Handler)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_port}"


@contextlib.contextmanager
def bad_server(host: str = "127.0.0.1") -> Iterator[Server]:
    """Run the server. Raise OSError if this machine does not have the address."""
    with Server(host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join(10)
