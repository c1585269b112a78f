"""Reads every byte of a packed dataset and says what is wrong, one line a file.

Key property: one damaged file hides no other. Each is looked at by itself first, then the content of shards whose files
are sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacp.core.data.data_cache import DataCache
from megacp.core.data.image_shards import boundary_reasons
from megacp.core.data.manifest import DatasetManifest, FileEntry, ShardEntry
from megacp.core.data.reader import image_patch_of
from megacp.core.data.row_images import row_units, vision_inputs
from megacp.core.data.shard import Shard
from megacp.core.data.stored_file import StoredFile
from megacp.core.storage import files
from megacp.core.storage.place import Place, place_of, sha256_of
from megacp.core.storage.url import Url
from megacp.core.storage.wording import listed

_TOLD = 10
"""Packs that a line names."""


def verify(directory: files.StrPath | Url) -> list[str]:
    """Everything that is wrong with a dataset, [] when it is sound: what opening checks, then every byte of it.

    Bytes agree with the sha256 of each file and the checksum of each pack and image. Token ids are below the vocabulary
    size, weights finite and not negative. Image tokens and boundary tables are as the units say.
    """
    directory = place_of(directory)
    open_file: Callable[[Any, FileEntry], StoredFile] = StoredFile
    try:
        manifest = DatasetManifest.read(directory)
        image_patch = image_patch_of(directory, manifest)
        if isinstance(directory, Url):
            open_file = DataCache().opener(directory, manifest)
    except ValueError as error:
        return [str(error)]
    reasons, first = [], 0
    for entry in manifest.shards:
        reasons += _Check(directory, entry, manifest, image_patch, first, open_file).reasons()
        first += entry.num_packs
    return reasons


def damaged_file(directory: Place, entry: ShardEntry, file: FileEntry) -> str | None:
    """Why a file is not the one that was built: not there, no regular file, or of another size or sha256."""
    path = directory / entry.name / file.name
    try:
        if isinstance(path, Path):
            StoredFile(path, file)
        found = sha256_of(path, file.size)[1]
    except FileNotFoundError:
        return f"{path}: no such file, the manifest says {file.size} bytes"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return None if found == file.sha256 else f"{path}: sha256 is {found}, the manifest says {file.sha256}"


@dataclass(frozen=True)
class _Check:
    """The check of one shard, whose first pack is `first` in the dataset."""

    directory: Place
    entry: ShardEntry
    manifest: DatasetManifest
    image_patch: int | None
    first: int
    open_file: Callable[[Any, FileEntry], StoredFile]

    def reasons(self) -> list[str]:
        """One for each damaged file, or else for each contradiction in what the files hold."""
        found = {file.name: damaged_file(self.directory, self.entry, file) for file in self.entry.files}
        damaged = {name: reason for name, reason in found.items() if reason}
        if damaged and any(not name.endswith(".bin") or ": sha256 is " not in damaged[name] for name in damaged):
            return list(damaged.values())
        try:
            shard = Shard(self.directory / self.entry.name, self.entry, self.manifest, self.open_file)
        except (ValueError, OSError) as error:
            return [*damaged.values(), str(error)]
        if not damaged:
            packs = range(self.entry.num_packs)
            return [f"pack {self.first + i}: {reason}" for i in packs for reason in self._pack_reasons(shard, i)]
        return [f"{reason}{self._changed(shard, name)}" for name, reason in damaged.items()]

    def _pack_reasons(self, shard: Shard, number: int) -> Iterator[str]:
        """What is wrong with one pack of a shard with sound files."""
        try:
            tokens, weights = shard.token_ids(number, "it"), shard.loss_weights(number, "its weights")
        except (ValueError, OSError) as error:
            yield str(error)
            return
        low, high, ids = int(tokens.min()), int(tokens.max()), self.manifest.num_token_ids
        if low < 0 or high >= ids:
            yield f"token ids {low}..{high}, the vocabulary is 0..{ids - 1}"
        if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
            yield "loss weights that are negative or not finite"
        if self.image_patch is not None:
            yield from _image_reasons(shard, number, tokens, self.image_patch)

    def _changed(self, shard: Shard, name: str) -> str:
        """Which packs or items a damaged bin has changed, as the end of a sentence; empty where no checksums say."""
        read: dict[str, Callable[[int], object]] = {
            "tokens.bin": lambda i: shard.token_ids(i, ""),
            "weights.bin": lambda i: shard.loss_weights(i, ""),
            "images.bin": shard.item,
        }
        first, count, what = self.first, self.entry.num_packs, "packs"
        if name == "images.bin" and shard.images is not None:
            first, count, what = 0, len(shard.images), "items"
        changed = []
        for i in range(count):
            try:
                read[name](i)
            except (ValueError, OSError):
                changed.append(str(first + i))
        return f"; changed {what}: {listed(changed, _TOLD)}" if changed else ""


def _image_reasons(shard: Shard, number: int, tokens: np.ndarray, image_patch: int) -> Iterator[str]:
    """Whether the image tokens of a pack are those of its units, and the boundary tables and stored images fit them."""
    images = shard.images_of(number, image_patch)
    first = int(shard.packs["first_segment"][number])
    segments = shard.segments[first : first + int(shard.packs["num_segments"][number])]
    lengths = segments["true_length"].astype(np.int64)
    units = row_units([images], [len(lengths)], np.cumsum(lengths) - lengths)
    try:
        vision_inputs(units, tokens, image_patch)
        for item in np.unique(units.item).tolist():
            images.read(item)
    except (ValueError, OSError) as error:
        yield str(error)
    for degree, table in images.boundaries.items():
        for reason in boundary_reasons(table, units.cum_crops, units.cum_pooled):
            yield f"shards_cp{degree}.npy: {reason}"
