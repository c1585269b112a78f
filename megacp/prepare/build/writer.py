"""Where a pack is written: the shard directories of a packed dataset, each atomically.

A shard appears under its name only when every byte of it is durable.

A pack is a Megatron "document", each segment (source document) one "sequence" of true tokens. `indexed`, `tables` and
`manifest` describe the three kinds of file. Weights of 1 everywhere are not stored, and a shard without images is that
of a text dataset.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacp.core.data import tables
from megacp.core.data.image_shards import compute_image_shard_boundaries
from megacp.core.data.manifest import FileEntry, ShardEntry
from megacp.core.data.tables import crc32, token_dtype
from megacp.core.storage import files
from megacp.prepare.build.indexed_writer import IndexedWriter, write_table
from megacp.prepare.records.documents import SegmentUnit

# one row each of PACK_DTYPE, SEGMENT_DTYPE, ...: packing a row with struct is several times faster than with numpy
_PACK_ROW = struct.Struct("<qqiiii")
_SEGMENT_ROW = struct.Struct("<qqqiiiiiI")
_BRANCH_ROW = struct.Struct("<ii")
_UNIT_ROW = struct.Struct("<qqiiiiii")


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
    """Byte offset of the record in its uncompressed file, or its ordinal where a format has no bytes to point at."""
    source_start: int = 0
    """Place of the first token in the whole document (> 0 in the later pieces of a split one)."""
    branch_starts: tuple[int, ...] = ()
    """Where branches 1, 2, ... begin; what is before the first is the shared prefix. Empty = no branches."""
    flags: int = 0
    """tables.FLAG_SPLIT | tables.FLAG_TRUNCATED."""
    units: tuple[SegmentUnit, ...] = ()
    """Its images and frames, in the order of their tokens."""
    items: tuple[Callable[[], bytes], ...] = ()
    """What gives the encoded bytes of each of its images and videos; called once, when the segment is written."""


class ShardWriter:
    """Writes one shard directory under a hidden temporary name; `commit` makes it durable and gives it its name.

        with ShardWriter(dataset / "shard_00000", vocab_size, seq_length, pad_multiple) as writer:
            for members in packing:
                writer.add_pack([Segment(...), ...])
            entry = writer.commit()      # for the journal and the manifest
    Leaving the block without commit removes what was written. The same packs give the same bytes. Memory: the table
    rows only, about 50 bytes a segment.
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
        """The parent of `directory` must exist; a temporary directory left by a killed build is removed.

        `cp_degrees`: for which the boundary tables of image shards are written, in a shard with images. `owner`: who
        writes, where another process may still write the same shard.
        """
        self.directory = Path(directory)
        self._temporary = self.directory.with_name(f".{self.directory.name}{owner and f'.{owner}'}.partial")
        self._vocab_size, self._seq_length, self._pad_multiple = vocab_size, seq_length, pad_multiple
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        self._tokens = IndexedWriter(self._temporary / "tokens", token_dtype(vocab_size))
        self._weights: IndexedWriter | None = None
        self._images: IndexedWriter | None = None
        self._packs, self._segments, self._branches, self._units = bytearray(), bytearray(), bytearray(), bytearray()
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
        self.abort()

    def add_pack(self, segments: Sequence[Segment]) -> None:
        """Append one pack. ValueError, before anything is written, when it is empty, too long or a segment is wrong.

        A segment of n >= 1 tokens has ids 0..vocab_size-1, weights float [n], finite and >= 0, and branches that start
        at rising places 1..n-1.
        """
        padded = tables.padded_lengths(np.array([len(s.tokens) for s in segments]), self._pad_multiple).tolist()
        where = f"{self.directory.name} pack {self.num_packs}"
        if not segments or sum(padded) > self._seq_length:
            raise ValueError(
                f"{where}: {len(segments)} segments with {sum(padded)} padded tokens; "
                f"a pack has at least 1 segment and at most --seq-length {self._seq_length} tokens"
            )
        for segment in segments:
            self._check(segment, where)
        if self._weights is None and any(_has_weights(segment) for segment in segments):
            self._weights = self._start_weights()
        first = self._tokens.num_sequences
        first_unit, num_units, num_crops = self._add_images(segments)
        for segment, padded_length in zip(segments, padded, strict=True):
            self._add_segment(segment, padded_length)
        self._tokens.end_document()
        if self._weights is not None:
            self._weights.end_document()
        self._packs += _PACK_ROW.pack(first, first_unit, len(segments), num_units, sum(padded), num_crops)
        self._num_padded += sum(padded)

    def _check(self, segment: Segment, where: str) -> None:
        tokens, starts = segment.tokens, segment.branch_starts
        where = f"{where}, source {segment.source_file} offset {segment.source_offset}"
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise ValueError(f"{where}: tokens must be integers [n], n >= 1, got {tokens.dtype} {tokens.shape}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(f"{where}: token ids {low}..{high}, the vocabulary is 0..{self._vocab_size - 1}")
        if segment.weights is not None:
            weights = np.asarray(segment.weights)
            if weights.shape != tokens.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError(f"{where}: weights must be {tokens.shape}, finite and not negative")
        if list(starts) != sorted(set(starts)) or (starts and not 1 <= starts[0] <= starts[-1] < len(tokens)):
            raise ValueError(f"{where}: branches must start at rising places 1..{len(tokens) - 1}, got {starts}")
        stop = 0
        for unit in segment.units:
            free = unit.start >= stop and unit.num_tokens >= 1 and unit.start + unit.num_tokens <= len(tokens)
            stop = unit.start + unit.num_tokens
            crossed = bisect.bisect_right(starts, unit.start) != bisect.bisect_left(starts, stop)
            if not free or crossed or unit.num_crops < 1 or unit.num_pooled < 1:
                raise ValueError(f"{where}: {unit} overlaps another, leaves its branch or the segment, or is empty")
            if not 0 <= unit.item < len(segment.items):
                raise ValueError(f"{where}: {unit} is of an item that is not there, of {len(segment.items)}")

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
            self._weights.add_sequence(ones if segment.weights is None else np.asarray(segment.weights, np.float32))
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
        for start, stop in zip(starts, (*starts, length)[1:], strict=True):
            self._branches += _BRANCH_ROW.pack(start, stop - start)
        self._num_tokens += length

    def _add_images(self, segments: Sequence[Segment]) -> tuple[int, int, int]:
        """Items, units and boundaries of a pack that is about to be added; returns first unit, units and crops."""
        units = [unit for segment in segments for unit in segment.units]
        first_unit = len(self._units) // _UNIT_ROW.size
        if self._images is None and not units:
            return 0, 0, 0
        if self._images is None:
            self._images = self._start_images()
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
                row += 1
        self._images.end_document()
        return first_unit, len(units), int(crops[-1]) if len(units) else 0

    def _start_images(self) -> IndexedWriter:
        """Open images.bin, with an empty document and empty boundaries for each pack that is already in the shard."""
        writer = IndexedWriter(self._temporary / "images", np.dtype(np.uint8))
        none = np.zeros(0, np.int64)
        for _ in range(self.num_packs):
            writer.end_document()
            self._add_boundaries(none, none)
        return writer

    def _add_boundaries(self, crops: np.ndarray, pooled: np.ndarray) -> None:
        for degree, rows in self._boundaries.items():
            rows.append(compute_image_shard_boundaries(crops, pooled, degree))

    def commit(self, replace: bool = False) -> ShardEntry:
        """Make all files durable, rename the directory to its name, and return what the manifest says of it.

        ValueError: no pack was added, or the directory exists and `replace` is false. A killed build may have renamed
        one that it did not enter in its journal: replace it.
        """
        assert self._open, "commit after commit or abort"
        if not self.num_packs:
            raise ValueError(f"{self.directory}: a shard must hold at least one pack")
        if self.directory.exists() and not replace:
            raise ValueError(f"{self.directory} exists already; nothing was overwritten")
        num_packs, num_segments = self.num_packs, self._tokens.num_sequences
        written = self._write_tables()
        for writer in (self._tokens, self._weights, self._images):
            if writer is not None:
                written += writer.close()
        files.sync_folder(self._temporary)
        self._open = False
        if self.directory.exists():
            old = self._temporary.with_suffix(".old.partial")
            shutil.rmtree(old, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another owner has moved it
                files.rename(self.directory, old)
            files.place_folder(self._temporary, self.directory)
            shutil.rmtree(old, ignore_errors=True)
        else:
            files.place_folder(self._temporary, self.directory)
        listed = sorted((FileEntry(path.name, size, sha) for path, size, sha in written), key=lambda f: f.name)
        counts = (num_packs, num_segments, self._num_tokens, self._num_padded)
        return ShardEntry(self.directory.name, *counts, tuple(listed))

    def _write_tables(self) -> list[tuple[Path, int, str]]:
        """All `.npy` files, in the temporary directory; path, size and sha256 of each."""
        rows = {"packs": (self._packs, tables.PACK_DTYPE), "segments": (self._segments, tables.SEGMENT_DTYPE)}
        if self._branches:
            rows["branches"] = (self._branches, tables.BRANCH_DTYPE)
        if self._images is not None:
            rows["units"] = (self._units, tables.UNIT_DTYPE)
        found = {name: np.frombuffer(data, dtype) for name, (data, dtype) in rows.items()}
        found["checksums"] = np.zeros(self.num_packs, tables.CHECKSUM_DTYPE)
        found["checksums"]["tokens"] = self._tokens.checksums
        if self._weights is not None:
            found["checksums"]["weights"] = self._weights.checksums
        if self._images is not None:
            found["image_checksums"] = np.array(self._item_checksums, np.uint32).view(tables.ITEM_CHECKSUM_DTYPE)
            # each [packs, degree]
            found |= {f"shards_cp{degree}": np.stack(of_packs) for degree, of_packs in self._boundaries.items()}
        return [write_table(self._temporary / f"{name}.npy", table) for name, table in found.items()]

    def abort(self) -> None:
        """Remove the temporary directory; does nothing after a commit."""
        if self._open:
            self._open = False
            self._tokens.abandon()
            for writer in (self._weights, self._images):
                if writer is not None:
                    writer.abandon()
            shutil.rmtree(self._temporary)


def _has_weights(segment: Segment) -> bool:
    return segment.weights is not None and bool((np.asarray(segment.weights) != 1).any())
