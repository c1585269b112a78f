"""Megatron's indexed dataset, `.bin` + `.idx`: a ragged array of sequences, grouped into documents, read by offset.

The `.idx` is checked against itself and against the size of the `.bin`, so a truncated or swapped file is an error that
names it.

`.idx` begins with a 9-byte magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64 number of
document boundaries (documents + 1). Arrays follow: int32 sequence lengths, int64 byte pointers, int64 boundaries in
sequences (first 0). All little-endian. Multimodal files of Megatron append one int8 mode per sequence: accepted, not
used.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from megacp.core.data.stored_file import StoredFile

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


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin or PREFIX.idx."""
    # Path.with_suffix would eat the part of a prefix such as "c4.v2" behind its last dot
    return prefix.with_name(prefix.name + suffix)


def pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
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
        return IndexedReader(*(StoredFile(with_suffix(Path(prefix), suffix)) for suffix in (".idx", ".bin")))

    def _check_tables(self) -> None:
        wrong = ""
        if not np.array_equal(self._pointers, pointers(self.lengths, self.dtype.itemsize)) or (self.lengths < 0).any():
            wrong = "its pointers are not where its sequences end"
        bounds = self.boundaries
        if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > len(self.lengths):
            wrong = f"document boundaries must rise from 0 to at most {len(self.lengths)} sequences"
        if wrong:
            raise ValueError(f"{self.index_path}: the file is damaged: {wrong}")
        needed = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if self.bin.size != needed:
            raise ValueError(
                f"{self.bin.path}: {self.bin.size} bytes, but {os.path.basename(self.index_path)} describes {needed} "
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
