"""A document on its way into a pack: its encoded images in a spool, its tokens in segments."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from megacp.prepare.build.writer import Segment
from megacp.prepare.records.documents import Document


class Stored(NamedTuple):
    """Where some bytes are in the spool."""

    offset: int
    size: int


class Spool:
    """A nameless temporary file of encoded images, from their reading until their pack is written."""

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


def segment_of(document: Document, start: int, stop: int, cut_flag: int, spool: Spool | None) -> Segment:
    """Tokens start..stop of a document as a segment; one with branches or images is never cut."""
    origin = document.origin
    if start == 0 and stop == len(document.tokens):
        # `item` is bound here: a closure over the loop's variable would read the last one each time
        items = tuple(lambda item=item: spool.read(item) for item in origin.items) if spool is not None else ()
        place = origin.source, origin.offset, 0
        return Segment(document.tokens, document.weights, *place, document.branch_starts, 0, document.units, items)
    weights = None if document.weights is None else document.weights[start:stop]
    return Segment(document.tokens[start:stop], weights, origin.source, origin.offset, start, (), cut_flag)
