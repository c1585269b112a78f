"""Reads a packed dataset: what training opens, on this machine's disk or at a URL.

A dataset opens only if all files have the manifest's sizes, and all tables its hashes: damage found
at the first use of a shard would be found hours into a run. A random pack is one read of a bin at a
known offset, compared with its checksum. `tables` and `manifest` describe the files.

Of a dataset at a URL the tables are kept as files of this machine, each under its sha256, for all
ranks of it. So are bins that fit the cache; others are read by packs.
"""

from __future__ import annotations

import bisect
import functools
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from megacp.engine.rows.image_shards import BOUNDARY_DTYPE
from megacp.storage import files
from megacp.storage.cache import cache_folder
from megacp.storage.place import Place, place_of
from megacp.storage.url import Url
from megacp.storage.wording import listed
from megacp.training.data import tables
from megacp.training.data.manifest import DatasetManifest, FileEntry, ShardEntry
from megacp.training.data.tables import IndexedReader, StoredFile
from megacp.training.data.vision.rules import ImageError

OPEN_SHARDS = 64
_TABLES = {
    "packs": tables.PACK_DTYPE,
    "segments": tables.SEGMENT_DTYPE,
    "branches": tables.BRANCH_DTYPE,
    "units": tables.UNIT_DTYPE,
    "grids": tables.GRID_DTYPE,
    "checksums": tables.CHECKSUM_DTYPE,
    "image_checksums": tables.ITEM_CHECKSUM_DTYPE,
}
OpenFile = Callable[[Any, FileEntry], StoredFile]
"""Opens a file of a dataset, which must have the stated size."""


@dataclass(frozen=True, eq=False)
class PackImages:
    """The images of one pack, as stored."""

    units: np.ndarray
    """tables.UNIT_DTYPE [u], with `segment` counted from the first segment of the pack; u = 0 for
    plain text.
    """
    boundaries: Mapping[int, np.ndarray]
    """BOUNDARY_DTYPE [P] by CP degree P, for the degrees that were planned."""
    read: Callable[[int], bytes]
    """Encoded bytes of an item (an image or a video) by its number in the units; called from any
    thread.
    """
    feature_ids: tuple[int, ...]
    """Token ids that stand where a pooled feature goes."""
    grids: np.ndarray | None = None
    """int64 [u, 2], rows and columns of the pooled tokens of each unit, where the dataset states
    them.
    """


@dataclass(frozen=True, eq=False)
class Pack:
    """One pack as stored: true tokens of its segments, one after the other; `collate` adds the
    padding.
    """

    index: int
    tokens: np.ndarray
    """[n] token ids, n = sum of the true lengths (read-only)."""
    weights: np.ndarray | None
    """float32 [n], or None = all ones."""
    segments: np.ndarray
    """tables.SEGMENT_DTYPE [s]."""
    branches: np.ndarray | None = None
    """tables.BRANCH_DTYPE [sum of num_branches], in segment order; None = there are none."""
    images: PackImages | None = None
    sources: tuple[str, ...] = ()
    """Names of the input files, by `source_file` of a segment."""

    def record(self, segment: int) -> str:
        """Where a segment comes from, as words for an error."""
        row = self.segments[segment]
        number = int(row["source_file"])
        name = self.sources[number] if number < len(self.sources) else f"source {number}"
        return f"pack {self.index}, record of {name} at byte {int(row['source_offset'])}"


