"""The ids of records while a build runs: which of them stand in more than one unit.

Key property: memory is bounded for any number of ids. Every unit leaves a table sorted by digest, and the tables are
joined a range of digests at a time. Rejected: one table of all ids, 150 bytes each while it is sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megacp.core.storage.files import replacement

IDENTITY_DTYPE = np.dtype([("digest", "S16"), ("source", "<i4"), ("offset", "<i8"), ("line", "<i8")])
_AT_ONCE = 1_000_000
"""Ids that are compared at a time, about."""


class Repeated(NamedTuple):
    """An id that an earlier unit holds; rows of IDENTITY_DTYPE."""

    unit: int
    row: np.void
    first: np.void


def identity_file(output: str | Path, unit: int) -> Path:
    """Where the digests of a unit's record ids are kept while the build runs."""
    return Path(output) / ".ids" / f"{unit:05d}.npy"


def digest(identity: str) -> bytes:
    """A 16-byte digest of a record's id, as numpy gives it back (no zero bytes at the end)."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest().rstrip(b"\0")


def write_identities(path: Path, rows: Sequence[tuple[bytes, int, int, int]]) -> None:
    """Write the ids of a unit; no file where there are none."""
    path.unlink(missing_ok=True)
    if rows:
        path.parent.mkdir(exist_ok=True)
        with replacement(path) as stream:
            np.save(stream, np.sort(np.array(rows, dtype=IDENTITY_DTYPE), order="digest"), allow_pickle=False)


def repeated(paths: dict[int, Path], at_once: int = _AT_ONCE) -> Iterator[Repeated]:
    """The ids of the units in `paths` that an earlier unit holds, in the order of their digests."""
    steps = max(1, sum(len(_table(path)) for path in paths.values()) // at_once) if paths else 0
    stops = dict.fromkeys(paths, 0)
    for step in range(1, steps + 1):
        # digests below it by their first 8 bytes; the last step takes all that is left
        limit = ((step << 64) // steps).to_bytes(9, "big")[1:] if step < steps else None
        tables, owners = [], []
        for unit, path in paths.items():
            table = _table(path)
            stop = len(table) if limit is None else int(np.searchsorted(table["digest"], limit))
            tables.append(np.array(table[stops[unit] : stop]))
            owners.append(np.full(stop - stops[unit], unit))
            stops[unit] = stop
        yield from _repeated_in(np.concatenate(tables), np.concatenate(owners))


def _repeated_in(table: np.ndarray, owner: np.ndarray) -> Iterator[Repeated]:
    order = np.argsort(table["digest"], kind="stable")  # equal digests stay in the order of the units
    keys = table["digest"][order]
    for i in (np.flatnonzero(keys[1:] == keys[:-1]) + 1).tolist():
        first = int(np.searchsorted(keys, keys[i]))
        yield Repeated(int(owner[order[i]]), table[order[i]], table[order[first]])


def _table(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)
