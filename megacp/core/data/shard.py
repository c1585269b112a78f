"""One open shard of a packed dataset: its tables in memory, its bins read by offset.

Opening compares the sizes of all files and the hashes of tables and indices. Each read of a bin is compared with the
checksum of its pack or image. Hashing the bins at open would take as long as reading all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megacp.core.data import tables
from megacp.core.data.image_shards import BOUNDARY_DTYPE
from megacp.core.data.indexed import IndexedReader
from megacp.core.data.manifest import DatasetManifest, FileEntry, ShardEntry
from megacp.core.data.pixels import ImageError
from megacp.core.data.row_images import PackImages
from megacp.core.data.stored_file import StoredFile, crc32
from megacp.core.storage import files
from megacp.core.storage.place import Place

_TABLES = {
    "packs": tables.PACK_DTYPE,
    "segments": tables.SEGMENT_DTYPE,
    "branches": tables.BRANCH_DTYPE,
    "units": tables.UNIT_DTYPE,
    "checksums": tables.CHECKSUM_DTYPE,
    "image_checksums": tables.ITEM_CHECKSUM_DTYPE,
}
_SAMPLE = 4096
"""Bytes of each bin that `sample` looks at."""


class Shard:
    """One open shard: its readers and tables; tables that it does not have are empty."""

    def __init__(
        self,
        directory: Place,
        entry: ShardEntry,
        manifest: DatasetManifest,
        open_file: Callable[[Any, FileEntry], StoredFile] = StoredFile,
    ) -> None:
        """ValueError lists the files that are missing or not as stated. `open_file` opens what is below `directory`."""
        self.directory, self.entry = directory, entry
        opened = _opened(directory, entry, open_file)
        try:
            self.tokens = IndexedReader(opened["tokens.idx"], opened["tokens.bin"])
            self.weights, self.images = (
                IndexedReader(opened[f"{name}.idx"], opened[f"{name}.bin"]) if f"{name}.bin" in opened else None
                for name in ("weights", "images")
            )
            self.packs, self.segments, self.branches, self.units, self.checksums, self.image_checksums = (
                tables.table_of(opened[f"{name}.npy"], dtype) if f"{name}.npy" in opened else np.zeros(0, dtype)
                for name, dtype in _TABLES.items()
            )
            self.boundaries = {
                degree: tables.table_of(opened[f"shards_cp{degree}.npy"], BOUNDARY_DTYPE, degree)
                for degree in (manifest.cp_degrees if len(self.units) else ())
            }
        except KeyError as error:
            raise ValueError(f"{directory}: the manifest does not list {error}") from error
        if not len(self.packs) == len(self.checksums) == entry.num_packs:
            raise ValueError(f"{directory}: {len(self.packs)} packs, the manifest says {entry.num_packs}")

    def token_ids(self, number: int, name: str) -> np.ndarray:
        """All token ids of pack `number` of this shard, which is called `name` in errors.

        ValueError: they are not those that were built.
        """
        return self._values(self.tokens, "tokens", number, name)

    def loss_weights(self, number: int, name: str) -> np.ndarray | None:
        """float32, one for each token; None where all are 1. ValueError as `token_ids`."""
        return None if self.weights is None else self._values(self.weights, "weights", number, name)

    def _values(self, reader: IndexedReader, column: str, number: int, name: str) -> np.ndarray:
        start = int(self.packs["first_segment"][number])
        data = reader.stored(start, start + int(self.packs["num_segments"][number]))
        _refuse_changed(data, int(self.checksums[column][number]), reader.bin.path, name)
        return np.frombuffer(data, reader.dtype)

    def item(self, number: int) -> bytes:
        """Encoded bytes of an image or a video; called from any thread. ImageError: they are not those of the build, so
        that `--on-bad-image` decides.
        """
        assert self.images is not None, "units without images are refused at open"
        data = self.images.stored(number, number + 1)
        try:
            _refuse_changed(data, int(self.image_checksums["data"][number]), self.images.bin.path, f"item {number}")
        except ValueError as error:
            raise ImageError(str(error)) from error
        return data

    def images_of(self, number: int, image_patch: int) -> PackImages:
        """The images of pack `number` of this shard."""
        row = self.packs[number]
        first = int(row["first_unit"])
        units = self.units[first : first + int(row["num_units"])].copy()
        units["segment"] -= int(row["first_segment"])
        tables_of = {degree: np.asarray(table[number]) for degree, table in self.boundaries.items()}
        return PackImages(units, tables_of, self.item, image_patch)

    def sample(self) -> list[int]:
        """crc32 of the beginning of each bin: differs where another file of the same size stands."""
        readers = [reader for reader in (self.tokens, self.weights, self.images) if reader is not None]
        return [crc32(reader.bin.read(0, min(_SAMPLE, reader.bin.size))) for reader in readers]


def _refuse_changed(data: bytes, built: int, path: files.StrPath, name: str) -> None:
    found = crc32(data)
    if found != built:
        raise ValueError(
            f"{path}: {name} has the checksum {found:08x}, it was built with {built:08x}: the file was damaged or "
            "replaced since; `verify` lists all that is wrong in this dataset, a sound copy of the file repairs it"
        )


def _opened(
    directory: Place, entry: ShardEntry, open_file: Callable[[Any, FileEntry], StoredFile]
) -> dict[str, StoredFile]:
    """All files of a shard by name. ValueError lists those that are not as the manifest says."""
    opened, reasons = {}, []
    for file in entry.files:
        try:
            opened[file.name] = open_file(directory / file.name, file)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))
    return opened
