"""Files of a shard: fixed-width tables and Megatron's indexed bins, which are read by offset.

docs/datasets.md lists the files. A table is a little-endian structured `.npy` file, read as a
whole.

Files are not memory-mapped: if a file is truncated, replaced or unreadable during a run, an error
that names the file is raised, whereas a memory map would kill the process with SIGBUS. Checksums
are zlib's crc32; zlib-ng computes it at 40 GB/s, Python's zlib at 2 GB/s.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import threading
import weakref
from pathlib import Path

import numpy as np

from megacp.storage import files
from megacp.training.data.manifest import FileEntry

PACK_DTYPE = np.dtype(
    [
        ("first_segment", "<i8"),  # row of segments.npy; num_segments rows belong to the pack
        ("first_unit", "<i8"),  # row of units.npy; 0 in a text shard
        ("num_segments", "<i4"),
        ("num_units", "<i4"),
        ("num_tokens", "<i4"),  # sum of its segments' padded_length, at most seq_length
        ("num_crops", "<i4"),  # number of crops in its units, the second packing budget
    ]
)
SEGMENT_DTYPE = np.dtype(
    [
        # byte offset of the record in its uncompressed file, or the record's number
        ("source_offset", "<i8"),
        # index of the first token in the whole document; above 0 in later pieces of a document
        ("source_start", "<i8"),
        ("first_branch", "<i8"),  # row of branches.npy
        ("source_file", "<i4"),  # index into the manifest's sources
        ("true_length", "<i4"),  # tokens stored in tokens.bin
        ("padded_length", "<i4"),  # tokens in the pack including padding, which is not stored
        ("prefix_length", "<i4"),  # tokens before the first branch; true_length without branches
        ("num_branches", "<i4"),
        ("flags", "<u4"),  # FLAG_SPLIT | FLAG_TRUNCATED
    ]
)
# branches 1, 2, ... in token order; a branch may have branches
BRANCH_DTYPE = np.dtype(
    [
        ("start", "<i4"),  # first token, relative to the start of the segment, like `leave`
        ("length", "<i4"),  # number of tokens in the branch, without its own branches
        ("leave", "<i4"),  # end of its last branch; its own end if it has none
    ]
)
UNIT_DTYPE = np.dtype(
    [
        ("segment", "<i8"),  # row of segments.npy that contains the unit's tokens
        ("item", "<i8"),  # sequence of images.bin that contains the unit's bytes
        ("start", "<i4"),  # first token of the unit, relative to the start of the segment
        ("num_tokens", "<i4"),  # number of tokens, including markers
        ("image_stop", "<i4"),  # cumulative crops of the pack, including this unit
        ("pooled_stop", "<i4"),  # cumulative pooled tokens of the pack, including this unit
        ("frame", "<i4"),  # frame number in a video; -1 for an image
        ("branch", "<i4"),  # branch that contains the unit's tokens; 0 = the shared prefix
    ]
)
# grid of each unit's pooled tokens; the file is missing for families without grids
GRID_DTYPE = np.dtype([("rows", "<i4"), ("columns", "<i4")])
# checksums of each pack; `weights` is 0 in a shard without weights
CHECKSUM_DTYPE = np.dtype([("tokens", "<u4"), ("weights", "<u4")])
ITEM_CHECKSUM_DTYPE = np.dtype([("data", "<u4")])  # checksum of each sequence in images.bin
FLAG_SPLIT = 1  # the segment is a piece of a document, cut by `--oversize split`
FLAG_TRUNCATED = 2  # the end of the document was dropped by `--oversize truncate`
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Header of an .idx file: magic, version, dtype code, number of sequences, number of document
boundaries.
"""
_DTYPES = ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(_DTYPES, 1)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Return lengths rounded up to a multiple of `pad_multiple` >= 1, int64 [n]."""
    padded: np.ndarray = -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple
    return padded


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's dtype for token ids: uint16 if `vocab_size` < 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return PREFIX.bin or PREFIX.idx; the prefix may contain dots, such as "c4.v2"."""
    return prefix.with_name(prefix.name + suffix)


def pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte offsets of consecutive sequences, int64 [n]."""
    sizes = lengths.astype("<i8") * itemsize
    return np.cumsum(sizes) - sizes


class StoredFile:
    """An open file. It is closed with its last reference, never while a thread is reading it."""

    def __init__(
        self, path: files.StrPath, stated: FileEntry | None = None, name: str | None = None
    ) -> None:
        """Open a file. `name` replaces its path in messages, if it is a copy of another file.

        Raise ValueError if `path` is missing, is not a regular file, or differs from the `stated`
        size.
        """
        expected = "" if stated is None else f", the manifest says {stated.size} bytes"
        try:
            stream = files.open_regular(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(f"{path}: no such file{expected}") from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, stream.close)
        self.path = str(name or path)
        self._descriptor = stream.fileno()
        self.size = os.fstat(self._descriptor).st_size
        self._sha256 = None if stated is None else stated.sha256
        if stated is not None and self.size != stated.size:
            raise ValueError(f"{path}: {self.size} bytes{expected}")

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes starting at byte `offset`. Any thread may call this.

        Raise ValueError if the file ends earlier.
        """
        data = b""
        while len(data) < count:  # one call returns at most 2 GiB
            try:
                more = os.pread(self._descriptor, count - len(data), offset + len(data))
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from error
            if not more:
                found = os.fstat(self._descriptor).st_size
                raise ValueError(
                    f"{self.path}: has {found} bytes, but had {self.size} when it was opened"
                )
            data = data + more if data else more  # do not copy the usual single part
        return data

    def whole(self) -> bytes:
        """Return the contents of a small file. Raise ValueError if its sha256 is not as stated."""
        data = self.read(0, self.size)
        if self._sha256 is None:
            return data
        found = hashlib.sha256(data).hexdigest()
        if found != self._sha256:
            raise ValueError(
                f"{self.path}: sha256 is {found}, but the manifest says {self._sha256}"
            )
        return data


_PARSING = threading.Lock()
"""Lock for numpy's header parser: it uses `ast`, which occasionally fails if two threads use it in
Python 3.11 (CPython issue 106905).
"""


def table_of(file: StoredFile, dtype: np.dtype, columns: int | None = None) -> np.ndarray:
    """Return the read-only table in an `.npy` file, [rows] or [rows, columns] of `dtype`.

    Raise a ValueError that names the file if it has other contents.
    """
    row_shape = () if columns is None else (columns,)
    data = file.whole()
    try:
        with _PARSING:
            table: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        if table.dtype != dtype or table.shape[1:] != row_shape:
            raise ValueError(
                f"it has the shape {table.shape} and dtype {table.dtype}: rebuild the dataset"
            )
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file.path}: is not a table of {dtype.names}: {error}") from error
    table.setflags(write=False)
    return table


class IndexedReader:
    """Megatron's indexed dataset, `PREFIX.bin` + `PREFIX.idx`: sequences grouped into documents.

    After its header, the .idx file contains int32 sequence lengths, int64 byte pointers and int64
    document boundaries, counted in sequences (the first is 0). All are little-endian. In multimodal
    files, Megatron appends one int8 mode per sequence (`modes`, otherwise empty).
    """

    def __init__(self, index_file: StoredFile, bin_file: StoredFile) -> None:
        """Read the index.

        Raise a ValueError that names the file if the index is damaged or belongs to another bin.
        """
        self.bin = bin_file
        index = index_file.whole()
        try:
            magic, version, code, count, num_boundaries = HEADER.unpack_from(index)
            self.dtype = DTYPE_OF_CODE[code]
            # three arrays follow the header
            self.lengths = np.frombuffer(index, "<i4", count, HEADER.size)
            starts = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
            self.boundaries = np.frombuffer(index, "<i8", num_boundaries, HEADER.size + 12 * count)
            offsets = pointers(self.lengths, self.dtype.itemsize)
            self._offsets = np.append(offsets, bin_file.size)  # [count + 1]
            end = HEADER.size + 12 * count + 8 * num_boundaries
            self.modes = np.frombuffer(index, "i1", offset=end)
            is_known = (magic, version) == (MAGIC, VERSION) and len(self.modes) in (0, count)
            if not is_known or (self.lengths < 0).any():
                raise ValueError(f"it begins with {index[:18]!r} and has {len(index)} bytes")
            if not np.array_equal(starts, self._offsets[:-1]):
                raise ValueError("its pointers do not match its sequence lengths")
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{index_file.path}: is damaged or not a Megatron index: {error}"
            ) from error
        needed = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if bin_file.size != needed:
            raise ValueError(
                f"{bin_file.path}: {bin_file.size} bytes, but {index_file.path} describes {needed}"
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def document_starts(self) -> np.ndarray:
        """Return the byte of the bin at which each document begins, int64 [documents]."""
        return self._offsets[self.boundaries[:-1]]

    def stored(self, start: int, stop: int) -> bytes:
        """Return the bytes of sequences [start, stop)."""
        first = int(self._offsets[start])
        return self.bin.read(first, int(self._offsets[stop]) - first)
