"""Reads a packed dataset: what training opens, and `verify`.

Key property: what opens is whole. A dataset opens only if all files have the manifest's sizes and all tables agree;
opening reads no bin, and reading a random pack is one slice of a memory map. Rejected: checking at the first use of a
pack, which finds damage hours into a run.

See `shard_writer` for what makes a shard, `indexed`, `tables` and `manifest` for the three kinds of file.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from megacp.data import tables
from megacp.data.image_shards import boundary_reasons
from megacp.data.indexed import IndexedReader, token_dtype
from megacp.data.manifest import Manifest, ShardEntry
from megacp.data.row_images import PackImages, row_units, vision_inputs

_REQUIRED = {"tokens.bin", "tokens.idx", "packs.npy", "segments.npy"}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
    images: PackImages | None = None
    """None in a dataset without images."""
    sources: tuple[str, ...] = ()
    """Names of the input files, by `source_file` of a segment."""

    def record(self, segment: int) -> str:
        """Where a segment comes from, as words for an error."""
        row = self.segments[segment]
        number = int(row["source_file"])
        name = self.sources[number] if number < len(self.sources) else f"source {number}"
        return f"pack {self.index}, record of {name} at byte {int(row['source_offset'])}"


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
        self.units = self._optional(directory, "units", tables.UNIT_DTYPE, names)
        self.images = IndexedReader(directory / "images") if "images.bin" in names else None
        reasons = self._reasons(manifest)
        reasons = reasons or tables.unit_reasons(self.packs, self.segments, self.units)
        self.boundaries: dict[int, np.ndarray] = {}
        for degree in manifest.cp_degrees if len(self.units) else ():
            table = tables.read_table(directory / f"shards_cp{degree}.npy", tables.BOUNDARY_DTYPE)
            self.boundaries[degree] = table
            if table.shape != (len(self.packs), degree):
                reasons.append(f"shards_cp{degree}.npy has shape {table.shape}, not {(len(self.packs), degree)}")
        reasons += self._image_reasons(manifest)
        if reasons:
            raise ValueError(f"{directory}: " + "; ".join(reasons))

    @staticmethod
    def _optional(directory: Path, name: str, dtype: np.dtype, names: set[str]) -> np.ndarray:
        return tables.read_table(directory / f"{name}.npy", dtype) if f"{name}.npy" in names else np.zeros(0, dtype)

    def _reasons(self, manifest: Manifest) -> list[str]:
        entry, expected = self.entry, token_dtype(manifest.num_token_ids)
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

    def _image_reasons(self, manifest: Manifest) -> list[str]:
        """What is wrong between units.npy, images.idx and the manifest."""
        if not len(self.units):
            return []
        reasons = []
        if manifest.image_rules is None or "image_patch" not in manifest.image_rules.get("token_ids", {}):
            reasons.append("units.npy holds images, but the manifest's image_rules name no image_patch token")
        if self.images is None or self.images.dtype != np.uint8:
            reasons.append("units.npy holds images, but there is no images.bin of bytes")
        elif not 0 <= self.units["item"].min() <= self.units["item"].max() < len(self.images):
            reasons.append(f"units.npy names item {int(self.units['item'].max())} of {len(self.images)} in images.idx")
        return reasons

    def images_of(self, number: int, image_patch: int) -> PackImages:
        """The images of pack `number` of this shard."""
        row = self.packs[number]
        first = int(row["first_unit"])
        units = self.units[first : first + int(row["num_units"])].copy()
        units["segment"] -= int(row["first_segment"])
        tables_of = {degree: np.asarray(table[number]) for degree, table in self.boundaries.items()}
        return PackImages(units, tables_of, self._item, image_patch)

    def _item(self, number: int) -> bytes:
        assert self.images is not None
        return self.images.sequence(number).tobytes()


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
        self._image_patch = (self.manifest.image_rules or {}).get("token_ids", {}).get("image_patch")

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
        within = i - self._stops[number] + shard.entry.num_packs
        row = shard.packs[within]
        start = int(row["first_segment"])
        stop = start + int(row["num_segments"])
        segments = shard.segments[start:stop]
        weights = None if shard.weights is None else shard.weights.sequences(start, stop)
        branches = None
        if len(shard.branches):
            count = segments["num_branches"]
            first = int(segments["first_branch"][count > 0][0]) if count.any() else 0
            branches = shard.branches[first : first + int(count.sum())] if count.any() else None
        images = None if self._image_patch is None else shard.images_of(within, self._image_patch)
        return Pack(i, shard.tokens.sequences(start, stop), weights, segments, branches, images, self.manifest.sources)


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

    Bytes: the sha256 of each file, token ids below the vocabulary size, weights finite and not negative, image tokens
    and boundary tables as the units say.
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
    vocab_size = dataset.manifest.num_token_ids
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        low, high = int(pack.tokens.min()), int(pack.tokens.max())
        if low < 0 or high >= vocab_size:
            reasons.append(f"pack {i}: token ids {low}..{high}, the vocabulary is 0..{vocab_size - 1}")
        if pack.weights is not None and not (np.isfinite(pack.weights).all() and (pack.weights >= 0).all()):
            reasons.append(f"pack {i}: loss weights that are negative or not finite")
        reasons += [f"pack {i}: {reason}" for reason in _pack_image_reasons(pack)]
    return reasons


def _pack_image_reasons(pack: Pack) -> list[str]:
    """Whether the image tokens are those of the units, and the boundary tables fit them."""
    if pack.images is None:
        return []
    lengths = pack.segments["true_length"].astype(np.int64)
    units = row_units([pack.images], [len(lengths)], np.cumsum(lengths) - lengths)
    reasons = []
    try:
        vision_inputs(units, pack.tokens, pack.images.image_patch)
    except ValueError as error:
        reasons.append(str(error))
    for degree, table in pack.images.boundaries.items():
        found = boundary_reasons(table, units.cum_images, units.cum_pooled)
        reasons += [f"shards_cp{degree}.npy: {reason}" for reason in found]
    return reasons
