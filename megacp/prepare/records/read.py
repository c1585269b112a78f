"""Cuts the input files into units of work, and reads the records of any supported file.

Key property: a unit depends on the files and `unit_bytes` alone, never on who reads it. A plain JSONL file is cut into
byte ranges; a compressed file or a container is one extent. Rejected: one reader that feeds all workers, which becomes
the limit, and a split by line count, which reads everything twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megacp.core.storage.place import expanded, place_of, size_of, suffix_of
from megacp.prepare.records.columns import is_saved_dataset, read_arrow, read_parquet, saved_dataset
from megacp.prepare.records.containers import read_tar
from megacp.prepare.records.jsonl import COMPRESSED, read_jsonl
from megacp.prepare.records.record import DEFAULT_MAX_RECORD_BYTES, Record, Refusal

_Item = TypeVar("_Item")
_Prepared = TypeVar("_Prepared")
_CONTAINERS: dict[str, Callable[[str, int, bool], Iterator[Record | Refusal]]] = {
    ".parquet": lambda path, max_record_bytes, media: read_parquet(path, max_record_bytes),
    ".arrow": lambda path, max_record_bytes, media: read_arrow(path, max_record_bytes),
    ".tar": read_tar,
}


@dataclass(frozen=True)
class Extent:
    """A byte range of one input file: the lines that begin in [start, stop); all of it when it cannot be cut."""

    source: int
    """Index into the list of input files."""
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A piece of work: what one worker turns into one shard."""

    index: int
    extents: tuple[Extent, ...]


def plan_units(paths: Sequence[str], unit_bytes: int) -> list[Unit]:
    """Cut input files into units of about `unit_bytes`: large plain files into ranges, small files grouped in order."""
    extents = []
    for source, path in enumerate(paths):
        size = size_of(place_of(path))
        count = -(-size // unit_bytes) if is_plain(path) else 1
        cuts = [size * i // count for i in range(count + 1)] if count else [0]
        extents += [Extent(source, path, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    groups: list[list[Extent]] = []
    filled = 0
    for extent in extents:
        size = extent.stop - extent.start
        if not groups or filled + size > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(extent)
        filled += size
    return [Unit(i, tuple(group)) for i, group in enumerate(groups)]


def input_files(paths: Sequence[str]) -> tuple[str, ...]:
    """The files that --input names: those that fit a pattern, and those of saved datasets for their folders.

    ValueError for one of several splits, and for a pattern that no file fits.
    """
    named = [path for text in paths for path in expanded(text)]
    found = [saved_dataset(path) if is_saved_dataset(path) else (path,) for path in named]
    return tuple(path for files in found for path in files)


def is_plain(path: str) -> bool:
    """Whether a file is uncompressed JSONL, which byte ranges can cut and where an offset gives the line."""
    return suffix_of(path) not in (*COMPRESSED, *_CONTAINERS)


def ahead(
    items: Iterable[_Item], prepare: Callable[[_Item], _Prepared], count: int
) -> Iterator[tuple[_Item, _Prepared]]:
    """Items with what `prepare` makes of them, which it has done for `count` items more."""
    waiting: deque[tuple[_Item, _Prepared]] = deque()
    for item in items:
        waiting.append((item, prepare(item)))
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def read_extent(
    extent: Extent, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES, media: bool = False
) -> Iterator[Record | Refusal]:
    """The records of one extent of any supported file, in order, each bad one as a Refusal.

    `media`: whether records of a tar may have images and videos beside them. A Record's `line` counts from the extent's
    beginning (finding the true one costs a pass over the file); a Refusal's is the true one. A file that is cut short
    or damaged gives a last Refusal.
    """
    reader = _CONTAINERS.get(suffix_of(extent.path))
    if reader is None:
        return read_jsonl(extent.path, extent.start, extent.stop, max_record_bytes)
    return reader(extent.path, max_record_bytes, media)
