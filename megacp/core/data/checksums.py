"""The checksum tables of a shard: made while it is written, or later for one of an earlier format.

Key property: the tables follow from the bins alone, so a shard that gets them later equals one that was built with
them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megacp.core.data import tables
from megacp.core.data.indexed import IndexedReader
from megacp.core.data.manifest import FileEntry, ShardEntry
from megacp.core.data.stored_file import crc32
from megacp.core.storage import files


def pack_checksums(tokens: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """CHECKSUM_DTYPE [packs] from the crc32 of each pack's tokens and weights; None: there are no weights."""
    table = np.zeros(len(tokens), tables.CHECKSUM_DTYPE)
    table["tokens"], table["weights"] = tokens, 0 if weights is None else weights
    return table


def with_checksums(directory: Path, entry: ShardEntry) -> ShardEntry:
    """The shard in `directory` with its checksum tables, which are added where it was built without.

    ValueError: a bin is not the one that the entry states.
    """
    if entry.file("checksums.npy") is not None:
        return entry
    crcs: dict[str, np.ndarray | None] = {"weights": None}
    added = []
    for name in ("tokens", "weights", "images"):
        stated = entry.file(f"{name}.bin")
        if stated is None:
            continue
        found = files.sha256_of(directory / stated.name, stated.size)[1]
        if found != stated.sha256:
            raise ValueError(f"{directory / stated.name}: sha256 is {found}, it was built with {stated.sha256}")
        reader = IndexedReader.open(directory / name)
        crcs[name] = _checksums(reader, by_sequence=name == "images")
    tokens, images = crcs["tokens"], crcs.get("images")
    assert tokens is not None, "every shard has tokens"
    added.append(tables.write_table(directory / "checksums.npy", pack_checksums(tokens, crcs["weights"])))
    if images is not None:
        table = images.view(tables.ITEM_CHECKSUM_DTYPE)
        added.append(tables.write_table(directory / "image_checksums.npy", table))
    files.sync_folder(directory)
    listed = [*entry.files, *(FileEntry(path.name, size, sha256) for path, size, sha256 in added)]
    return dataclasses.replace(entry, files=tuple(sorted(listed, key=lambda file: file.name)))


def _checksums(reader: IndexedReader, by_sequence: bool) -> np.ndarray:
    """crc32 of each sequence or each document, uint32."""
    bounds = np.arange(len(reader) + 1) if by_sequence else reader.boundaries
    spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.array([crc32(reader.stored(start, stop)) for start, stop in spans], np.uint32)
