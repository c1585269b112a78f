"""Reads every byte of a packed dataset and says what is wrong, one line a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megacp.storage import files
from megacp.storage.place import Place, digest_of, place_of
from megacp.storage.url import Url
from megacp.training.data.manifest import DatasetManifest, FileEntry
from megacp.training.data.reader import DataCache, Shard
from megacp.training.data.tables import StoredFile


def verify(directory: files.StrPath | Url) -> list[str]:
    """Everything that is wrong with a dataset, [] when it is sound: what opening checks, then every
    byte of it.

    Bytes agree with the sha256 of each file. Token ids are below the vocabulary size, weights
    finite and not negative; these are looked at in shards whose files are sound.
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
                    found = _pack_reasons(shard, i, manifest.num_token_ids)
                    reasons += [f"pack {first + i}: {reason}" for reason in found]
            except (ValueError, OSError) as error:
                reasons.append(str(error))
        first += entry.num_packs
    return reasons


def _damaged(path: Place, file: FileEntry) -> str | None:
    """Why a file is not the one that was built: not there, no regular file, or of another size or
    sha256.
    """
    try:
        if isinstance(path, Path):
            StoredFile(path, file)
        found = digest_of(path, file.size)[1]
    except FileNotFoundError:
        return f"{path}: no such file, the manifest says {file.size} bytes"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return (
        None
        if found == file.sha256
        else f"{path}: sha256 is {found}, the manifest says {file.sha256}"
    )


def _pack_reasons(shard: Shard, number: int, num_ids: int) -> Iterator[str]:
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
