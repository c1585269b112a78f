"""Blocks of objects in memory: a few large requests in place of many small ones.

Key property: a block that several threads want is asked for once, and other blocks are read meanwhile. What is kept has
a limit, and the block that was not used for longest goes first. A failed request is forgotten: the next one asks again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from megacp.core.storage.url import Url

_Key = tuple[Url, int]


class BlockCache:
    """Blocks of `block_bytes` of any objects, together at most `most_bytes`, beside those that are being read."""

    def __init__(self, most_bytes: int, block_bytes: int) -> None:
        self.block_bytes, self._most_bytes = block_bytes, most_bytes
        self._reserved = 0
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._changes = threading.Lock()

    def reserve(self, count: int) -> bool:
        """Whether objects of together `count` bytes fit beside those that have reserved their place; they do then."""
        with self._changes:
            fits = self._reserved + count <= self._most_bytes
            self._reserved += count if fits else 0
        return fits

    def read(self, url: Url, size: int, offset: int, count: int) -> bytes:
        """`count` bytes of an object of `size` bytes, from any thread."""
        if not count:
            return b""
        parts = []
        for number in range(offset // self.block_bytes, (offset + count - 1) // self.block_bytes + 1):
            begin = number * self.block_bytes
            block = self._block(url, number, size)
            parts.append(block[max(0, offset - begin) : offset + count - begin])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, url: Url, number: int, size: int) -> bytes:
        key = url, number
        with self._changes:
            found = self._blocks.get(key)
            block = self._blocks.setdefault(key, found or Future())
            self._blocks.move_to_end(key)
        if found is None:
            begin = number * self.block_bytes
            try:
                block.set_result(url.read(begin, min(self.block_bytes, size - begin)))
            except BaseException as error:
                with self._changes:
                    del self._blocks[key]
                block.set_exception(error)
            else:
                self._shrink()
        return block.result()

    def _shrink(self) -> None:
        with self._changes:
            done = {key: len(block.result()) for key, block in self._blocks.items() if block.done()}
            excess = sum(done.values()) - self._most_bytes
            for key, count in list(done.items())[:-1]:  # the newest is about to be read
                if excess <= 0:
                    return
                excess -= count
                del self._blocks[key]
