"""The ids of records while a build runs: which of them stand in more than one unit.

Every unit leaves a table of digests, 40 bytes an id, so that any executor and any restart find the same pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megacp.core.storage.files import replacement
from megacp.prepare.build.upload import STATE

IDENTITY_DTYPE = np.dtype([("digest", "S16"), ("source", "<i4"), ("offset", "<i8"), ("line", "<i8")])


class Repeated(NamedTuple):
    """An id that an earlier unit holds; rows of IDENTITY_DTYPE."""

    unit: int
    row: np.void
    first: np.void


def identity_file(output: str | Path, unit: int) -> Path:
    """Where the digests of a unit's record ids are kept while the build runs."""
    return Path(output) / STATE / f"{unit:05d}.npy"


def digest(identity: str) -> bytes:
    """A 16-byte digest of a record's id, as numpy gives it back (no zero bytes at the end)."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest().rstrip(b"\0")


def write_identities(path: Path, rows: Sequence[tuple[bytes, int, int, int]]) -> None:
    """Write the ids of a unit; no file where there are none."""
    path.unlink(missing_ok=True)
    if rows:
        path.parent.mkdir(exist_ok=True)
        with replacement(path) as stream:
            np.save(stream, np.array(rows, dtype=IDENTITY_DTYPE), allow_pickle=False)


def repeated(paths: dict[int, Path]) -> Iterator[Repeated]:
    """The ids of the units in `paths` (rising) that an earlier unit holds, in the order of their digests."""
    if not paths:
        return
    tables = [np.load(path, allow_pickle=False) for path in paths.values()]
    table = np.concatenate(tables)
    owner = np.repeat(list(paths), [len(one) for one in tables])
    order = np.argsort(table["digest"], kind="stable")  # equal digests stay in the order of the units
    keys = table["digest"][order]
    for i in (np.flatnonzero(keys[1:] == keys[:-1]) + 1).tolist():
        first = int(np.searchsorted(keys, keys[i]))
        yield Repeated(int(owner[order[i]]), table[order[i]], table[order[first]])
