"""Check every byte of a packed dataset and report all problems, one per line."""

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
    """Return all problems of a dataset; [] if it is sound.

    Every file must have the sha256 of the manifest. In shards whose files are sound, token ids must
    be below the vocabulary size, and weights must be finite and not negative.
    """
    directory = place_of(directory)
    open_file: Callable[[Any, FileEntry], StoredFile] = StoredFile
    # without a valid manifest nothing else can be checked
    try:
        manifest = DatasetManifest.read(directory)
        if isinstance(directory, Url):
            open_file = DataCache().opener(directory, manifest)
    except ValueError as error:
        return [str(error)]
    reasons = []
    first = 0  # number of the shard's first pack
    for entry in manifest.shards:
        folder = directory / entry.name
        damaged = []
        for file in entry.files:
            reason = _damaged(folder / file.name, file)
            if reason:
                damaged.append(reason)
        reasons += damaged
        # the contents of a damaged file would only repeat its problem
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
    """Describe how a file differs from the file that was built; return None if it is identical.

    The file may be missing, not a regular file, or have a different size or sha256.
    """
    try:
        # opening a local file checks its kind and size, with a better message than a wrong hash
        if isinstance(path, Path):
            StoredFile(path, file)
        found = digest_of(path, file.size)[1]
    except FileNotFoundError:
        return f"{path}: no such file; according to the manifest it has {file.size} bytes"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if found == file.sha256:
        return None
    return f"{path}: sha256 is {found}, but {file.sha256} in the manifest"


def _pack_reasons(shard: Shard, number: int, num_ids: int) -> Iterator[str]:
    """Yield the problems of one pack in a shard with sound files."""
    try:
        tokens = shard.token_ids(number)
        weights = shard.loss_weights(number)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    # two passes over the tokens instead of a mask of the same size
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= num_ids:
        yield f"token ids {low}..{high} are outside the vocabulary 0..{num_ids - 1}"
    # NaN is neither finite nor >= 0
    if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
        yield "some loss weights are negative or not finite"
