"""The fixed-width tables beside the token bins of a shard: packs, segments, and what branches or images add to them.

Key property: every reference between the tables, and from the tables to the bins, is checked when a shard is opened
and all the reasons are reported at once. Little-endian structured `.npy`, allow_pickle=False, 8-byte fields first so
that nothing is misaligned. Rejected: JSON per pack (parsing on the training path) and pickled objects.

A text shard has packs.npy, segments.npy and checksums.npy, by which a flipped bit of a bin is told when its pack is
read. branches.npy exists when a document has branches. A shard with images has images.bin / images.idx (dtype uint8,
one sequence per image or video, the encoded bytes as they came; one Megatron document per pack), units.npy,
image_checksums.npy, and for each planned CP degree P a shards_cp{P}.npy of shape [packs, P].
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
from pathlib import Path

import numpy as np

from megacp.data.packed.indexed import HashedFile
from megacp.data.packed.stored_file import StoredFile

PACK_DTYPE = np.dtype(
    [
        ("first_segment", "<i8"),  # row of segments.npy; the pack has num_segments from there
        ("first_unit", "<i8"),  # row of units.npy; 0 in a text shard
        ("num_segments", "<i4"),
        ("num_units", "<i4"),
        ("num_tokens", "<i4"),  # padded: the sum of padded_length of its segments, at most seq_length
        ("num_crops", "<i4"),  # images (crops) of its units, the second packing budget
    ]
)
SEGMENT_DTYPE = np.dtype(
    [
        ("source_offset", "<i8"),  # byte offset of the record in its uncompressed file, or its ordinal
        ("source_start", "<i8"),  # place of the first token in the whole document; > 0 in later pieces of a split one
        ("first_branch", "<i8"),  # row of branches.npy
        ("source_file", "<i4"),  # index into the manifest's sources
        ("true_length", "<i4"),  # tokens stored in tokens.bin
        ("padded_length", "<i4"),  # places it takes in the pack; the padding itself is not stored
        ("prefix_length", "<i4"),  # tokens before the first branch; true_length without branches
        ("num_branches", "<i4"),
        ("flags", "<u4"),  # FLAG_SPLIT | FLAG_TRUNCATED
    ]
)
BRANCH_DTYPE = np.dtype([("start", "<i4"), ("length", "<i4")])  # of branches 1, 2, ...: tokens within the segment
UNIT_DTYPE = np.dtype(
    [
        ("segment", "<i8"),  # row of segments.npy that holds the unit's tokens
        ("item", "<i8"),  # sequence of images.bin it comes from
        ("start", "<i4"),  # first of its tokens, within the segment
        ("num_tokens", "<i4"),  # tokens it takes, markers included
        ("image_stop", "<i4"),  # cumulative images (crops) of the pack up to and with this unit: cum_image_bounds
        ("pooled_stop", "<i4"),  # cumulative pooled tokens likewise: cum_token_pooling_bounds
        ("frame", "<i4"),  # frame number within a video; -1 for an image
        ("branch", "<i4"),  # branch its tokens lie in; 0 = the shared prefix
    ]
)
CHECKSUM_DTYPE = np.dtype([("tokens", "<u4"), ("weights", "<u4")])  # of each pack; 0 in a shard without weights
ITEM_CHECKSUM_DTYPE = np.dtype([("data", "<u4")])  # of each sequence of images.bin
FLAG_SPLIT = 1
"""Segment flag: a piece of a document cut by `--oversize split`."""
FLAG_TRUNCATED = 2
"""Segment flag: the rest of the document was left out by `--oversize truncate`."""
_LONGEST_HEADER = 10_000
"""Bytes; numpy's own limit."""
_MAGIC = b"\x93NUMPY\x01\x00"
_USUAL_HEADER = re.compile(rb".{10}(\{'descr': [^{}]*, 'shape': \()([0-9, ]{1,40})(\), \} *\n)", re.DOTALL)
"""Magic, format and length; then the header around the numbers of its shape."""


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple of `pad_multiple` >= 1, int64 [n]."""
    if pad_multiple < 1:
        raise ValueError(f"--pad-multiple is {pad_multiple}, it must be at least 1")
    padded: np.ndarray = -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple
    return padded


def write_table(path: str | os.PathLike[str], table: np.ndarray) -> tuple[Path, int, str]:
    """Write an `.npy` and fsync it; returns (path, size, sha256). The same table gives the same bytes."""
    encoded = io.BytesIO()
    np.lib.format.write_array(encoded, table, version=(1, 0), allow_pickle=False)
    file = HashedFile(path)
    file.write(encoded.getvalue())
    return file.path, file.size, file.close()


def read_table(path: str | os.PathLike[str], dtype: np.dtype) -> np.ndarray:
    """`table_of` a file of that name."""
    return table_of(StoredFile(Path(path)), dtype)


def table_of(file: StoredFile, dtype: np.dtype, ndim: int = 1) -> np.ndarray:
    """All of an `.npy` of the given dtype and number of dimensions, read-only; ValueError names a file that is none, or
    whose sha256 is not the stated one.
    """
    shape, start = _read_header(file, dtype)
    if len(shape) != ndim:
        raise ValueError(f"{file.path}: cannot be read as a table: its shape is {shape}, expected {ndim} dimensions")
    return np.frombuffer(file.whole(), dtype, offset=start).reshape(shape)


def _read_header(file: StoredFile, dtype: np.dtype) -> tuple[tuple[int, ...], int]:
    """Shape of the array in an `.npy`, and where its data begins; its size fits them."""
    beginning = file.read(0, min(file.size, _LONGEST_HEADER))
    start = len(_MAGIC) + 2 + int.from_bytes(beginning[len(_MAGIC) : len(_MAGIC) + 2], "little")
    usual = _USUAL_HEADER.fullmatch(beginning, 0, start)
    if usual:
        text, numbers = usual[1] + usual[3], usual[2]
        shape = tuple(int(number) for number in numbers.split(b",") if number.strip())
    else:
        text, shape = beginning[len(_MAGIC) + 2 : start], None
    try:
        if not beginning.startswith(_MAGIC):
            raise ValueError(f"it begins with {beginning[: len(_MAGIC)]!r}, a table with {_MAGIC!r}")
        stated, fortran_order, found = _parsed(text)
    except Exception as error:  # numpy has a Python expression parsed, which fails in its own ways, of many classes
        raise ValueError(f"{file.path}: cannot be read as a table: {type(error).__name__}: {error}") from error
    shape = stated if shape is None else shape
    if found != dtype:
        raise ValueError(f"{file.path}: has columns {found}, expected {dtype}")
    size = start + math.prod(shape) * dtype.itemsize
    if fortran_order or min(shape, default=0) < 0 or size != file.size:
        raise ValueError(f"{file.path}: cannot be read as a table: {file.size} bytes, its shape {shape} takes {size}")
    return shape, start


@functools.lru_cache(maxsize=64)
def _parsed(text: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype by a header's text. Cached, without the shape: numpy takes longer than reading a table."""
    stream = io.BytesIO(len(text).to_bytes(2, "little") + text)
    return np.lib.format.read_array_header_1_0(stream, max_header_size=_LONGEST_HEADER)


