"""What a run keeps of datasets that lie at URLs: tables as files of this machine, blocks of the bins in memory.

A table is kept under the sha256 that the manifest states, so a copy is never of another dataset, and all ranks of a
machine share it. Bins are read in blocks where the dataset fits the cache, as packs come in a random order; else by
packs, since a whole block would be read for one pack of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megacp.core.data.manifest import DatasetManifest, FileEntry
from megacp.core.data.stored_file import StoredFile
from megacp.core.storage import files
from megacp.core.storage.place import CACHE, read_content
from megacp.core.storage.url import Url

BLOCK_BYTES = 16 << 20


class StoredObject(StoredFile):
    """One bin of a packed dataset at a URL, read by offset."""

    def __init__(self, url: Url, stated: FileEntry, in_blocks: bool) -> None:
        self.path, self.size, self._sha256 = str(url), stated.size, stated.sha256
        self._read = url.read
        if in_blocks:
            from fsspec.caching import BlockCache

            blocks = BlockCache(
                BLOCK_BYTES,
                lambda start, stop: url.read(start, min(stop, stated.size) - start),
                self.size,
                self.size // BLOCK_BYTES + 1,
            )
            self._read = lambda offset, count: blocks._fetch(offset, offset + count)

    def read(self, offset: int, count: int) -> bytes:
        """As of a file; ValueError when the store is not reached."""
        try:
            return self._read(offset, count) if count else b""
        except FileNotFoundError as error:
            raise ValueError(f"{self.path}: it was removed while it was read") from error


class DataCache:
    """The folder of tables, and how many GiB of bins are kept; one for all datasets of a run."""

    def __init__(self, folder: files.StrPath | None = None, gib: float = 1.0) -> None:
        self._folder = Path(folder or CACHE).expanduser() / "tables"
        self._free = int(gib * 2**30)

    def opener(self, root: Url, manifest: DatasetManifest) -> Callable[[Url, FileEntry], StoredFile]:
        """What opens the files of a dataset. Each is compared with the size that the store states.

        It raises ValueError for a file that is not there, as of a dataset that was uploaded by half.
        """
        bins = sum(file.size for shard in manifest.shards for file in shard.files if file.name.endswith(".bin"))
        in_blocks = bins <= self._free
        self._free -= bins if in_blocks else 0
        sizes = root.sizes_below() if root.lists else None

        def open_file(url: Url, stated: FileEntry) -> StoredFile:
            try:
                size = url.size() if sizes is None else sizes.get(url.text[len(root.text) + 1 :])
            except FileNotFoundError:
                size = None
            if size != stated.size:
                found = "no such file" if size is None else f"{size} bytes"
                raise ValueError(f"{url}: {found}, the manifest says {stated.size} bytes")
            if url.name.endswith(".bin"):
                return StoredObject(url, stated, in_blocks)
            return StoredFile(self._local(url, stated), stated, name=str(url))

        return open_file

    def _local(self, url: Url, stated: FileEntry) -> Path:
        """The copy of a table, made where there is none that is whole."""
        path = self._folder / stated.sha256[:2] / stated.sha256
        try:
            if files.sha256_of(path, stated.size)[1] == stated.sha256:
                return path
        except (OSError, ValueError):  # not there, or cut
            pass
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, read_content(url, stated.size))
        return path
