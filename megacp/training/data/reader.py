"""Reader of packed datasets for training, on a local disk or at a URL.

A dataset opens only if all files have the sizes and all tables have the hashes in the manifest.
Otherwise, a run might detect damage only after hours, when it first uses a shard. To read a random
pack, one read of a bin at a known offset is enough; the data is compared with its checksum.
`tables` and `manifest` describe the files.

If the dataset is at a URL, its tables are copied to local files named by their sha256, which all
ranks on the machine share. Bins are also copied if they fit in the cache. Otherwise, they are read
pack by pack.
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
"""Function that opens a file of a dataset, which must have the size in the manifest."""


@dataclass(frozen=True, eq=False)
class PackImages:
    """The stored images of one pack."""

    units: np.ndarray
    """tables.UNIT_DTYPE [u]; `segment` is relative to the pack; u = 0 for text."""
    boundaries: Mapping[int, np.ndarray]
    """BOUNDARY_DTYPE [P] by CP degree P, for the planned degrees."""
    read: Callable[[int], bytes]
    """Function that returns the encoded bytes of an image or a video by its `item` in the units.
    Any thread may call it.
    """
    feature_ids: tuple[int, ...]
    """Ids of tokens that stand for pooled features."""
    grids: np.ndarray | None = None
    """Rows and columns of each unit's pooled tokens, int64 [u, 2], if the dataset has grids."""


@dataclass(frozen=True, eq=False)
class Pack:
    """A stored pack: the concatenated true tokens of its segments. `collate` adds the padding."""

    index: int
    tokens: np.ndarray
    """Read-only token ids [n], where n is the sum of the segments' true lengths."""
    weights: np.ndarray | None
    """Loss weights, float32 [n]; None if all are 1."""
    segments: np.ndarray
    """tables.SEGMENT_DTYPE [s]."""
    branches: np.ndarray | None = None
    """tables.BRANCH_DTYPE [sum of num_branches], in segment order; None without branches."""
    images: PackImages | None = None
    sources: tuple[str, ...] = ()
    """Names of the input files, indexed by a segment's `source_file`."""

    def record(self, segment: int) -> str:
        """Return the origin of a segment, as text for an error message."""
        row = self.segments[segment]
        number = int(row["source_file"])
        name = self.sources[number] if number < len(self.sources) else f"source {number}"
        return f"pack {self.index}, record of {name} at byte {int(row['source_offset'])}"