class Shard:
    """One open shard: its readers and tables; tables that it does not have are empty. Packs count
    within it.
    """

    def __init__(
        self,
        directory: Place,
        entry: ShardEntry,
        manifest: DatasetManifest,
        open_file: OpenFile = StoredFile,
    ) -> None:
        """ValueError lists the files that are missing or not as stated."""
        opened = dict[str, StoredFile]()
        reasons = []
        for file in entry.files:
            try:
                opened[file.name] = open_file(directory / file.name, file)
            except ValueError as error:
                reasons.append(str(error))
        if reasons:
            raise ValueError("; ".join(reasons))
        try:
            self.tokens = IndexedReader(opened["tokens.idx"], opened["tokens.bin"])
            self.weights, self.images = (
                IndexedReader(opened[f"{name}.idx"], opened[f"{name}.bin"])
                if f"{name}.bin" in opened
                else None
                for name in ("weights", "images")
            )
        except KeyError as error:
            raise ValueError(f"{directory}: the manifest does not list {error}") from error
        (
            self.packs,
            self.segments,
            self.branches,
            self.units,
            self.grids,
            self.checksums,
            self.image_checksums,
        ) = (
            tables.table_of(opened[f"{name}.npy"], dtype)
            if f"{name}.npy" in opened
            else np.zeros(0, dtype)
            for name, dtype in _TABLES.items()
        )
        self.boundaries = {
            degree: tables.table_of(opened[f"shards_cp{degree}.npy"], BOUNDARY_DTYPE, degree)
            for degree in manifest.cp_degrees
            if f"shards_cp{degree}.npy" in opened
        }
        if not len(self.packs) == len(self.checksums) == entry.num_packs:
            raise ValueError(
                f"{directory}: {len(self.packs)} packs, the manifest says {entry.num_packs}"
            )

    def token_ids(self, number: int) -> np.ndarray:
        """All token ids of a pack. ValueError: not those that were built."""
        return self._values(self.tokens, "tokens", number)

    def loss_weights(self, number: int) -> np.ndarray | None:
        """float32, one for each token; None where all are 1. ValueError as `token_ids`."""
        return None if self.weights is None else self._values(self.weights, "weights", number)

    def _values(self, reader: IndexedReader, column: str, number: int) -> np.ndarray:
        start, count = (
            int(self.packs["first_segment"][number]),
            int(self.packs["num_segments"][number]),
        )
        data = _sound(
            reader, start, start + count, int(self.checksums[column][number]), f"its pack {number}"
        )
        return np.frombuffer(data, reader.dtype)

    def item(self, number: int) -> bytes:
        """Encoded bytes of an image or a video. ImageError when damaged, so that `--on-bad-image`
        decides.
        """
        assert self.images is not None
        try:
            built = int(self.image_checksums["data"][number])
            return _sound(self.images, number, number + 1, built, f"item {number}")
        except ValueError as error:
            raise ImageError(str(error)) from error

    def images_of(self, number: int, feature_ids: tuple[int, ...]) -> PackImages:
        """The images of a pack."""
        row = self.packs[number]
        own = slice(int(row["first_unit"]), int(row["first_unit"]) + int(row["num_units"]))
        units = self.units[own].copy()
        grids = None
        if len(self.grids):  # [u, 2]
            grids = np.stack([self.grids[own][name] for name in ("rows", "columns")], 1).astype(
                np.int64
            )
        units["segment"] -= int(row["first_segment"])  # of the shard -> of the pack
        boundaries = {
            degree: np.asarray(table[number]) for degree, table in self.boundaries.items()
        }
        return PackImages(units, boundaries, self.item, feature_ids, grids)


def _sound(reader: IndexedReader, start: int, stop: int, built: int, name: str) -> bytes:
    """The bytes of sequences `start..stop`; ValueError where their checksum is not the one they
    were built with.
    """
    data = reader.stored(start, stop)
    if (found := crc32(data)) != built:
        raise ValueError(
            f"{reader.bin.path}: {name} has the checksum {found:08x}, it was built with "
            f"{built:08x}: the file was "
            "damaged or replaced since; `verify` lists all that is wrong, a sound copy of the file repairs it"
        )
    return data


