"""Whether the tables of a shard agree with each other, with its bins and with the manifest.

Key property: most columns follow from others, so a check is a column and the values that the others allow. It is done
once, when a dataset is opened: hashes tell damage, and this tells a faulty builder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from megacp.core.data.indexed import IndexedReader, token_dtype
from megacp.core.data.manifest import DatasetManifest, ShardEntry
from megacp.core.data.tables import padded_lengths

_MOST = np.iinfo(np.int32).max
_Values = np.ndarray | int


class ShardContent(Protocol):
    """The readers and tables of one shard; a table that it does not have is empty, a reader or checksums None."""

    tokens: IndexedReader
    weights: IndexedReader | None
    images: IndexedReader | None
    packs: np.ndarray
    segments: np.ndarray
    branches: np.ndarray
    units: np.ndarray
    boundaries: dict[int, np.ndarray]
    checksums: np.ndarray | None
    image_checksums: np.ndarray | None


def contradictions(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> list[str]:
    """What is wrong between the tables; a part is looked at when those that it refers to are right."""
    for part in (_count_reasons, _text_reasons, _branch_reasons, _image_reasons, _unit_reasons):
        if reasons := list(part(shard, entry, manifest)):
            return reasons
    return []


def _outside(name: str, table: np.ndarray, **allowed: _Values | tuple[_Values, _Values]) -> Iterator[str]:
    """One sentence for each column that has other values than it may: one or (least, largest), for all rows or each."""
    for column, values in allowed.items():
        least, largest = values if isinstance(values, tuple) else (values, values)
        low, high = np.broadcast_to(least, len(table)), np.broadcast_to(largest, len(table))
        bad = (table[column] < low) | (table[column] > high)
        if bad.any():
            row = int(bad.argmax())
            must = f"{low[row]}" if low[row] == high[row] else f"{low[row]} to {high[row]}"
            yield f"{name}.npy: row {row}: {column} is {table[column][row]}, it must be {must}"


def _count_reasons(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> Iterator[str]:
    """Numbers of rows, and types of values."""
    tokens, dtype = shard.tokens, token_dtype(manifest.num_token_ids)
    items = 0 if shard.images is None else len(shard.images)
    for name, table, rows, what in (
        ("packs.npy", shard.packs, entry.num_packs, "packs of the manifest"),
        ("tokens.idx", tokens.boundaries[1:], entry.num_packs, "packs of the manifest"),
        ("segments.npy", shard.segments, entry.num_segments, "segments of the manifest"),
        ("tokens.idx", tokens.lengths, entry.num_segments, "segments of the manifest"),
        ("tokens.idx", tokens.lengths, int(tokens.boundaries[-1]), "segments of packs"),
        ("branches.npy", shard.branches, int(shard.segments["num_branches"].sum()), "branches of segments"),
        ("units.npy", shard.units, int(shard.packs["num_units"].sum()), "units of packs"),
        ("checksums.npy", shard.checksums, entry.num_packs, "packs"),
        ("image_checksums.npy", shard.image_checksums, items, "images and videos"),
    ):
        if table is not None and len(table) != rows:
            yield f"{name} has {len(table)} rows for {rows} {what}"
    if tokens.dtype != dtype:
        yield f"tokens.idx has dtype {tokens.dtype}, a vocabulary of this size has {dtype}"
    if shard.weights is not None:
        same = np.array_equal(shard.weights.lengths, tokens.lengths)
        if not same or shard.weights.dtype != np.dtype("<f4"):
            yield f"weights.idx ({shard.weights.dtype}) does not have the lengths of tokens.idx, float32"


def _text_reasons(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> Iterator[str]:
    """Packs [p] and segments [s], by the boundaries [p + 1] and lengths [s] of the token index."""
    bounds, lengths = shard.tokens.boundaries, shard.tokens.lengths.astype(np.int64)
    padded = padded_lengths(lengths, manifest.pad_multiple)
    totals = np.diff(np.concatenate(([0], np.cumsum(padded)))[bounds])  # [p]
    counts, units = np.diff(bounds), shard.packs["num_units"]
    before = np.cumsum(units, dtype=np.int64) - units  # [p]: units of earlier packs
    yield from _outside(
        "packs",
        shard.packs,
        first_segment=bounds[:-1],
        num_segments=(np.maximum(counts, 1), counts),
        num_tokens=(totals, np.minimum(totals, manifest.seq_length)),
        num_units=(0, _MOST),
        first_unit=(np.where(units > 0, before, 0), np.where(units > 0, before, _MOST)),
    )
    number = shard.segments["num_branches"]
    yield from _outside(
        "segments",
        shard.segments,
        true_length=(np.maximum(lengths, 1), lengths),
        padded_length=padded,
        source_file=(0, len(manifest.sources) - 1),
        num_branches=(0, _MOST),
        prefix_length=(np.where(number == 0, lengths, 1), lengths),
    )
    sums = int(lengths.sum()), int(padded.sum())
    if sums != (entry.num_tokens, entry.num_padded_tokens):
        stated = f"{entry.num_tokens} and {entry.num_padded_tokens}"
        yield f"{sums[0]} true and {sums[1]} padded tokens, the manifest says {stated}"


def _branch_reasons(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> Iterator[str]:
    """Branches [b] of a segment follow its prefix and each other without gaps, and end where it ends."""
    if not len(shard.branches):
        return
    segments = shard.segments[shard.segments["num_branches"] > 0]
    number, start = segments["num_branches"], shard.branches["start"].astype(np.int64)
    firsts = np.cumsum(number, dtype=np.int64) - number  # rows of branches.npy
    stop = np.append(start[1:], 0)  # where the next branch begins, or the segment ends
    stop[firsts + number - 1] = segments["true_length"]
    yield from _outside("segments", segments, first_branch=firsts, prefix_length=start[firsts])
    yield from _outside("branches", shard.branches, length=(np.maximum(stop - start, 1), stop - start))


def _image_reasons(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> Iterator[str]:
    """Units need an image token, stored images, and a boundary table for each planned degree."""
    if not len(shard.units):
        return
    for degree, table in shard.boundaries.items():
        if len(table) != entry.num_packs:
            yield f"shards_cp{degree}.npy has {len(table)} rows for {entry.num_packs} packs"
    if manifest.image_rules is None or "image_patch" not in manifest.image_rules.get("token_ids", {}):
        yield "units.npy holds images, but the manifest's image_rules name no image_patch token"
    if shard.images is None or shard.images.dtype != np.uint8:
        yield "units.npy holds images, but there is no images.bin of bytes"


def _unit_reasons(shard: ShardContent, entry: ShardEntry, manifest: DatasetManifest) -> Iterator[str]:
    """Units [u] lie in the segments of their pack [p], and their running counts rise within it."""
    packs, units = shard.packs, shard.units
    owner = np.repeat(np.arange(len(packs)), packs["num_units"])  # [u]: pack of each unit
    first = packs["first_segment"][owner]
    if wrong := list(_outside("units", units, segment=(first, first + packs["num_segments"][owner] - 1))):
        yield from wrong
        return
    segments, is_first = shard.segments[units["segment"]], np.diff(owner, prepend=-1) > 0
    crops, pooled = (
        np.where(is_first, 0, np.append(0, units[name])[: len(units)]) + 1 for name in ("image_stop", "pooled_stop")
    )
    yield from _outside(
        "units",
        units,
        item=(0, len(shard.images or ()) - 1),
        num_tokens=(1, segments["true_length"]),
        start=(0, segments["true_length"] - units["num_tokens"]),
        image_stop=(crops, _MOST),
        pooled_stop=(pooled, _MOST),
        frame=(-1, _MOST),
        branch=(0, segments["num_branches"]),
    )
    has_units = packs["num_units"] > 0
    total = np.zeros(len(packs), np.int64)  # [p]: crops up to the last unit
    total[has_units] = units["image_stop"][np.cumsum(packs["num_units"][has_units], dtype=np.int64) - 1]
    yield from _outside("packs", packs, num_crops=total)
