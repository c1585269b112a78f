"""Where a pack is written: the shard directories of a packed dataset, each under its name when all
of it is durable.

A pack is a Megatron "document", each segment (source document) one "sequence" of true tokens.
Weights of 1 everywhere are not stored, and a shard without images is that of a text dataset.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from zlib_ng.zlib_ng import crc32

from megacp.engine.rows.image_shards import compute_image_shard_boundaries
from megacp.prepare.records.documents import SegmentUnit
from megacp.storage import files
from megacp.training.data import tables
from megacp.training.data.manifest import FileEntry, ShardEntry
from megacp.training.data.tables import (
    CODE_OF_DTYPE,
    HEADER,
    MAGIC,
    VERSION,
    pointers,
    token_dtype,
    with_suffix,
)

# one row each of PACK_DTYPE, SEGMENT_DTYPE, ...: packing a row with struct is several times faster
# than with numpy
_PACK_ROW = struct.Struct("<qqiiii")
_SEGMENT_ROW = struct.Struct("<qqqiiiiiI")
_BRANCH_ROW = struct.Struct("<iii")
_UNIT_ROW = struct.Struct("<qqiiiiii")
_GRID_ROW = struct.Struct("<ii")


class HashedFile:
    """A file written once, front to back, whose size and sha256 are known when it is closed (no
    second pass).
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._hash = hashlib.sha256()
        self._stream = open(path, "wb", buffering=1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes (a memoryview must be contiguous and of bytes)."""
        self._hash.update(data)
        self._stream.write(data)
        self.size += len(data)

    def close(self) -> FileEntry:
        """Flush to the disk (fsync) and close; name, size and sha256. Call it once."""
        files.sync_file(self._stream)
        self._stream.close()
        return FileEntry(self.path.name, self.size, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close without making anything durable; the caller deletes the file."""
        with contextlib.suppress(
            OSError
        ):  # on a full disk what is left in the buffer cannot be written
            self._stream.close()


class IndexedWriter:
    """Streams sequences to Megatron's `PREFIX.bin`; `close` writes `PREFIX.idx`."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        """`prefix` without suffix; `dtype` one of DTYPE_OF_CODE. Existing files of that name are
        emptied.
        """
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self._lengths, self._boundaries = array("i"), array("q", [0])
        self._crc, self.checksums = 0, array("I")
        """crc32 of the stored bytes of each document so far."""
        self.data = HashedFile(with_suffix(prefix, ".bin"))

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    def add_sequence(self, values: np.ndarray) -> None:
        """Append one sequence, `values[n]`, whose values fit `dtype`."""
        stored = np.ascontiguousarray(values, self.dtype).view(np.uint8).data
        self._crc = crc32(stored, self._crc)
        self.data.write(stored)
        self._lengths.append(len(values))

    def end_document(self) -> None:
        """Close the current document (one pack): it holds the sequences added since the last
        call.
        """
        self._boundaries.append(len(self._lengths))
        self.checksums.append(self._crc)
        self._crc = 0

    def close(self) -> list[FileEntry]:
        """Write the `.idx`, fsync both files; what the manifest says of them."""
        lengths = np.array(self._lengths, dtype=np.int32)
        boundaries = np.array(self._boundaries, dtype=np.int64)
        index = HashedFile(with_suffix(self.prefix, ".idx"))
        index.write(
            HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(lengths), len(boundaries))
        )
        for table in (
            lengths.astype("<i4"),
            pointers(lengths, self.dtype.itemsize),
            boundaries.astype("<i8"),
        ):
            index.write(table.tobytes())
        return [self.data.close(), index.close()]


def write_table(path: Path, table: np.ndarray) -> FileEntry:
    """Write an `.npy` and fsync it. The same table gives the same bytes."""
    file = HashedFile(path)
    np.save(file, table, allow_pickle=False)
    return file.close()


@dataclass(frozen=True)
class Segment:
    """One source document, or a piece of one, on its way into a pack."""

    tokens: np.ndarray
    """[n] true tokens, n >= 1, integers."""
    weights: np.ndarray | None = None
    """float32 [n], the weight of the loss term that predicts this token; None = all ones."""
    source_file: int = 0
    """Index into Manifest.sources."""
    source_offset: int = 0
    """Byte offset of the record in its uncompressed file, or its ordinal where a format has no
    bytes to point at.
    """
    source_start: int = 0
    """Place of the first token in the whole document (> 0 in the later pieces of a split one)."""
    branch_starts: tuple[int, ...] = ()
    """Where branches 1, 2, ... begin; what is before the first is the shared prefix. Empty = no
    branches.
    """
    flags: int = 0
    """tables.FLAG_SPLIT | tables.FLAG_TRUNCATED."""
    units: tuple[SegmentUnit, ...] = ()
    """Images and frames of the segment, in the order of their tokens."""
    items: tuple[Callable[[], bytes], ...] = ()
    """What gives the encoded bytes of each of its images and videos; called once, when the segment
    is written.
    """
    branch_leaves: tuple[int, ...] = ()
    """Where the last branch of each branch ends; empty = none has branches of its own."""


class ShardWriter:
    """Writes one shard directory under a hidden temporary name; `commit` makes it durable and gives
    it its name.

    Leaving its block without commit removes what was written. The same packs give the same bytes.
    Memory: the table rows only, about 50 bytes a segment.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        vocab_size: int,
        seq_length: int,
        pad_multiple: int = 1,
        cp_degrees: Sequence[int] = (1, 2, 4, 8, 16),
        owner: str = "",
    ) -> None:
        """The parent of `directory` must exist; a temporary directory left by a killed build is
        removed.

        `cp_degrees`: for which the boundary tables of image shards are written, in a shard with
        images. `owner`: who writes, where another process may still write the same shard.
        """
        self.directory = Path(directory)
        self._temporary = self.directory.with_name(
            f".{self.directory.name}{owner and f'.{owner}'}.partial"
        )
        self._seq_length, self._pad_multiple = seq_length, pad_multiple
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        self._tokens = IndexedWriter(self._temporary / "tokens", token_dtype(vocab_size))
        self._weights: IndexedWriter | None = None
        self._images: IndexedWriter | None = None
        self._packs, self._segments, self._branches, self._units = (
            bytearray(),
            bytearray(),
            bytearray(),
            bytearray(),
        )
        self._grids = bytearray()
        self._boundaries: dict[int, list[np.ndarray]] = {degree: [] for degree in cp_degrees}
        self._item_checksums = array("I")
        self._num_tokens = self._num_padded = 0
        self._open = True

    @property
    def num_packs(self) -> int:
        """Packs added so far."""
        return len(self._packs) // _PACK_ROW.size

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open:
            self._open = False
            for writer in filter(None, (self._tokens, self._weights, self._images)):
                writer.data.abandon()
            shutil.rmtree(self._temporary)

    def add_pack(self, segments: Sequence[Segment]) -> None:
        """Append one pack. ValueError, before anything is written, when it is empty or too long.

        A segment of n >= 1 tokens has ids 0..vocab_size-1, weights float [n], finite and >= 0, and
        branches that start at rising places 1..n-1.
        """
        padded = tables.padded_lengths(
            np.array([len(s.tokens) for s in segments]), self._pad_multiple
        ).tolist()
        if not segments or sum(padded) > self._seq_length:
            raise ValueError(
                f"{len(segments)} segments with {sum(padded)} padded tokens; "
                f"a pack has at least 1 segment and at most --seq-length {self._seq_length} tokens"
            )
        if self._weights is None and any(
            s.weights is not None and (s.weights != 1).any() for s in segments
        ):
            self._weights = self._start_weights()
        first = self._tokens.num_sequences
        first_unit, num_units, num_crops = self._add_images(segments)
        for segment, padded_length in zip(segments, padded, strict=True):
            self._add_segment(segment, padded_length)
        self._tokens.end_document()
        if self._weights is not None:
            self._weights.end_document()
        self._packs += _PACK_ROW.pack(
            first, first_unit, len(segments), num_units, sum(padded), num_crops
        )
        self._num_padded += sum(padded)

    def _start_weights(self) -> IndexedWriter:
        """Open weights.bin with ones for all that is already in the shard."""
        writer = IndexedWriter(self._temporary / "weights", np.dtype("<f4"))
        lengths = np.frombuffer(bytes(self._segments), tables.SEGMENT_DTYPE)["true_length"]
        for pack in np.frombuffer(bytes(self._packs), tables.PACK_DTYPE):
            first = int(pack["first_segment"])
            for length in lengths[first : first + int(pack["num_segments"])].tolist():
                writer.add_sequence(np.ones(length, np.float32))
            writer.end_document()
        return writer

    def _add_segment(self, segment: Segment, padded_length: int) -> None:
        length = len(segment.tokens)
        self._tokens.add_sequence(segment.tokens)
        if self._weights is not None:
            ones = np.ones(length, np.float32)
            self._weights.add_sequence(
                ones if segment.weights is None else np.asarray(segment.weights, np.float32)
            )
        starts = segment.branch_starts
        self._segments += _SEGMENT_ROW.pack(
            segment.source_offset,
            segment.source_start,
            len(self._branches) // _BRANCH_ROW.size if starts else 0,
            segment.source_file,
            length,
            padded_length,
            starts[0] if starts else length,
            len(starts),
            segment.flags,
        )
        stops = (*starts, length)[1:]
        for start, stop, leave in zip(starts, stops, segment.branch_leaves or stops, strict=True):
            self._branches += _BRANCH_ROW.pack(start, stop - start, leave)
        self._num_tokens += length

    def _add_images(self, segments: Sequence[Segment]) -> tuple[int, int, int]:
        """Items, units and boundaries of a pack that is about to be added; returns first unit,
        units and crops.
        """
        units = [unit for segment in segments for unit in segment.units]
        first_unit = len(self._units) // _UNIT_ROW.size
        if self._images is None and not units:
            return 0, 0, 0
        if (
            self._images is None
        ):  # an empty document and empty boundaries for each pack that is there already
            self._images, none = (
                IndexedWriter(self._temporary / "images", np.dtype(np.uint8)),
                np.zeros(0, np.int64),
            )
            for _ in range(self.num_packs):
                self._images.end_document()
                self._add_boundaries(none, none)
        crops = np.cumsum([unit.num_crops for unit in units], dtype=np.int64)
        pooled = np.cumsum([unit.num_pooled for unit in units], dtype=np.int64)
        self._add_boundaries(crops, pooled)
        row = 0
        for number, segment in enumerate(segments, self._tokens.num_sequences):
            first_item = self._images.num_sequences
            for read in segment.items:
                data = read()
                self._item_checksums.append(crc32(data))
                self._images.add_sequence(np.frombuffer(data, np.uint8))
            for unit in segment.units:
                self._units += _UNIT_ROW.pack(
                    number,
                    first_item + unit.item,
                    unit.start,
                    unit.num_tokens,
                    int(crops[row]),
                    int(pooled[row]),
                    unit.frame,
                    bisect.bisect_right(segment.branch_starts, unit.start),
                )
                self._grids += b"" if unit.grid is None else _GRID_ROW.pack(*unit.grid)
                row += 1
        self._images.end_document()
        return first_unit, len(units), int(crops[-1]) if len(units) else 0

    def _add_boundaries(self, crops: np.ndarray, pooled: np.ndarray) -> None:
        for degree, rows in self._boundaries.items():
            rows.append(compute_image_shard_boundaries(crops, pooled, degree))

    def commit(self) -> ShardEntry:
        """Make all files durable, rename the directory to its name, and return what the manifest
        says of it.

        A directory of that name is replaced: a killed build may have renamed one that it did not
        enter. ValueError: no pack was added.
        """
        if not self.num_packs:
            raise ValueError(f"{self.directory}: a shard must hold at least one pack")
        counts = (self.num_packs, self._tokens.num_sequences, self._num_tokens, self._num_padded)
        written = self._write_tables()
        for writer in filter(None, (self._tokens, self._weights, self._images)):
            written += writer.close()
        self._open = False
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            files.place_folder(self._temporary, self.directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(self._temporary)  # another process has put the same bytes there just now
        return ShardEntry(
            self.directory.name, *counts, tuple(sorted(written, key=lambda file: file.name))
        )

    def _write_tables(self) -> list[FileEntry]:
        """All `.npy` files, in the temporary directory."""
        rows = {
            "packs": (self._packs, tables.PACK_DTYPE),
            "segments": (self._segments, tables.SEGMENT_DTYPE),
        }
        if self._branches:
            rows["branches"] = (self._branches, tables.BRANCH_DTYPE)
        if self._images is not None:
            rows["units"] = (self._units, tables.UNIT_DTYPE)
        if self._grids:
            rows["grids"] = (self._grids, tables.GRID_DTYPE)
        found = {name: np.frombuffer(data, dtype) for name, (data, dtype) in rows.items()}
        found["checksums"] = np.zeros(self.num_packs, tables.CHECKSUM_DTYPE)
        found["checksums"]["tokens"] = self._tokens.checksums
        if self._weights is not None:
            found["checksums"]["weights"] = self._weights.checksums
        if self._images is not None:
            found["image_checksums"] = np.array(self._item_checksums, np.uint32).view(
                tables.ITEM_CHECKSUM_DTYPE
            )
            # each [packs, degree]
            found |= {
                f"shards_cp{degree}": np.stack(of_packs)
                for degree, of_packs in self._boundaries.items()
            }
        return [
            write_table(self._temporary / f"{name}.npy", table) for name, table in found.items()
        ]
