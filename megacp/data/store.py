"""A packed dataset on disk: shard directories written atomically, and the reader that training uses.

Key property: what opens is whole. A shard appears under its name only when every byte of it is durable, and a dataset
opens only if all files have the manifest's sizes and all tables agree; opening reads no bin, and reading a random pack
is one slice of a memory map. Rejected: one big file (a killed build would lose everything) and storing the padding
tokens (the same dataset then could not serve a stock Megatron reader document by document).

A pack is a Megatron "document", each segment (source document) one "sequence" of true tokens. See `indexed`, `tables`
and `manifest` for the three kinds of file. Weights of 1 everywhere are not stored.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from megacp.data import tables
from megacp.data.indexed import IndexedReader, IndexedWriter, sync_directory, token_dtype
from megacp.data.manifest import FileEntry, Manifest, ShardEntry
from megacp.data.packing import padded_lengths

# one row each of PACK_DTYPE and SEGMENT_DTYPE: packing a row with struct is several times faster than with numpy
_PACK_ROW = struct.Struct("<qqiiii")
_SEGMENT_ROW = struct.Struct("<qqqiiiiiI")
_BRANCH_ROW = struct.Struct("<ii")
_REQUIRED = {"tokens.bin", "tokens.idx", "packs.npy", "segments.npy"}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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


@dataclass(frozen=True, eq=False)
class Pack:
    """One pack as stored: true tokens of its segments, one after the other; `collate` adds the padding."""

    index: int
    """Number in the dataset."""
    tokens: np.ndarray
    """[n] token ids, n = sum of the true lengths (a read-only view of the memory map)."""
    weights: np.ndarray | None
    """float32 [n], or None = all ones."""
    segments: np.ndarray
    """tables.SEGMENT_DTYPE [s]."""
    branches: np.ndarray | None = None
    """tables.BRANCH_DTYPE [sum of num_branches], in segment order; None = there are none."""


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
        self, directory: str | os.PathLike[str], vocab_size: int, seq_length: int, pad_multiple: int = 1
    ) -> None:
        """The parent of `directory` must exist; a temporary directory left by a killed build is removed."""
        self.directory = Path(directory)
        self._temporary = self.directory.with_name(f".{self.directory.name}.partial")
        self._vocab_size, self._seq_length, self._pad_multiple = vocab_size, seq_length, pad_multiple
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        self._tokens = IndexedWriter(self._temporary / "tokens", token_dtype(vocab_size))
        self._weights: IndexedWriter | None = None
        self._packs, self._segments, self._branches = bytearray(), bytearray(), bytearray()
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
        """Append one pack. ValueError, before anything is written: it is empty or its padded lengths exceed seq_length;
        a segment has no token, an id outside 0..vocab_size-1, weights that are not float [n], finite and >= 0, or
        branches that do not rise from 1 to n-1.
        """
        padded = padded_lengths(np.array([len(s.tokens) for s in segments]), self._pad_multiple).tolist()
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
        for segment, padded_length in zip(segments, padded, strict=True):
            self._add_segment(segment, padded_length)
        self._tokens.end_document()
        if self._weights is not None:
            self._weights.end_document()
        self._packs += _PACK_ROW.pack(first, 0, len(segments), 0, sum(padded), 0)
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

    def commit(self, replace: bool = False) -> ShardEntry:
        """Make all files durable, rename the directory to its name, and return what the manifest says of it.

        ValueError: no pack was added; or the directory exists and `replace` is false (pass true for one that a killed
        build renamed but did not enter in its journal).
        """
        assert self._open, "commit after commit or abort"
        if not self.num_packs:
            raise ValueError(f"{self.directory}: a shard must hold at least one pack")
        if self.directory.exists() and not replace:
            raise ValueError(f"{self.directory} exists already; nothing was overwritten")
        num_packs, num_segments = self.num_packs, self._tokens.num_sequences
        written = self._tokens.close()
        if self._weights is not None:
            written += self._weights.close()
        rows = {"packs": (self._packs, tables.PACK_DTYPE), "segments": (self._segments, tables.SEGMENT_DTYPE)}
        if self._branches:
            rows["branches"] = (self._branches, tables.BRANCH_DTYPE)
        for name, (data, dtype) in rows.items():
            written.append(tables.write_table(self._temporary / f"{name}.npy", np.frombuffer(bytes(data), dtype)))
        sync_directory(self._temporary)
        self._open = False
        if self.directory.exists():
            shutil.rmtree(self.directory)
        os.rename(self._temporary, self.directory)
        sync_directory(self.directory.parent)
        files = tuple(sorted((FileEntry(path.name, size, sha) for path, size, sha in written), key=lambda f: f.name))
        return ShardEntry(self.directory.name, num_packs, num_segments, self._num_tokens, self._num_padded, files)

    def abort(self) -> None:
        """Remove the temporary directory; does nothing after a commit."""
        if self._open:
            self._open = False
            self._tokens.abandon()
            if self._weights is not None:
                self._weights.abandon()
            shutil.rmtree(self._temporary)


def _has_weights(segment: Segment) -> bool:
    return segment.weights is not None and bool((np.asarray(segment.weights) != 1).any())


class _Shard:
    """One open shard: its readers and tables, checked against each other and against the manifest."""

    def __init__(self, directory: Path, entry: ShardEntry, manifest: Manifest) -> None:
        self.entry = entry
        names = {file.name for file in entry.files}
        self.tokens = IndexedReader(directory / "tokens")
        self.weights = IndexedReader(directory / "weights") if "weights.bin" in names else None
        self.packs = tables.read_table(directory / "packs.npy", tables.PACK_DTYPE)
        self.segments = tables.read_table(directory / "segments.npy", tables.SEGMENT_DTYPE)
        self.branches = self._optional(directory, "branches", tables.BRANCH_DTYPE, names)
        units = self._optional(directory, "units", tables.UNIT_DTYPE, names)
        reasons = self._reasons(manifest)
        reasons = reasons or tables.unit_reasons(self.packs, self.segments, units)
        for degree in manifest.cp_degrees if len(units) else ():
            table = tables.read_table(directory / f"shards_cp{degree}.npy", tables.BOUNDARY_DTYPE)
            if table.shape != (len(self.packs), degree):
                reasons.append(f"shards_cp{degree}.npy has shape {table.shape}, not {(len(self.packs), degree)}")
        if reasons:
            raise ValueError(f"{directory}: " + "; ".join(reasons))

    @staticmethod
    def _optional(directory: Path, name: str, dtype: np.dtype, names: set[str]) -> np.ndarray:
        return tables.read_table(directory / f"{name}.npy", dtype) if f"{name}.npy" in names else np.zeros(0, dtype)

    def _reasons(self, manifest: Manifest) -> list[str]:
        entry, expected = self.entry, token_dtype(manifest.tokenizer.vocab_size)
        reasons = []
        if self.tokens.dtype != expected:
            reasons.append(f"tokens.idx has dtype {self.tokens.dtype}, a vocabulary of this size has {expected}")
        if (len(self.packs), len(self.segments)) != (entry.num_packs, entry.num_segments):
            reasons.append(
                f"{len(self.packs)} packs and {len(self.segments)} segments, "
                f"the manifest says {entry.num_packs} and {entry.num_segments}"
            )
        reasons += tables.segment_reasons(
            self.segments, self.tokens.lengths, self.branches, manifest.pad_multiple, len(manifest.sources)
        )
        reasons += tables.pack_reasons(self.packs, self.segments, self.tokens.boundaries, manifest.seq_length)
        sums = int(self.tokens.lengths.sum(dtype=np.int64)), int(self.packs["num_tokens"].sum(dtype=np.int64))
        if sums != (entry.num_tokens, entry.num_padded_tokens):
            reasons.append(
                f"{sums[0]} true and {sums[1]} padded tokens, "
                f"the manifest says {entry.num_tokens} and {entry.num_padded_tokens}"
            )
        if self.weights is not None:
            same = np.array_equal(self.weights.lengths, self.tokens.lengths)
            if not same or self.weights.dtype != np.dtype("<f4"):
                reasons.append(f"weights.idx ({self.weights.dtype}) does not have the lengths of tokens.idx, float32")
        return reasons


class PackedDataset:
    """A finished dataset directory, open for reading. Pack numbers run over the shards in the manifest's order."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open manifest.json and every shard. ValueError lists all files of wrong size, or the first bad shard."""
        self.directory = Path(directory)
        self.manifest = Manifest.read(directory)
        reasons = _size_reasons(self.directory, self.manifest)
        if reasons:
            raise ValueError("; ".join(reasons))
        self._shards = [_Shard(self.directory / entry.name, entry, self.manifest) for entry in self.manifest.shards]
        self._stops = list(accumulate(entry.num_packs for entry in self.manifest.shards))

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of the manifest, which holds the sha256 of every file: equal only for equal data."""
        return self.manifest.fingerprint

    def __len__(self) -> int:
        """Number of packs."""
        return self._stops[-1] if self._stops else 0

    def pack(self, i: int) -> Pack:
        """Pack `i`, 0 <= i < len (IndexError otherwise); its arrays are read-only views, copied by nobody."""
        if not 0 <= i < len(self):
            raise IndexError(f"pack {i} of {self.directory}, which has {len(self)}")
        number = bisect.bisect_right(self._stops, i)
        shard = self._shards[number]
        row = shard.packs[i - self._stops[number] + shard.entry.num_packs]
        start = int(row["first_segment"])
        stop = start + int(row["num_segments"])
        segments = shard.segments[start:stop]
        weights = None if shard.weights is None else shard.weights.sequences(start, stop)
        branches = None
        if len(shard.branches):
            count = segments["num_branches"]
            first = int(segments["first_branch"][count > 0][0]) if count.any() else 0
            branches = shard.branches[first : first + int(count.sum())] if count.any() else None
        return Pack(i, shard.tokens.sequences(start, stop), weights, segments, branches)


def _size_reasons(directory: Path, manifest: Manifest) -> list[str]:
    reasons = []
    for shard in manifest.shards:
        absent = sorted(_REQUIRED - {file.name for file in shard.files})
        if absent:
            reasons.append(f"{directory / shard.name}: the manifest does not list {absent}")
        for file in shard.files:
            path = directory / shard.name / file.name
            if not _SAFE_NAME.fullmatch(shard.name) or not _SAFE_NAME.fullmatch(file.name):
                reasons.append(f"manifest.json names the file {shard.name}/{file.name}, which is not a plain name")
            elif not path.is_file():
                reasons.append(f"{path}: no such file, the manifest says {file.size} bytes")
            elif path.stat().st_size != file.size:
                reasons.append(f"{path}: {path.stat().st_size} bytes, the manifest says {file.size}")
    return reasons


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Everything that is wrong with a dataset, [] when it is sound: what opening checks, then every byte of it.

    Bytes: the sha256 of each file, token ids below the vocabulary size, weights finite and not negative.
    """
    try:
        dataset = PackedDataset(directory)
    except ValueError as error:
        return [str(error)]
    reasons = []
    for shard in dataset.manifest.shards:
        for file in shard.files:
            path = dataset.directory / shard.name / file.name
            with open(path, "rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != file.sha256:
                reasons.append(f"{path}: sha256 is {found}, the manifest says {file.sha256}")
    vocab_size = dataset.manifest.tokenizer.vocab_size
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        low, high = int(pack.tokens.min()), int(pack.tokens.max())
        if low < 0 or high >= vocab_size:
            reasons.append(f"pack {i}: token ids {low}..{high}, the vocabulary is 0..{vocab_size - 1}")
        if pack.weights is not None and not (np.isfinite(pack.weights).all() and (pack.weights >= 0).all()):
            reasons.append(f"pack {i}: loss weights that are negative or not finite")
    return reasons
