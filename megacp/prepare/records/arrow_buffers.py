"""What the buffers of an Arrow file become when they are decompressed, read from its headers before any of them is.

Key property: pyarrow decompresses a batch whole and tells no size first. The format does: each compressed buffer begins
with its length, and where buffers lie stands in the batch's header (a flatbuffer, `Message.fbs` and `File.fbs`).
Rejected: a limit on pyarrow's memory, which has none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_DICTIONARY, _BATCH = 2, 3
"""Kinds of a message's header."""


class Swelling(NamedTuple):
    """The buffer of a message that grows most: its bytes in the file and after."""

    packed: int
    size: int


class LazyBytes:
    """Some bytes of an open file, which are read when `bytes` asks for them; a slice is such bytes too."""

    def __init__(self, source: Any, start: int, size: int) -> None:
        self._source, self._start, self._size = source, start, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> LazyBytes:
        start, stop, _ = part.indices(self._size)
        return LazyBytes(self._source, self._start + start, max(0, stop - start))

    def __bytes__(self) -> bytes:
        self._source.seek(self._start)
        return bytes(self._source.read(self._size))


class _Table:
    """A table of a flatbuffer, by the numbers of its fields."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self._place = data, place
        self._fields = place - self._at("<i", place)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """The outermost table."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def _at(self, form: str, place: int) -> int:
        if place < 0:
            raise ValueError("a header points before its begin")
        return int(struct.unpack_from(form, self.data, place)[0])

    def _field(self, number: int) -> int:
        """Where a field lies; 0 when it is absent."""
        entry = 4 + 2 * number
        found = self._at("<H", self._fields + entry) if entry < self._at("<H", self._fields) else 0
        return self._place + found if found else 0

    def byte(self, number: int) -> int:
        """An 8-bit field."""
        place = self._field(number)
        return self._at("<B", place) if place else 0

    def number(self, number: int) -> int:
        """A 64-bit field."""
        place = self._field(number)
        return self._at("<q", place) if place else 0

    def table(self, number: int) -> _Table | None:
        """A field that is a table."""
        place = self._field(number)
        return _Table(self.data, place + self._at("<I", place)) if place else None

    def structs(self, number: int, form: str) -> list[tuple[int, ...]]:
        """A field that is a vector of structs."""
        place = self._field(number)
        if not place:
            return []
        begin = place + self._at("<I", place)
        count, each = self._at("<I", begin), struct.calcsize(form)
        if count * each > len(self.data):
            raise ValueError("a header has a list that is longer than itself")
        return [struct.unpack_from(form, self.data, begin + 4 + i * each) for i in range(count)]


def rows_of(header: bytes) -> int | None:
    """The rows of a message; None for a schema or a dictionary. Raises ValueError and struct.error like `swelling`."""
    message = _Table.root(header)
    batch = message.table(2) if message.byte(1) == _BATCH else None
    return batch.number(0) if batch is not None else None


def swelling(header: bytes, body: Any) -> Swelling | None:
    """The buffer of a message that decompresses to most, where its batch is compressed; `body` can be sliced.

    Raises ValueError and struct.error for a header that is none.
    """
    message = _Table.root(header)
    batch = message.table(2) if message.byte(1) in (_DICTIONARY, _BATCH) else None
    if batch is not None and message.byte(1) == _DICTIONARY:
        batch = batch.table(1)
    if batch is None or batch.table(3) is None:
        return None
    found = []
    for begin, length in batch.structs(2, "<qq"):
        if length >= 8:
            size = struct.unpack("<q", bytes(body[begin : begin + 8]))[0]
            found.append(Swelling(length, max(size, length - 8)))  # -1: it was stored as it is
    return max(found, key=lambda one: one.size, default=None)


def blocks(data: Any) -> Iterator[tuple[bytes, Any]]:
    """The messages that the footer of an Arrow file names, dictionaries first: the header and the body of each.

    `data` is the whole file and can be sliced. Raises ValueError and struct.error where it is damaged.
    """
    (length,) = struct.unpack("<i", bytes(data[len(data) - 10 : len(data) - 6]))
    if not 0 < length <= len(data) - 10:
        raise ValueError("the footer is longer than the file")
    footer = _Table.root(bytes(data[len(data) - 10 - length : len(data) - 10]))
    for field in (2, 3):
        for begin, header, body in footer.structs(field, "<qi4xq"):
            prefix = 8 if bytes(data[begin : begin + 4]) == b"\xff\xff\xff\xff" else 4
            yield bytes(data[begin + prefix : begin + header]), data[begin + header : begin + header + body]
