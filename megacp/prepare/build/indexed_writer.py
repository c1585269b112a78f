"""Megatron's `.bin/.idx` and the tables of a shard, written once and front to back, with their sizes and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from array import array
from pathlib import Path

import numpy as np

from megacp.core.data.tables import CODE_OF_DTYPE, HEADER, MAGIC, VERSION, crc32, pointers, with_suffix
from megacp.core.storage import files


class HashedFile:
    """A file written once, front to back, whose size and sha256 are known when it is closed (no second pass)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create (or empty) `path`."""
        self.path = Path(path)
        self.size = 0
        self._hash = hashlib.sha256()
        self._stream = open(self.path, "wb", buffering=1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes (a memoryview must be contiguous and of bytes)."""
        self._hash.update(data)
        self._stream.write(data)
        self.size += len(data)

    def close(self) -> str:
        """Flush to the disk (fsync) and close; returns the sha256 in hex. Call it once."""
        files.sync_file(self._stream)
        self._stream.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close without making anything durable; the caller deletes the file."""
        with contextlib.suppress(OSError):  # on a full disk what is left in the buffer cannot be written
            self._stream.close()


class IndexedWriter:
    """Streams sequences to `PREFIX.bin`; `close` writes `PREFIX.idx`. Memory: 4 bytes a sequence, 8 a document.

    Typical use:
        writer = IndexedWriter(directory / "tokens", token_dtype(vocab_size))
        writer.add_sequence(tokens)          # once per source document
        writer.end_document()                # once per pack
        files = writer.close()               # [(path, size, sha256), ...], both fsynced
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype) -> None:
        """`prefix` without suffix; `dtype` one of DTYPE_OF_CODE. Existing files of that name are emptied."""
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"{self.prefix}: the .idx format has no dtype {dtype}; it knows {list(CODE_OF_DTYPE)}")
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._crc, self._checksums = 0, array("I")
        self._bin = HashedFile(with_suffix(self.prefix, ".bin"))

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    def add_sequence(self, values: np.ndarray) -> None:
        """Append one sequence, `values[n]`, any numeric dtype whose values fit `dtype`.

        Integers out of the dtype's range raise ValueError (a cast would wrap around silently).
        """
        values = np.asarray(values)
        if values.ndim != 1:
            raise ValueError(f"{self.prefix}: a sequence must be 1-D, got shape {values.shape}")
        if values.dtype != self.dtype:
            values = self._cast(values)
        stored = np.ascontiguousarray(values).view(np.uint8).data
        self._crc = crc32(stored, self._crc)
        self._bin.write(stored)
        self._lengths.append(len(values))

    def _cast(self, values: np.ndarray) -> np.ndarray:
        if self.dtype.kind in "iu" and len(values):
            low, high, limits = values.min(), values.max(), np.iinfo(self.dtype)
            if values.dtype.kind not in "iub" or low < limits.min or high > limits.max:
                raise ValueError(
                    f"{self.prefix}.bin stores {self.dtype} ({limits.min}..{limits.max}), "
                    f"got {values.dtype} values from {low} to {high}"
                )
        return values.astype(self.dtype)

    def end_document(self) -> None:
        """Close the current document (one pack): it holds the sequences added since the last call."""
        self._boundaries.append(len(self._lengths))
        self._checksums.append(self._crc)
        self._crc = 0

    @property
    def checksums(self) -> np.ndarray:
        """crc32 of the stored bytes of each document so far, uint32 [documents]."""
        return np.array(self._checksums, np.uint32)

    def close(self) -> list[tuple[Path, int, str]]:
        """Write the `.idx`, fsync both files; returns (path, size in bytes, sha256) of the `.bin` and the `.idx`."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        boundaries = np.frombuffer(self._boundaries, dtype=np.int64)
        index = HashedFile(with_suffix(self.prefix, ".idx"))
        index.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(lengths), len(boundaries)))
        for table in (lengths.astype("<i4"), pointers(lengths, self.dtype.itemsize), boundaries.astype("<i8")):
            index.write(table.tobytes())
        return [(file.path, file.size, file.close()) for file in (self._bin, index)]

    def abandon(self) -> None:
        """Close the `.bin` unfinished; the caller deletes it."""
        self._bin.abandon()


def write_table(path: str | os.PathLike[str], table: np.ndarray) -> tuple[Path, int, str]:
    """Write an `.npy` and fsync it; returns (path, size, sha256). The same table gives the same bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(table))
    file = HashedFile(path)
    file.write(header.getvalue())
    file.write(
        np.ascontiguousarray(table).reshape(-1).view(np.uint8).data
    )  # no copy: a shard may have millions of rows
    return file.path, file.size, file.close()
