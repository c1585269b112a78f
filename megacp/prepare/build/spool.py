"""A nameless temporary file that holds encoded images from the moment they are read until their pack is written.

Memory stays bounded by a window's tokens, and a killed build leaves nothing behind. Each image is read once; read
twice, a file could change in between.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    """Where some bytes are in the spool."""

    offset: int
    size: int


class Spool:
    """Append, read back, empty."""

    def __init__(self, directory: Path) -> None:
        """In the file system of `directory`, which must exist."""
        self._stream = tempfile.TemporaryFile(dir=directory)

    def add(self, data: bytes) -> Stored:
        """Append bytes."""
        offset = self._stream.seek(0, os.SEEK_END)
        return Stored(offset, self._stream.write(data))

    def read(self, stored: Stored) -> bytes:
        """The bytes of an `add` since the last `clear`."""
        self._stream.seek(stored.offset)
        return self._stream.read(stored.size)

    def clear(self) -> None:
        """Forget everything."""
        self._stream.truncate(0)

    def close(self) -> None:
        """Give the space back."""
        self._stream.close()
