"""Megatron's indexed dataset, `.bin` + `.idx`: a ragged array of sequences, grouped into documents, read by place.

Key property: a prefix that opens is whole. The `.idx` is checked against itself and against the size of the `.bin`, so
a truncated or swapped file is an error that names it. One sequence is one read at a known place. Rejected: zarr or
arrow, which no Megatron tool reads, and megatron-core itself, which pulls in torch.

`.idx` begins with a 9-byte magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64 number of
document boundaries (documents + 1). Arrays follow: int32 sequence lengths, int64 byte pointers, int64 boundaries in
sequences (first 0). All little-endian. Multimodal files of Megatron append one int8 mode per sequence: accepted, not
used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from array import array
from pathlib import Path

import numpy as np

from megacp.core.data.stored_file import StoredFile, crc32
from megacp.core.storage import files

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's rule for the dtype of token ids: uint16 when `vocab_size` < 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


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
        self._bin = HashedFile(_with_suffix(self.prefix, ".bin"))

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
        index = HashedFile(_with_suffix(self.prefix, ".idx"))
        index.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(lengths), len(boundaries)))
        for table in (lengths.astype("<i4"), _pointers(lengths, self.dtype.itemsize), boundaries.astype("<i8")):
            index.write(table.tobytes())
        return [(file.path, file.size, file.close()) for file in (self._bin, index)]

    def abandon(self) -> None:
        """Close the `.bin` unfinished; the caller deletes it."""
        self._bin.abandon()


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Path.with_suffix would eat the part of a prefix such as "c4.v2" behind its last dot
    return prefix.with_name(prefix.name + suffix)


def _pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offsets of consecutive sequences: the exclusive running sum of their sizes, int64 [n]."""
    stops = np.cumsum(lengths, dtype=np.int64) * itemsize
    return np.concatenate(([0], stops[:-1])).astype("<i8") if len(lengths) else np.zeros(0, "<i8")


class IndexedReader:
    """Reads `PREFIX.bin` / `PREFIX.idx`; arrays returned are read-only.

    Attributes: `dtype`; `lengths` int32 [sequences]; `boundaries` int64 [documents + 1], in sequences; `bin`.
    """

    def __init__(self, index_file: StoredFile, bin_file: StoredFile) -> None:
        """Check both, read the index; ValueError names the file and the numbers when one is truncated, or swapped."""
        self.index_path, self.bin = index_file.path, bin_file
        self.dtype, num_sequences, num_boundaries = _read_header(index_file)  # the size is right before all is read
        index = np.frombuffer(index_file.whole(), np.uint8)
        start = HEADER.size
        self.lengths = index[start : start + 4 * num_sequences].view("<i4")
        start += 4 * num_sequences
        self._pointers = index[start : start + 8 * num_sequences].view("<i8")
        start += 8 * num_sequences
        self.boundaries = index[start : start + 8 * num_boundaries].view("<i8")
        self._check_tables()
        # byte offsets of sequences, with the end
        self._offsets = np.append(self._pointers, self.bin.size)

    @staticmethod
    def open(prefix: str | os.PathLike[str]) -> IndexedReader:
        """`PREFIX.bin` and `PREFIX.idx`, without a manifest. ValueError also when one is missing."""
        return IndexedReader(*(StoredFile(_with_suffix(Path(prefix), suffix)) for suffix in (".idx", ".bin")))

    def _check_tables(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise ValueError(f"{self.index_path}: sequence {int(self.lengths.argmin())} has a negative length")
        expected = _pointers(self.lengths, self.dtype.itemsize)
        if not np.array_equal(self._pointers, expected):
            first = int(np.flatnonzero(self._pointers != expected)[0])
            raise ValueError(
                f"{self.index_path}: sequence {first} points at byte {int(self._pointers[first])}, the lengths before "
                f"it end at byte {int(expected[first])}: the file is damaged"
            )
        bounds = self.boundaries
        if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > len(self.lengths):
            raise ValueError(
                f"{self.index_path}: document boundaries must rise from 0 to at most {len(self.lengths)} sequences, "
                f"they run from {int(bounds[0])} to {int(bounds[-1])}"
            )
        size = self.bin.size
        needed = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if size != needed:
            raise ValueError(
                f"{self.bin.path}: {size} bytes, but {os.path.basename(self.index_path)} describes {needed} "
                f"({len(self.lengths)} sequences of {self.dtype}): truncated, or it belongs to another index"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def stored(self, start: int, stop: int) -> bytes:
        """The bytes of sequences `start..stop`."""
        if not 0 <= start <= stop <= len(self.lengths):
            raise IndexError(f"sequences {start}..{stop} of {self.bin.path}, which has {len(self.lengths)}")
        first = int(self._offsets[start])
        return self.bin.read(first, int(self._offsets[stop]) - first)


def _read_header(file: StoredFile) -> tuple[np.dtype, int, int]:
    path = file.path
    if file.size < HEADER.size:
        raise ValueError(f"{path}: {file.size} bytes, the header alone has {HEADER.size}: truncated")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(file.read(0, HEADER.size))
    if magic != MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, a Megatron index with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: index version {version}, only {VERSION} is known")
    if code not in DTYPE_OF_CODE:
        raise ValueError(f"{path}: dtype code {code}, known are {sorted(DTYPE_OF_CODE)}")
    size = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if num_boundaries < 1 or file.size not in (size, size + num_sequences):
        raise ValueError(
            f"{path}: {file.size} bytes, but {num_sequences} sequences and {num_boundaries} document boundaries "
            f"take {size}: truncated or damaged"
        )
    return DTYPE_OF_CODE[code], num_sequences, num_boundaries
