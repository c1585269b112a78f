"""Reads a packed dataset: what training opens.

A dataset opens only if all files have the manifest's sizes, and all tables its hashes: damage found at the first use of
a shard would be found hours into a run. A random pack is one read at a known offset, compared with its checksum.
`indexed`, `tables` and `manifest` describe the three kinds of file.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from megacp.core.data.data_cache import DataCache
from megacp.core.data.geometry import ImageRules
from megacp.core.data.manifest import MANIFEST_NAME, DatasetManifest, FileEntry
from megacp.core.data.row_images import PackImages
from megacp.core.data.shard import Shard
from megacp.core.data.stored_file import StoredFile
from megacp.core.storage import files
from megacp.core.storage.place import Place, place_of
from megacp.core.storage.url import Url
from megacp.core.storage.wording import listed

OPEN_SHARDS = 64
_TOLD = 20
"""Shards whose faults one message tells."""
_REQUESTS = 16
"""Shards of a store that are looked at side by side."""


@dataclass(frozen=True, eq=False)
class Pack:
    """One pack as stored: true tokens of its segments, one after the other; `collate` adds the padding."""

    index: int
    """Number in the dataset."""
    tokens: np.ndarray
    """[n] token ids, n = sum of the true lengths (read-only)."""
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


class PackedDataset:
    """A finished dataset directory, open for reading. Pack numbers run over the shards in the manifest's order.

    At most `open_shards` of them are open at a time: 3 descriptors each, and tables of about 60 bytes a segment.
    """

    def __init__(
        self, directory: files.StrPath | Url, cache: DataCache | None = None, open_shards: int = OPEN_SHARDS
    ) -> None:
        """Open manifest.json and look at every shard. ValueError lists all that is wrong with them.

        `cache` holds what is read of a URL; without one, small values of its own.
        """
        self.directory = place_of(directory)
        self.manifest = DatasetManifest.read(directory)
        self._stops = list(accumulate(entry.num_packs for entry in self.manifest.shards))
        self._image_patch = image_patch_of(self.directory, self.manifest)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._most_open = open_shards
        self._changes = threading.Lock()
        self._open_file: Callable[[Any, FileEntry], StoredFile] = StoredFile
        threads = 1
        if isinstance(self.directory, Url):
            self._open_file = (cache or DataCache()).opener(self.directory, self.manifest)
            threads = _REQUESTS
        with ThreadPoolExecutor(threads) as pool:
            looks = list(pool.map(self._look, range(len(self.manifest.shards))))
        samples, reasons = [sample for sample, _ in looks], [reason for _, reason in looks if reason]
        if reasons:
            rest = " shards; `verify` lists all" if len(reasons) > _TOLD else ""
            raise ValueError(listed(reasons, _TOLD, "; ") + rest)
        found = json.dumps([self.manifest.fingerprint, samples])
        self.fingerprint = hashlib.sha256(found.encode()).hexdigest()
        """Of the files as this machine sees them: sizes of all, content of all but the bins, beginnings of the bins."""

    def _look(self, number: int) -> tuple[list[int], str]:
        """The sample of a shard that nobody has looked at, and what is wrong with it."""
        try:
            return self.shard(number).sample(), ""
        except ValueError as error:
            return [], str(error)

    def __len__(self) -> int:
        """Number of packs."""
        return self._stops[-1] if self._stops else 0

    def pack(self, i: int) -> Pack:
        """Pack `i`, 0 <= i < len (IndexError otherwise), from any thread; its arrays are read-only.

        ValueError: the files are not as they were when the dataset was opened, or not as they were built.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"pack {i} of {self.directory}, which has {len(self)}")
        number = bisect.bisect_right(self._stops, i)
        shard = self.shard(number)
        within = i - self._stops[number] + shard.entry.num_packs
        row = shard.packs[within]
        start = int(row["first_segment"])
        segments = shard.segments[start : start + int(row["num_segments"])]
        branches = None
        if len(shard.branches):
            count = segments["num_branches"]
            first = int(segments["first_branch"][count > 0][0]) if count.any() else 0
            branches = shard.branches[first : first + int(count.sum())] if count.any() else None
        images = None if self._image_patch is None else shard.images_of(within, self._image_patch)
        name = f"pack {i}"
        tokens, weights = shard.token_ids(within, name), shard.loss_weights(within, name)
        return Pack(i, tokens, weights, segments, branches, images, self.manifest.sources)

    def shard(self, number: int) -> Shard:
        """An open shard; the one that was not used for longest is let go when there are too many."""
        with self._changes:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        entry = self.manifest.shards[number]
        shard = Shard(self.directory / entry.name, entry, self.manifest, self._open_file)
        with self._changes:
            self._open[number] = shard
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return shard


def image_patch_of(directory: Place, manifest: DatasetManifest) -> int | None:
    """Token id that stands where an image feature is added; None for text. ValueError: the image rules are wrong."""
    if manifest.image_rules is None:
        return None
    try:
        return ImageRules.from_dict(manifest.image_rules).token_ids.get("image_patch")
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{directory / MANIFEST_NAME}: `image_rules`: {error}") from error
