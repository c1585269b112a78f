"""Reads records from JSONL: plain, `.gz` or `.zst`.

Key property: a line belongs to the byte range in which it begins. A bad line becomes a `Refusal` with file, line and
byte offset, and reading goes on behind it.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from megacp.core.storage.place import open_input, suffix_of
from megacp.core.storage.url import is_url
from megacp.prepare.records.record import Record, RecordError, Refusal
from megacp.prepare.records.sample import decode_json

_BLOCK = 1 << 20
_ZSTANDARD_STEP = 512
"""Bytes decompressed at once: a block of 4 bytes may stand for 128 KiB, so that this many give 16 MiB at most."""


def _zstandard_blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompressed blocks of a `.zst` of any number of frames; EOFError when the last one is cut."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("reading .zst needs the package zstandard: pip install 'megacp[data]'") from error
    decoder = zstandard.ZstdDecompressor().decompressobj()
    waiting = b""
    started = False
    while block := waiting or stream.read(_ZSTANDARD_STEP):
        if decoder.eof:
            decoder = zstandard.ZstdDecompressor().decompressobj()
        started = True
        try:
            data = decoder.decompress(block)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from error
        waiting = decoder.unused_data if decoder.eof else b""
        if data:
            yield data
    if started and not decoder.eof:
        raise EOFError("the last frame has no end")


class _BlockStream(io.RawIOBase):
    """A readable byte stream over an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(self._rest):
            self._rest = memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _open_zstandard(path: str) -> IO[bytes]:
    def blocks() -> Iterator[bytes]:
        with open_input(path) as stream:
            yield from _zstandard_blocks(stream)

    return io.BufferedReader(_BlockStream(blocks()), _BLOCK)


COMPRESSED: dict[str, Callable[[str], Any]] = {
    ".gz": lambda path: gzip.open(open_input(path) if is_url(path) else path, "rb"),
    ".zst": _open_zstandard,
}


def line_number(path: str, offset: int) -> int:
    """The 1-based number of the line that begins at byte `offset` of a plain file. Reads everything before it."""
    count, left = 1, offset
    with open_input(path) as stream:
        while left and (block := stream.read(min(_BLOCK, left))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def read_jsonl(path: str, start: int, stop: int, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """The records of the lines that begin in bytes [start, stop) of a plain file, or of all of a compressed one.

    `line` and Refusals as in `read.read_extent`.
    """
    opener = COMPRESSED.get(suffix_of(path))
    with opener(path) if opener else open_input(path) as stream:
        yield from _read_lines(path, stream, start, None if opener else stop, max_record_bytes)


def _read_lines(
    path: str, stream: IO[bytes], offset: int, stop: int | None, max_record_bytes: int
) -> Iterator[Record | Refusal]:
    """Records from byte `offset` on; `stop`: of a plain file."""
    line, base = 0, None
    if offset:  # the line that runs into the range belongs to the range before it
        stream.seek(offset - 1)
        offset += _skip_line(stream) - 1

    def refuse(reason: str) -> Refusal:
        nonlocal base
        if base is None:
            base = 0 if stop is None else line_number(path, offset) - line
        return Refusal(path, base + line, offset, reason)

    while stop is None or offset < stop:
        line += 1
        try:
            data = stream.readline(max_record_bytes + 2)
            size = len(data)
            content = data.rstrip(b"\r\n")
            if len(content) > max_record_bytes and not data.endswith(b"\n"):
                size += _skip_line(stream)
        except (EOFError, OSError, zlib.error) as error:
            yield refuse(_damage(error))
            return
        if not size:
            return
        if len(content) > max_record_bytes:
            yield refuse(f"a line of {size} bytes, more than --max-record-bytes {max_record_bytes}")
        else:
            if offset == 0 and content.startswith(b"\xef\xbb\xbf"):
                content = content[3:]
            try:
                if not content.strip():
                    raise RecordError("an empty line")
                yield Record(line, offset, size, decode_json(content))
            except RecordError as error:
                yield refuse(str(error))
        offset += size


def _skip_line(stream: IO[bytes]) -> int:
    """Read to the end of the line without keeping it; returns the number of bytes."""
    size = 0
    while block := stream.readline(_BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _damage(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the compressed file is cut short: it ends inside this line, nothing after it can be read"
    return f"the compressed file is damaged here, nothing after it can be read ({error})"