class Shard:
    """Readers and tables of an open shard. Missing tables are empty. Packs are numbered within the
    shard.
    """

    def __init__(
        self,
        directory: Place,
        entry: ShardEntry,
        manifest: DatasetManifest,
        open_file: OpenFile = StoredFile,
    ) -> None:
        """Open the files. Raise ValueError that lists all missing or wrong files."""
        opened = dict[str, StoredFile]()
        # Collect the problems of all files before raising.
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
            self.weights = None
            if "weights.bin" in opened:
                self.weights = IndexedReader(opened["weights.idx"], opened["weights.bin"])
            self.images = None
            if "images.bin" in opened:
                self.images = IndexedReader(opened["images.idx"], opened["images.bin"])
        except KeyError as error:
            raise ValueError(f"{directory}: the manifest does not list {error}") from error

        def table(name: str) -> np.ndarray:
            dtype = _TABLES[name]
            stored = opened.get(f"{name}.npy")
            return np.zeros(0, dtype) if stored is None else tables.table_of(stored, dtype)

        self.packs = table("packs")
        self.segments = table("segments")
        self.branches = table("branches")
        self.units = table("units")
        self.grids = table("grids")
        self.checksums = table("checksums")
        self.image_checksums = table("image_checksums")
        self.boundaries = {}
        for degree in manifest.cp_degrees:
            planned = opened.get(f"shards_cp{degree}.npy")
            if planned is not None:
                self.boundaries[degree] = tables.table_of(planned, BOUNDARY_DTYPE, degree)
        if not len(self.packs) == len(self.checksums) == entry.num_packs:
            raise ValueError(
                f"{directory}: {len(self.packs)} packs, but the manifest says {entry.num_packs}"
            )

    def token_ids(self, number: int) -> np.ndarray:
        """Return a pack's token ids. Raise ValueError if they are damaged."""
        return self._values(self.tokens, "tokens", number)

    def loss_weights(self, number: int) -> np.ndarray | None:
        """Return a pack's loss weights, float32 [n]; None if all are 1.

        Raise ValueError if they are damaged.
        """
        return None if self.weights is None else self._values(self.weights, "weights", number)

    def _values(self, reader: IndexedReader, column: str, number: int) -> np.ndarray:
        """Return a pack's tokens or weights. Raise ValueError if the checksum does not match."""
        start = int(self.packs["first_segment"][number])
        stop = start + int(self.packs["num_segments"][number])
        checksum = int(self.checksums[column][number])
        data = _sound(reader, start, stop, checksum, f"its pack {number}")
        return np.frombuffer(data, reader.dtype)

    def item(self, number: int) -> bytes:
        """Return the encoded bytes of an image or a video.

        If they are damaged, raise ImageError, to which `--on-bad-image` applies.
        """
        assert self.images is not None
        try:
            built = int(self.image_checksums["data"][number])
            return _sound(self.images, number, number + 1, built, f"item {number}")
        except ValueError as error:
            raise ImageError(str(error)) from error

    def images_of(self, number: int, feature_ids: tuple[int, ...]) -> PackImages:
        """Return the images of pack `number`."""
        row = self.packs[number]
        first = int(row["first_unit"])
        own = slice(first, first + int(row["num_units"]))
        units = self.units[own].copy()  # the table is read-only
        units["segment"] -= int(row["first_segment"])  # index in the shard -> index in the pack
        grids = None
        if len(self.grids):
            columns = [self.grids[own][name] for name in ("rows", "columns")]
            grids = np.stack(columns, 1).astype(np.int64)  # [u, 2]
        boundaries = {}
        for degree, table in self.boundaries.items():
            boundaries[degree] = np.asarray(table[number])
        return PackImages(units, boundaries, self.item, feature_ids, grids)


def _sound(reader: IndexedReader, start: int, stop: int, built: int, name: str) -> bytes:
    """Return the bytes of sequences [start, stop).

    Raise ValueError unless their checksum is `built`.
    """
    data = reader.stored(start, stop)
    found = crc32(data)
    if found != built:
        raise ValueError(
            f"{reader.bin.path}: {name} has the checksum {found:08x}, but it was built with "
            f"{built:08x}: the file has been damaged or replaced; run tools/preprocess_data.py "
            "verify to list all damage, and restore the file from a good copy"
        )
    return data


