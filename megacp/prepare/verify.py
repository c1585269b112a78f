"""Reads every byte of a packed dataset and says what is wrong, one line a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megacp.core.data.image_shards import compute_image_shard_boundaries
from megacp.core.data.images import row_units, vision_inputs
from megacp.core.data.manifest import DatasetManifest, FileEntry
from megacp.core.data.reader import DataCache, Shard
from megacp.core.data.tables import StoredFile
from megacp.core.storage import files
from megacp.core.storage.place import Place, place_of, sha256_of
from megacp.core.storage.url import Url


def verify(directory: files.StrPath | Url) -> list[str]:
    """Everything that is wrong with a dataset, [] when it is sound: what opening checks, then every byte of it.

    Bytes agree with the sha256 of each file. Token ids are below the vocabulary size, weights finite and not negative.
    Image tokens and boundary tables are as the units say. Content is looked at in shards whose files are sound.
    """
    directory = place_of(directory)
    open_file: Callable[[Any, FileEntry], StoredFile] = StoredFile
    try:
        manifest = DatasetManifest.read(directory)
        if isinstance(directory, Url):
            open_file = DataCache().opener(directory, manifest)
    except ValueError as error:
        return [str(error)]
    reasons, first = [], 0
    for entry in manifest.shards:
        folder = directory / entry.name
        damaged = [reason for file in entry.files if (reason := _damaged(folder / file.name, file))]
        reasons += damaged
        if not damaged:
            try:
                shard = Shard(folder, entry, manifest, open_file)
                for i in range(entry.num_packs):
                    found = _pack_reasons(shard, i, manifest.num_token_ids, manifest.image_patch)
                    reasons += [f"pack {first + i}: {reason}" for reason in found]
            except (ValueError, OSError) as error:
                reasons.append(str(error))
        first += entry.num_packs
    return reasons


def _damaged(path: Place, file: FileEntry) -> str | None:
    """Why a file is not the one that was built: not there, no regular file, or of another size or sha256."""
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


def _pack_reasons(shard: Shard, number: int, num_ids: int, image_patch: int | None) -> Iterator[str]:
    """What is wrong with one pack of a shard with sound files."""
    try:
        tokens, weights = shard.token_ids(number), shard.loss_weights(number)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= num_ids:
        yield f"token ids {low}..{high}, the vocabulary is 0..{num_ids - 1}"
    if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
        yield "loss weights that are negative or not finite"
    if image_patch is not None:
        yield from _image_reasons(shard, number, tokens, image_patch)


def _image_reasons(shard: Shard, number: int, tokens: np.ndarray, image_patch: int) -> Iterator[str]:
    """Whether the image tokens of a pack are those of its units, and the boundary tables and stored images fit them."""
    images = shard.images_of(number, image_patch)
    first = int(shard.packs["first_segment"][number])
    segments = shard.segments[first : first + int(shard.packs["num_segments"][number])]
    lengths = segments["true_length"].astype(np.int64)
    units = row_units([images], [len(lengths)], np.cumsum(lengths) - lengths)
    try:
        vision_inputs(units, tokens, image_patch)
        for item in np.unique(units.table["item"]).tolist():
            images.read(item)
    except (ValueError, OSError) as error:
        yield str(error)
    for degree, table in images.boundaries.items():
        if not np.array_equal(table, compute_image_shard_boundaries(units.cum_crops, units.cum_pooled, degree)):
            yield f"shards_cp{degree}.npy: its ranges are not those of the pack's units"
