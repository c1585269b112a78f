"""Reads records from JSONL (plain, `.gz`, `.zst`), and cuts a list of input files into units of work.

Key property: a unit depends on the files and `unit_bytes` alone, never on who reads it: a plain JSONL file is cut into
byte ranges, and a line belongs to the range in which it begins; a compressed file or a container is one piece. A bad
line becomes a `Refusal` with file, line and byte offset, and reading goes on behind it. Rejected: one reader feeding
all workers (the reader becomes the limit), and splitting by line count (reads everything twice).
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megacp.data.records.sample import RecordError, decode_json

DEFAULT_MAX_RECORD_BYTES = 64 << 20
_BLOCK = 1 << 20
_ZSTANDARD_STEP = 512
"""Bytes decompressed at once: a block of 4 bytes may stand for 128 KiB, so that this many give 16 MiB at most."""


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be used: one line of rejects.jsonl."""

    file: str
    line: int
    """1-based; in Parquet the row, in a tar the number of the record."""
    offset: int
    """Byte offset of the record in its (uncompressed) file; in Parquet the row, 0-based."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason} (byte offset {self.offset})"


@dataclass(frozen=True)
class Record:
    """A decoded record and where it stands; `line` and `offset` as in Refusal."""

    line: int
    offset: int
    size: int
    """Bytes it takes in the file."""
    value: Any
    members: dict[str, bytes] | None = None
    """Of a tar: the group's files that are neither record nor text, by their whole names (only when asked for)."""


@dataclass(frozen=True)
class Extent:
    """A byte range of one input file: the lines that begin in [start, stop); all of it when it cannot be cut."""

    source: int
    """Index into the list of input files."""
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A piece of work: what one worker turns into one shard."""

    index: int
    extents: tuple[Extent, ...]


def plan_units(paths: Sequence[str], unit_bytes: int) -> list[Unit]:
    """Cut input files into units of about `unit_bytes`: large plain files into ranges, small files grouped in order."""
    extents = []
    for source, path in enumerate(paths):
        size = os.path.getsize(path)
        count = -(-size // unit_bytes) if is_plain(path) else 1
        cuts = [size * i // count for i in range(count + 1)] if count else [0]
        extents += [Extent(source, path, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    groups: list[list[Extent]] = []
    filled = 0
    for extent in extents:
        size = extent.stop - extent.start
        if not groups or filled + size > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(extent)
        filled += size
    return [Unit(i, tuple(group)) for i, group in enumerate(groups)]


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
        with open(path, "rb", buffering=_BLOCK) as stream:
            yield from _zstandard_blocks(stream)

    return io.BufferedReader(_BlockStream(blocks()), _BLOCK)


_COMPRESSED: dict[str, Callable[[str], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".zst": _open_zstandard,
}
CONTAINERS = (".parquet", ".tar")


def is_plain(path: str) -> bool:
    """Whether a file is uncompressed JSONL, which byte ranges can cut and where an offset gives the line."""
    return Path(path).suffix not in (*_COMPRESSED, *CONTAINERS)


def line_number(path: str, offset: int) -> int:
    """The 1-based number of the line that begins at byte `offset` of a plain file. Reads everything before it."""
    count, left = 1, offset
    with open(path, "rb") as stream:
        while left and (block := stream.read(min(_BLOCK, left))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def read_extent(
    extent: Extent, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES, media: bool = False
) -> Iterator[Record | Refusal]:
    """The records of one extent of any supported file, in order, each bad one as a Refusal.

    `media`: whether records of a tar may have images and videos beside them.

    A Record's `line` counts from the extent's beginning (finding the true one costs a pass over the file); a
    Refusal's is the true one. A file cut short or damaged gives a last Refusal and ends.
    """
    suffix = Path(extent.path).suffix
    if suffix in CONTAINERS:
        from megacp.data.records.containers import READERS

        yield from READERS[suffix](extent.path, max_record_bytes, media)
        return
    opener = _COMPRESSED.get(suffix)
    with opener(extent.path) if opener else open(extent.path, "rb", buffering=_BLOCK) as stream:
        yield from _read_lines(extent, stream, max_record_bytes, plain=opener is None)


def _read_lines(extent: Extent, stream: IO[bytes], max_record_bytes: int, plain: bool) -> Iterator[Record | Refusal]:
    offset, line = extent.start, 0
    if offset:  # the line that runs into the range belongs to the range before it
        stream.seek(offset - 1)
        offset += _skip_line(stream) - 1
    base = None

    def refuse(reason: str) -> Refusal:
        nonlocal base
        if base is None:
            base = line_number(extent.path, offset) - line if plain else 0
        return Refusal(extent.path, base + line, offset, reason)

    while not plain or offset < extent.stop:
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