class PackedDataset:
    """A finished dataset, open for reading. Packs are numbered across the manifest's shards.

    At most `open_shards` shards are open at a time. An open shard has 3 file descriptors, and
    tables of about 60 bytes per segment.
    """

    def __init__(
        self,
        directory: files.StrPath | Url,
        cache: DataCache | None = None,
        open_shards: int = OPEN_SHARDS,
    ) -> None:
        """Read manifest.json and check every shard. Raise ValueError with all problems.

        `cache` stores data read from a URL. By default, each dataset has its own small cache.
        """
        self.directory = root = place_of(directory)
        self.manifest = manifest = DatasetManifest.read(directory)
        open_file: OpenFile = StoredFile
        if isinstance(root, Url):
            open_file = (cache or DataCache()).opener(root, manifest)
        # [shards]: number of each shard's last pack, plus one
        self._stops = list(accumulate(entry.num_packs for entry in manifest.shards))

        def opened(number: int) -> Shard:
            entry = manifest.shards[number]
            return Shard(root / entry.name, entry, manifest, open_file)

        self.shard: Callable[[int], Shard] = functools.lru_cache(open_shards)(opened)
        """Function that returns an open shard by number. If there are too many, it closes the least
        recently used shard.
        """
        self.fingerprint = manifest.fingerprint
        """Hash of the sizes and hashes of all files. A file that differs from these is not read."""
        # Open all shards once, in parallel, because each takes several requests at a URL.
        with ThreadPoolExecutor(16) as pool:
            reasons = [text for text in pool.map(self._look, range(len(manifest.shards))) if text]
            if reasons:
                raise ValueError(listed(reasons, 20, "; "))

    def _look(self, number: int) -> str:
        """Return the problems of a shard, or ""."""
        try:
            self.shard(number)
        except ValueError as error:
            return str(error)
        return ""

    def __len__(self) -> int:
        """Return the number of packs."""
        return self._stops[-1] if self._stops else 0

    def pack(self, i: int) -> Pack:
        """Return pack `i`, 0 <= i < len, with read-only arrays. Any thread may call this.

        Raise IndexError for other numbers, and ValueError if the files have changed since the
        dataset was opened or built.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"no pack {i} of {self.directory}: it has {len(self)} packs")
        # find the shard, then the pack's number within the shard
        number = bisect.bisect_right(self._stops, i)
        shard = self.shard(number)
        within = i - self._stops[number] + len(shard.packs)  # counted back from the shard's end
        row = shard.packs[within]
        start = int(row["first_segment"])
        segments = shard.segments[start : start + int(row["num_segments"])]
        branches = None
        count = segments["num_branches"]
        if count.any():  # the branches of consecutive segments are stored consecutively
            first = int(segments["first_branch"][count > 0][0])
            branches = shard.branches[first : first + int(count.sum())]
        feature_ids = self.manifest.feature_ids
        images = shard.images_of(within, feature_ids) if feature_ids else None
        tokens = shard.token_ids(within)
        weights = shard.loss_weights(within)
        return Pack(i, tokens, weights, segments, branches, images, self.manifest.sources)


class StoredObject(StoredFile):
    """Bin of a packed dataset at a URL, read by offset."""

    def __init__(self, url: Url, size: int) -> None:
        self.path = str(url)
        self.size = size
        self._url = url
        self._sha256 = None

    def read(self, offset: int, count: int) -> bytes:
        """Return a range of bytes. Raise ValueError if the object has been removed."""
        try:
            return self._url.read(offset, count) if count else b""
        except FileNotFoundError as error:
            raise ValueError(f"{self.path}: the object was removed while it was read") from error


class DataCache:
    """Local copies of a run's tables, and of at most `gib` GiB of bins."""

    def __init__(self, folder: files.StrPath | None = None, gib: float = 1.0) -> None:
        self._given = folder
        self._free = int(gib * 2**30)

    def _place(self, sha256: str) -> Path:
        """Return the path for the file with this hash; the file may not exist yet."""
        name = f"tables/{sha256[:2]}"
        if self._given is None:
            return cache_folder(name) / sha256
        folder = Path(self._given).expanduser() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / sha256

    def opener(self, root: Url, manifest: DatasetManifest) -> OpenFile:
        """Return a function that checks the sizes of a dataset's files and opens them."""
        bins = 0
        for shard in manifest.shards:
            bins += sum(file.size for file in shard.files if file.name.endswith(".bin"))
        # in a store, random access to many small ranges is slow
        copied = bins <= self._free  # copy all bins of a dataset or none
        if copied:
            self._free -= bins
        sizes = root.sizes_below() if root.lists else None  # one request instead of one per file

        def open_file(url: Url, stated: FileEntry) -> StoredFile:
            try:
                size = url.size() if sizes is None else sizes.get(url.text[len(root.text) + 1 :])
            except FileNotFoundError:
                size = None
            # check the size here; the contents are checked when they are read
            if size != stated.size:
                found = "no such file" if size is None else f"{size} bytes"
                raise ValueError(f"{url}: {found}, the manifest says {stated.size} bytes")
            if url.name.endswith(".bin") and not copied:
                return StoredObject(url, size)
            path = self._place(stated.sha256)
            # Use a copy from an earlier run or another rank if its contents are correct.
            try:
                whole = files.sha256_of(path, size)[1] == stated.sha256
            except (OSError, ValueError):  # missing or truncated
                whole = False
            if not whole:
                if path.is_dir():
                    shutil.rmtree(path)
                files.write_atomically(path, url.read(0, size) if size else b"")
            return StoredFile(path, stated, name=str(url))

        return open_file