class PackedDataset:
    """A finished dataset directory, open for reading. Pack numbers run over the shards in the
    manifest's order.

    At most `open_shards` of them are open at a time: 3 descriptors each, and tables of about 60
    bytes a segment.
    """

    def __init__(
        self,
        directory: files.StrPath | Url,
        cache: DataCache | None = None,
        open_shards: int = OPEN_SHARDS,
    ) -> None:
        """Open manifest.json and look at every shard. ValueError lists all that is wrong with them.

        `cache` holds what is read of a URL; without one, small values of its own.
        """
        self.directory = root = place_of(directory)
        self.manifest = manifest = DatasetManifest.read(directory)
        open_file = (
            (cache or DataCache()).opener(root, manifest) if isinstance(root, Url) else StoredFile
        )
        self._stops = list(accumulate(entry.num_packs for entry in manifest.shards))

        def opened(number: int) -> Shard:
            entry = manifest.shards[number]
            return Shard(root / entry.name, entry, manifest, open_file)

        self.shard: Callable[[int], Shard] = functools.lru_cache(open_shards)(opened)
        """An open shard by its number; the one that was not used for longest is let go when there
        are too many.
        """
        self.fingerprint = manifest.fingerprint
        """Hash of the sizes and hashes of all files. A file that differs from them is refused when
        it is read.
        """
        with ThreadPoolExecutor(16) as pool:
            if reasons := list(filter(None, pool.map(self._look, range(len(manifest.shards))))):
                raise ValueError(listed(reasons, 20, "; "))

    def _look(self, number: int) -> str:
        """What is wrong with a shard."""
        try:
            self.shard(number)
        except ValueError as error:
            return str(error)
        return ""

    def __len__(self) -> int:
        """Number of packs."""
        return self._stops[-1] if self._stops else 0

    def pack(self, i: int) -> Pack:
        """Pack `i`, 0 <= i < len (IndexError otherwise), from any thread; its arrays are read-only.

        ValueError: the files are not as they were when the dataset was opened, or not as they were
        built.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"pack {i} of {self.directory}, which has {len(self)}")
        number = bisect.bisect_right(self._stops, i)
        shard = self.shard(number)
        within = i - self._stops[number] + len(shard.packs)  # the stop lies behind its last pack
        row = shard.packs[within]
        start = int(row["first_segment"])
        segments = shard.segments[start : start + int(row["num_segments"])]
        branches = None
        count = segments["num_branches"]
        if count.any():  # those of neighbouring segments stand side by side
            first = int(segments["first_branch"][count > 0][0])
            branches = shard.branches[first : first + int(count.sum())]
        feature_ids = self.manifest.feature_ids
        images = shard.images_of(within, feature_ids) if feature_ids else None
        tokens, weights = shard.token_ids(within), shard.loss_weights(within)
        return Pack(i, tokens, weights, segments, branches, images, self.manifest.sources)


class StoredObject(StoredFile):
    """One bin of a packed dataset at a URL, read by offset."""

    def __init__(self, url: Url, size: int) -> None:
        self.path = str(url)
        self.size = size
        self._url = url

    def read(self, offset: int, count: int) -> bytes:
        """Read a range as from a file; ValueError when the store is not reached."""
        try:
            return self._url.read(offset, count) if count else b""
        except FileNotFoundError as error:
            raise ValueError(f"{self.path}: it was removed while it was read") from error


class DataCache:
    """The folder for copies of tables, and of `gib` GiB of bins; one for all datasets of a run."""

    def __init__(self, folder: files.StrPath | None = None, gib: float = 1.0) -> None:
        self._given = folder
        self._free = int(gib * 2**30)

    def _place(self, sha256: str) -> Path:
        """The file with the content of this hash, whether it is there or not."""
        name = f"tables/{sha256[:2]}"
        if self._given is None:
            return cache_folder(name) / sha256
        folder = Path(self._given).expanduser() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / sha256

    def opener(self, root: Url, manifest: DatasetManifest) -> OpenFile:
        """What opens the files of a dataset. Each is compared with the size that the store
        states.
        """
        bins = sum(
            file.size
            for shard in manifest.shards
            for file in shard.files
            if file.name.endswith(".bin")
        )
        copied = bins <= self._free  # all bins of a dataset or none
        self._free -= bins if copied else 0
        sizes = root.sizes_below() if root.lists else None  # one request instead of one a file

        def open_file(url: Url, stated: FileEntry) -> StoredFile:
            try:
                size = url.size() if sizes is None else sizes.get(url.text[len(root.text) + 1 :])
            except FileNotFoundError:
                size = None
            if size != stated.size:
                found = "no such file" if size is None else f"{size} bytes"
                raise ValueError(f"{url}: {found}, the manifest says {stated.size} bytes")
            if url.name.endswith(".bin") and not copied:
                return StoredObject(url, size)
            path = self._place(stated.sha256)
            try:
                whole = files.sha256_of(path, size)[1] == stated.sha256
            except (OSError, ValueError):  # not there, or cut
                whole = False
            if not whole:
                if path.is_dir():
                    shutil.rmtree(path)
                files.write_atomically(path, url.read(0, size) if size else b"")
            return StoredFile(path, stated, name=str(url))

        return open_file