def _first(bad: np.ndarray) -> int:
    return int(np.flatnonzero(bad)[0])


def _row_reasons(table: str, checks: dict[str, np.ndarray]) -> list[str]:
    """One sentence for each check, bool [rows], that some row fails (true = bad), with the first such row."""
    return [f"{table}: row {_first(bad)}: {text}" for text, bad in checks.items() if bad.any()]


def pack_reasons(packs: np.ndarray, segments: np.ndarray, boundaries: np.ndarray, seq_length: int) -> list[str]:
    """What is wrong with PACK_DTYPE [p], given the segments and the boundaries [p + 1] of the token index."""
    if len(boundaries) != len(packs) + 1:
        return [f"packs.npy has {len(packs)} packs, tokens.idx {len(boundaries) - 1}"]
    reasons = []
    bad = (packs["first_segment"] != boundaries[:-1]) | (packs["num_segments"] != np.diff(boundaries))
    if bad.any():
        p = _first(bad)
        reasons.append(
            f"packs.npy: pack {p} has {packs['num_segments'][p]} segments from {packs['first_segment'][p]}, "
            f"tokens.idx says {boundaries[p]}..{boundaries[p + 1]}"
        )
    if int(boundaries[-1]) != len(segments):
        return [*reasons, f"tokens.idx ends its documents at sequence {boundaries[-1]} of {len(segments)}"]
    running = np.concatenate(([0], np.cumsum(segments["padded_length"], dtype=np.int64)))
    totals = np.diff(running[boundaries])
    bad = (packs["num_tokens"] != totals) | (totals > seq_length) | (packs["num_segments"] < 1)
    if bad.any():
        p = _first(bad)
        reasons.append(
            f"packs.npy: pack {p} states {packs['num_tokens'][p]} tokens, its {packs['num_segments'][p]} segments "
            f"have {totals[p]}, allowed are 1 to {seq_length}"
        )
    return reasons


