"""Write the shards of a packed dataset.

A shard directory gets its final name once all its files are durable. A pack is a Megatron
"document", and each of its segments (source documents) is a "sequence" of tokens without padding.
Weights are stored only if any of them differs from 1, and image files only if the shard has images.
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

# One row of PACK_DTYPE, SEGMENT_DTYPE, BRANCH_DTYPE, UNIT_DTYPE and GRID_DTYPE. Packing a row with
# struct is several times faster than with numpy.
_PACK_ROW = struct.Struct("<qqiiii")
_SEGMENT_ROW = struct.Struct("<qqqiiiiiI")
_BRANCH_ROW = struct.Struct("<iii")
_UNIT_ROW = struct.Struct("<qqiiiiii")
_GRID_ROW = struct.Struct("<ii")


class HashedFile:
    """A sequentially written file that computes its size and sha256 on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._stream = open(path, "wb", buffering=1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. A memoryview must be contiguous and have items of one byte."""
        self._hash.update(data)
        self._stream.write(data)
        self.size += len(data)

    def close(self) -> FileEntry:
        """Sync the file to disk (fsync) and close it. Return its name, size and sha256.

        Call this once.
        """
        files.sync_file(self._stream)
        self._stream.close()
        return FileEntry(self.path.name, self.size, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file without syncing it; the caller deletes it."""
        # On a full disk, closing fails because the buffer cannot be flushed.
        with contextlib.suppress(OSError):
            self._stream.close()


class IndexedWriter:
    """Writer of Megatron's indexed format: streams to `PREFIX.bin`; `close` writes `PREFIX.idx`."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        """Create `PREFIX.bin`, or truncate an existing file.

        `prefix` has no suffix; `dtype` is one of DTYPE_OF_CODE.
        """
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")  # one per sequence
        self._boundaries = array("q", [0])  # number of sequences before each document
        self._crc = 0  # of the current document
        self.checksums = array("I")  # crc32 of the stored bytes of each document
        self.data = HashedFile(with_suffix(prefix, ".bin"))

    @property
    def num_sequences(self) -> int:
        """Number of sequences added so far."""
        return len(self._lengths)

    def add_sequence(self, values: np.ndarray) -> None:
        """Append a sequence, `values` [n], whose values must fit in `dtype`."""
        stored = np.ascontiguousarray(values, self.dtype).view(np.uint8).data
        self._crc = crc32(stored, self._crc)
        self.data.write(stored)
        self._lengths.append(len(values))

    def end_document(self) -> None:
        """End the current document (one pack): all sequences added since the last call."""
        self._boundaries.append(len(self._lengths))
        self.checksums.append(self._crc)
        self._crc = 0

    def close(self) -> list[FileEntry]:
        """Write `PREFIX.idx` and sync both files. Return their entries for the manifest."""
        lengths = np.array(self._lengths, dtype=np.int32)  # [sequences]
        boundaries = np.array(self._boundaries, dtype=np.int64)  # [documents + 1]
        code = CODE_OF_DTYPE[self.dtype]
        index = HashedFile(with_suffix(self.prefix, ".idx"))
        index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries)))
        index.write(lengths.astype("<i4").tobytes())
        index.write(pointers(lengths, self.dtype.itemsize).tobytes())
        index.write(boundaries.astype("<i8").tobytes())
        return [self.data.close(), index.close()]


def write_table(path: Path, table: np.ndarray) -> FileEntry:
    """Write a table as `.npy` and sync it. Equal tables give equal bytes."""
    file = HashedFile(path)
    np.save(file, table, allow_pickle=False)
    return file.close()


@dataclass(frozen=True)
class Segment:
    """A source document in a pack, or a piece of a source document."""

    tokens: np.ndarray
    """Integers [n], n >= 1, without padding."""
    weights: np.ndarray | None = None
    """float32 [n]: loss weight of predicting each token; None means 1 everywhere."""
    source_file: int = 0
    """Index into Manifest.sources."""
    source_offset: int = 0
    """Byte offset of the record in its uncompressed file, or its ordinal in formats without byte
    offsets.
    """
    source_start: int = 0
    """Position of the first token in the whole document; > 0 in the later pieces of a split
    document.
    """
    branch_starts: tuple[int, ...] = ()
    """Start of each branch; the shared prefix ends where the first branch starts."""
    flags: int = 0
    """tables.FLAG_SPLIT | tables.FLAG_TRUNCATED."""
    units: tuple[SegmentUnit, ...] = ()
    """Images and frames of the segment, in the order of their tokens."""
    items: tuple[Callable[[], bytes], ...] = ()
    """Functions that return the encoded bytes of each image or video; called once, when writing."""
    branch_leaves: tuple[int, ...] = ()
    """End of each branch including all branches below it; empty if branches have no branches."""


class ShardWriter:
    """Writer of a shard directory, which has a hidden temporary name until `commit`.

    Leaving the `with` block without `commit` deletes the directory. Equal packs produce equal
    bytes. Only the table rows are kept in memory, about 50 bytes per segment.
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
        """Create the temporary directory; first delete one that a killed build has left.

        The parent of `directory` must exist. A shard with images gets a table of image-shard
        boundaries for each of `cp_degrees`. `owner` makes the temporary name unique if another
        process may still be writing the same shard.
        """
        self.directory = Path(directory)
        suffix = f".{owner}.partial" if owner else ".partial"
        self._temporary = self.directory.with_name(f".{self.directory.name}{suffix}")
        self._seq_length = seq_length
        self._pad_multiple = pad_multiple
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        self._tokens = IndexedWriter(self._temporary / "tokens", token_dtype(vocab_size))
        # Opened by the first pack that needs them.
        self._weights: IndexedWriter | None = None
        self._images: IndexedWriter | None = None
        # Packed rows of the tables.
        self._packs = bytearray()
        self._segments = bytearray()
        self._branches = bytearray()
        self._units = bytearray()
        self._grids = bytearray()
        # For each degree, one row of boundaries per pack.
        self._boundaries: dict[int, list[np.ndarray]] = {degree: [] for degree in cp_degrees}
        self._item_checksums = array("I")
        self._num_tokens = self._num_padded = 0
        self._open = True

    @property
    def num_packs(self) -> int:
        """Number of packs added so far."""
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
        """Append a pack.

        A segment of n >= 1 tokens must have token ids 0..vocab_size-1, finite float weights [n],
        >= 0, and ascending branch starts in 1..n-1. Raise ValueError, before anything is written,
        if the pack is empty or too long.
        """
        lengths = np.array([len(segment.tokens) for segment in segments])
        padded = tables.padded_lengths(lengths, self._pad_multiple).tolist()
        if not segments or sum(padded) > self._seq_length:
            raise ValueError(
                f"{len(segments)} segments with {sum(padded)} padded tokens cannot form a pack: it "
                f"needs at least 1 segment and at most --seq-length {self._seq_length} tokens"
            )
        if self._weights is None and _has_weights(segments):
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
        """Open weights.bin, and write weights of 1 for all tokens already in the shard."""
        writer = IndexedWriter(self._temporary / "weights", np.dtype("<f4"))
        segments = np.frombuffer(bytes(self._segments), tables.SEGMENT_DTYPE)
        lengths = segments["true_length"]  # [segments]
        for pack in np.frombuffer(bytes(self._packs), tables.PACK_DTYPE):
            first = int(pack["first_segment"])
            stop = first + int(pack["num_segments"])
            for length in lengths[first:stop].tolist():
                writer.add_sequence(np.ones(length, np.float32))
            writer.end_document()
        return writer

    def _add_segment(self, segment: Segment, padded_length: int) -> None:
        """Append the tokens, weights and table rows of a segment."""
        length = len(segment.tokens)
        self._tokens.add_sequence(segment.tokens)
        if self._weights is not None:
            weights = segment.weights
            if weights is None:
                weights = np.ones(length, np.float32)
            self._weights.add_sequence(np.asarray(weights, np.float32))
        starts = segment.branch_starts
        # Without branches, the whole segment is the prefix.
        first_branch = 0
        prefix_length = length
        if starts:
            first_branch = len(self._branches) // _BRANCH_ROW.size
            prefix_length = starts[0]
        self._segments += _SEGMENT_ROW.pack(
            segment.source_offset,
            segment.source_start,
            first_branch,
            segment.source_file,
            length,
            padded_length,
            prefix_length,
            len(starts),
            segment.flags,
        )
        # Each branch ends where the next one starts.
        stops = (*starts, length)[1:]
        for start, stop, leave in zip(starts, stops, segment.branch_leaves or stops, strict=True):
            self._branches += _BRANCH_ROW.pack(start, stop - start, leave)
        self._num_tokens += length

    def _add_images(self, segments: Sequence[Segment]) -> tuple[int, int, int]:
        """Append the images of the next pack: items, unit rows and boundaries.

        Return the number of the pack's first unit, and how many units and crops the pack has. Call
        this before the pack's tokens are added.
        """
        units: list[SegmentUnit] = []
        for segment in segments:
            units += segment.units
        first_unit = len(self._units) // _UNIT_ROW.size
        if self._images is None and not units:
            return 0, 0, 0
        if self._images is None:
            # The earlier packs have no images: give each an empty document and empty boundaries.
            self._images = IndexedWriter(self._temporary / "images", np.dtype(np.uint8))
            none = np.zeros(0, np.int64)
            for _ in range(self.num_packs):
                self._images.end_document()
                self._add_boundaries(none, none)
        # Cumulative sums, including each unit, [units].
        crops = np.cumsum([unit.num_crops for unit in units], dtype=np.int64)
        pooled = np.cumsum([unit.num_pooled for unit in units], dtype=np.int64)
        self._add_boundaries(crops, pooled)
        row = 0  # position of the unit in the pack
        for number, segment in enumerate(segments, self._tokens.num_sequences):
            first_item = self._images.num_sequences
            for read in segment.items:
                data = read()
                self._item_checksums.append(crc32(data))
                self._images.add_sequence(np.frombuffer(data, np.uint8))
            for unit in segment.units:
                # 0 is the prefix, 1 the first branch.
                branch = bisect.bisect_right(segment.branch_starts, unit.start)
                self._units += _UNIT_ROW.pack(
                    number,
                    first_item + unit.item,
                    unit.start,
                    unit.num_tokens,
                    int(crops[row]),
                    int(pooled[row]),
                    unit.frame,
                    branch,
                )
                if unit.grid is not None:
                    self._grids += _GRID_ROW.pack(*unit.grid)
                row += 1
        self._images.end_document()
        num_crops = int(crops[-1]) if units else 0
        return first_unit, len(units), num_crops

    def _add_boundaries(self, crops: np.ndarray, pooled: np.ndarray) -> None:
        """Append a pack's image-shard boundaries for every degree.

        `crops` and `pooled` are the cumulative sums over the pack's units.
        """
        for degree, rows in self._boundaries.items():
            rows.append(compute_image_shard_boundaries(crops, pooled, degree))

    def commit(self) -> ShardEntry:
        """Sync all files, give the directory its final name, and return its manifest entry.

        An existing directory of that name is replaced: a build may have been killed between
        renaming the shard and entering it in the journal. Raise ValueError if no pack was added.
        """
        if not self.num_packs:
            raise ValueError(f"{self.directory}: a shard must contain at least one pack")
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
            # Another process has just written the same shard: keep its copy.
            shutil.rmtree(self._temporary)
        written.sort(key=lambda file: file.name)
        return ShardEntry(self.directory.name, *counts, tuple(written))

    def _write_tables(self) -> list[FileEntry]:
        """Write all `.npy` files to the temporary directory, and return their entries."""
        # Every shard has packs and segments; other tables exist only if they have rows.
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
            checksums = np.array(self._item_checksums, np.uint32)  # [items]
            found["image_checksums"] = checksums.view(tables.ITEM_CHECKSUM_DTYPE)
            for degree, of_packs in self._boundaries.items():
                found[f"shards_cp{degree}"] = np.stack(of_packs)  # [packs, degree]
        return [
            write_table(self._temporary / f"{name}.npy", table) for name, table in found.items()
        ]


def _has_weights(segments: Sequence[Segment]) -> bool:
    """Return whether any token has a weight other than 1."""
    for segment in segments:
        if segment.weights is not None and (segment.weights != 1).any():
            return True
    return False
