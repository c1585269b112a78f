"""One file of a packed dataset: opened as a regular file of the stated size, read by offset.

A file that is cut, replaced or unreadable while a run reads it is an error that names it; of a memory map the same
would end the process with SIGBUS. Checksums are zlib's crc32; zlib-ng makes 40 GB/s of it where Python's zlib makes 2.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from typing import Protocol

from zlib_ng.zlib_ng import crc32

from megacp.core.storage import files

__all__ = ["FileStatement", "StoredFile", "crc32"]


class FileStatement(Protocol):
    """What a manifest says of a file."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def sha256(self) -> str:
        """In hex."""
        ...


class StoredFile:
    """An open file. It closes with its last reference, so never under a thread that still reads."""

    def __init__(self, path: files.StrPath, stated: FileStatement | None = None, name: str | None = None) -> None:
        """ValueError: `path` is not there, no regular file, or has not the stated size. `name`: whose copy it is."""
        try:
            stream = files.open_regular(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            text = "" if stated is None else f", the manifest says {stated.size} bytes"
            raise ValueError(f"{path}: no such file{text}") from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, stream.close)
        self.path, self._descriptor = name or path, stream.fileno()
        self.size = os.fstat(self._descriptor).st_size
        self._sha256 = None if stated is None else stated.sha256
        if stated is not None and self.size != stated.size:
            raise ValueError(f"{path}: {self.size} bytes, the manifest says {stated.size}")

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from byte `offset` on, from any thread. ValueError when the file ends before."""
        data = b""
        while len(data) < count:  # one call gives 2 GiB at most
            try:
                more = os.pread(self._descriptor, count - len(data), offset + len(data))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not more:
                raise ValueError(
                    f"{self.path}: has {os.fstat(self._descriptor).st_size} bytes, it had {self.size} when it was "
                    "opened: it was cut meanwhile"
                )
            data = data + more if data else more
        return data

    def whole(self) -> bytes:
        """All of a small file. ValueError when its sha256 is not the stated one."""
        data = self.read(0, self.size)
        if self._sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != self._sha256:
            raise ValueError(f"{self.path}: sha256 is {found}, the manifest says {self._sha256}")
        return data
