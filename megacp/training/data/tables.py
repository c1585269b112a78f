"""The files of a shard: fixed-width tables, Megatron's indexed bins, and how one of them is opened
and read by offset.

docs/datasets.md lists them. A table is a little-endian structured `.npy`, read in one piece.

A file that is cut, replaced or unreadable while a run reads it is an error that names it; of a
memory map the same would end the process with SIGBUS. Checksums are zlib's crc32; zlib-ng makes 40
GB/s of it where Python's zlib makes 2.
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
        ("first_segment", "<i8"),  # row of segments.npy; the pack has num_segments from there
        ("first_unit", "<i8"),  # row of units.npy; 0 in a text shard
        ("num_segments", "<i4"),
        ("num_units", "<i4"),
        (
            "num_tokens",
            "<i4",
        ),  # padded: the sum of padded_length of its segments, at most seq_length
        ("num_crops", "<i4"),  # images (crops) of its units, the second packing budget
    ]
)
SEGMENT_DTYPE = np.dtype(
    [
        (
            "source_offset",
            "<i8",
        ),  # byte offset of the record in its uncompressed file, or its ordinal
        (
            "source_start",
            "<i8",
        ),  # index of the first token in the whole document; > 0 in later pieces of a split one
        ("first_branch", "<i8"),  # row of branches.npy
        ("source_file", "<i4"),  # index into the manifest's sources
        ("true_length", "<i4"),  # tokens stored in tokens.bin
        (
            "padded_length",
            "<i4",
        ),  # tokens it takes in the pack with its padding, which is not stored
        ("prefix_length", "<i4"),  # tokens before the first branch; true_length without branches
        ("num_branches", "<i4"),
        ("flags", "<u4"),  # FLAG_SPLIT | FLAG_TRUNCATED
    ]
)
BRANCH_DTYPE = (
    np.dtype(  # branches 1, 2, ... in the order of their tokens; a branch may have branches
        [
            ("start", "<i4"),  # its first token, within the segment, as are all
            ("length", "<i4"),  # its own tokens
            ("leave", "<i4"),  # where its last branch ends; its own end where it has none
        ]
    )
)
UNIT_DTYPE = np.dtype(
    [
        ("segment", "<i8"),  # row of segments.npy that holds the unit's tokens
        ("item", "<i8"),  # sequence of images.bin it comes from
        ("start", "<i4"),  # first of its tokens, within the segment
        ("num_tokens", "<i4"),  # tokens it takes, markers included
        (
            "image_stop",
            "<i4",
        ),  # cumulative images (crops) of the pack up to and with this unit: cum_image_bounds
        ("pooled_stop", "<i4"),  # cumulative pooled tokens likewise: cum_token_pooling_bounds
        ("frame", "<i4"),  # frame number within a video; -1 for an image
        ("branch", "<i4"),  # branch its tokens lie in; 0 = the shared prefix
    ]
)
GRID_DTYPE = np.dtype(
    [("rows", "<i4"), ("columns", "<i4")]
)  # of the pooled tokens of each unit; absent: a family without
CHECKSUM_DTYPE = np.dtype(
    [("tokens", "<u4"), ("weights", "<u4")]
)  # of each pack; 0 in a shard without weights
ITEM_CHECKSUM_DTYPE = np.dtype([("data", "<u4")])  # of each sequence of images.bin
FLAG_SPLIT = 1  # of a segment: a piece of a document cut by `--oversize split`
FLAG_TRUNCATED = 2  # the rest of the document was left out by `--oversize truncate`
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
"""Header of an .idx: magic, version, dtype code, number of sequences, number of document
boundaries.
"""
_DTYPES = ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(_DTYPES, 1)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple of `pad_multiple` >= 1, int64 [n]."""
    padded: np.ndarray = -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple
    return padded


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's rule for the dtype of token ids: uint16 when `vocab_size` < 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin or PREFIX.idx, also of a prefix such as "c4.v2"."""
    return prefix.with_name(prefix.name + suffix)


def pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offsets of consecutive sequences: the exclusive running sum of their sizes, int64
    [n].
    """
    sizes = lengths.astype("<i8") * itemsize
    return np.cumsum(sizes) - sizes


class StoredFile:
    """An open file. It closes with its last reference, so never under a thread that still reads."""

    def __init__(
        self, path: files.StrPath, stated: FileEntry | None = None, name: str | None = None
    ) -> None:
        """ValueError: `path` is not there, no regular file, or has not the stated size. `name`:
        whose copy it is.
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
        """`count` bytes from byte `offset` on, from any thread. ValueError when the file ends
        before.
        """
        data = b""
        while len(data) < count:  # one call gives 2 GiB at most
            try:
                more = os.pread(self._descriptor, count - len(data), offset + len(data))
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from error
            if not more:
                found = os.fstat(self._descriptor).st_size
                raise ValueError(
                    f"{self.path}: has {found} bytes, it had {self.size} when it was opened"
                )
            data = data + more if data else more
        return data

    def whole(self) -> bytes:
        """All of a small file. ValueError when its sha256 is not the stated one."""
        data = self.read(0, self.size)
        if self._sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != self._sha256:
            raise ValueError(f"{self.path}: sha256 is {found}, the manifest says {self._sha256}")
        return data


_PARSING = threading.Lock()
"""numpy reads a header through `ast`, which fails now and then in two threads of Python 3.11
(CPython issue 106905).
"""


def table_of(file: StoredFile, dtype: np.dtype, columns: int | None = None) -> np.ndarray:
    """All of an `.npy` of that dtype, [rows] or [rows, columns], read-only. ValueError names a file
    that is another.
    """
    data = file.whole()
    try:
        with _PARSING:
            table: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        if table.dtype != dtype or table.shape[1:] != (() if columns is None else (columns,)):
            raise ValueError(f"it holds {table.shape} of {table.dtype}: build the dataset again")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file.path}: is no table of {dtype.names}: {error}") from error
    table.setflags(write=False)
    return table


class IndexedReader:
    """Megatron's indexed dataset, `PREFIX.bin` + `PREFIX.idx`: a ragged array of sequences, grouped
    into documents.

    After the header, the .idx has int32 sequence lengths, int64 byte pointers and int64 boundaries
    in sequences (first 0), all little-endian. Megatron appends one int8 mode per sequence to
    multimodal files: accepted, not used.
    """

    def __init__(self, index_file: StoredFile, bin_file: StoredFile) -> None:
        """Read the index; ValueError names the file that is no index, damaged, or swapped with
        another one's.
        """
        self.bin = bin_file
        index = index_file.whole()
        try:
            magic, version, code, count, num_boundaries = HEADER.unpack_from(index)
            self.dtype = DTYPE_OF_CODE[code]
            self.lengths = np.frombuffer(index, "<i4", count, HEADER.size)
            starts = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
            self.boundaries = np.frombuffer(index, "<i8", num_boundaries, HEADER.size + 12 * count)
            self._offsets = np.append(
                pointers(self.lengths, self.dtype.itemsize), bin_file.size
            )  # [count + 1]
            modes = len(index) - HEADER.size - 12 * count - 8 * num_boundaries
            if (
                (magic, version) != (MAGIC, VERSION)
                or modes not in (0, count)
                or (self.lengths < 0).any()
            ):
                raise ValueError(f"it begins with {index[:18]!r} and has {len(index)} bytes")
            if not np.array_equal(starts, self._offsets[:-1]):
                raise ValueError("its pointers are not where its sequences end")
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{index_file.path}: is no Megatron index, or damaged: {error}"
            ) from error
        needed = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if bin_file.size != needed:
            raise ValueError(
                f"{bin_file.path}: {bin_file.size} bytes, {index_file.path} describes {needed}"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def stored(self, start: int, stop: int) -> bytes:
        """The bytes of sequences `start..stop`."""
        first = int(self._offsets[start])
        return self.bin.read(first, int(self._offsets[stop]) - first)
