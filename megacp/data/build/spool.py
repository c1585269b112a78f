"""A nameless temporary file that holds encoded images from the moment they are read until their pack is written.

Key property: memory stays bounded by a window's tokens, whatever the images weigh, each is read once from where the
user keeps it, and a killed build leaves nothing behind. Rejected: keeping the bytes in memory, and reading files twice,
between which they could change.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stored:
    """Where some bytes are in the spool."""

    offset: int
    size: int


class Spool:
    """Append, read back, empty."""

    def __init__(self, directory: Path) -> None:
        """In the file system of `directory`, which must exist."""
        self._stream = tempfile.TemporaryFile(dir=directory, buffering=0)
        self._size = 0

    def add(self, data: bytes) -> Stored:
        """Append bytes."""
        stored = Stored(self._size, len(data))
        view = memoryview(data)
        while len(view):  # one write may take only a part
            written = os.pwrite(self._stream.fileno(), view, self._size)
            view, self._size = view[written:], self._size + written
        return stored

    def read(self, stored: Stored) -> bytes:
        """The bytes of an `add` since the last `clear`."""
        blocks, place, left = [], stored.offset, stored.size
        while left:
            block = os.pread(self._stream.fileno(), left, place)
            assert block, "the spool holds what was added"
            blocks.append(block)
            place, left = place + len(block), left - len(block)
        return b"".join(blocks)

    def clear(self) -> None:
        """Forget everything."""
        self._stream.truncate(0)
        self._size = 0

    def close(self) -> None:
        """Give the space back."""
        self._stream.close()