def segment_reasons(
    segments: np.ndarray, lengths: np.ndarray, branches: np.ndarray, pad_multiple: int, num_sources: int
) -> list[str]:
    """What is wrong with SEGMENT_DTYPE [s], given the sequence lengths [s] of the token index and BRANCH_DTYPE [b]."""
    if len(segments) != len(lengths):
        return [f"segments.npy has {len(segments)} rows, tokens.idx {len(lengths)} sequences"]
    true, padded, number = segments["true_length"], segments["padded_length"], segments["num_branches"]
    firsts = np.cumsum(number, dtype=np.int64) - number
    checks = {
        "its true length is not that in tokens.idx": true != lengths,
        "it has no token": true < 1,
        f"its padded length is shorter than the true one or not a multiple of {pad_multiple}": (padded < true)
        | (padded % pad_multiple != 0),
        f"its source file is not one of the manifest's {num_sources}": (segments["source_file"] < 0)
        | (segments["source_file"] >= num_sources),
        "its branches are not those that follow in branches.npy": (number < 0)
        | ((number > 0) & (segments["first_branch"] != firsts)),
        "its prefix is not as long as the document minus its branches": (number == 0)
        & (segments["prefix_length"] != true),
    }
    reasons = _row_reasons("segments.npy", checks)
    if not reasons and int(number.sum()) != len(branches):
        reasons.append(f"segments.npy counts {int(number.sum())} branches, branches.npy has {len(branches)}")
    if not reasons and len(branches):
        reasons += _branch_reasons(segments, branches)
    return reasons


def _branch_reasons(segments: np.ndarray, branches: np.ndarray) -> list[str]:
    """Branches of a segment must follow its prefix and each other without gaps, and end where it ends."""
    owner = np.repeat(np.arange(len(segments)), segments["num_branches"])
    stop = branches["start"].astype(np.int64) + branches["length"]
    first = np.concatenate(([True], owner[1:] != owner[:-1]))
    last = np.concatenate((first[1:], [True]))
    begin = np.where(first, segments["prefix_length"][owner], np.concatenate(([0], stop[:-1])))
    bad = (branches["start"] != begin) | (branches["length"] < 1) | (segments["prefix_length"][owner] < 1)
    bad |= last & (stop != segments["true_length"][owner])
    return _row_reasons("branches.npy", {"it leaves a gap or is empty": bad})


def unit_reasons(packs: np.ndarray, segments: np.ndarray, units: np.ndarray) -> list[str]:
    """What is wrong with UNIT_DTYPE [u], given the packs and segments."""
    stops = np.cumsum(packs["num_units"], dtype=np.int64)
    counted = int(stops[-1]) if len(stops) else 0
    if counted != len(units):
        return [f"packs.npy counts {counted} units, units.npy has {len(units)}"]
    strays = (packs["num_units"] > 0) & (packs["first_unit"] != stops - packs["num_units"])
    strays |= packs["num_units"] < 0
    if strays.any():
        return _row_reasons("packs.npy", {"its units are not those that follow in units.npy": strays})
    owner = np.repeat(np.arange(len(packs)), packs["num_units"])
    first = packs["first_segment"][owner]
    outside = (units["segment"] < first) | (units["segment"] >= first + packs["num_segments"][owner])
    if outside.any():
        return _row_reasons("units.npy", {"it lies in a segment of another pack": outside})
    stop = units["start"].astype(np.int64) + units["num_tokens"]
    first_of_pack = np.concatenate(([True], owner[1:] != owner[:-1])) if len(owner) else np.zeros(0, bool)
    last_of_pack = np.concatenate((first_of_pack[1:], [True])) if len(owner) else first_of_pack
    checks = {
        "it lies outside its segment": (units["start"] < 0) | (stop > segments["true_length"][units["segment"]]),
        "its crops do not add up to those of its pack": last_of_pack
        & (units["image_stop"] != packs["num_crops"][owner]),
        "it is of a frame or a branch that cannot be": (units["frame"] < -1)
        | (units["branch"] < 0)
        | (units["branch"] > segments["num_branches"][units["segment"]]),
    }
    for name, what in (("image_stop", "crops"), ("pooled_stop", "pooled tokens")):
        before = np.where(first_of_pack, 0, np.concatenate(([0], units[name][:-1]))[: len(units)])
        checks[f"it has no {what}"] = units[name] <= before
    return _row_reasons("units.npy", checks)
