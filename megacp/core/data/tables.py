"""The fixed-width tables beside the token bins of a shard: packs, segments, and what branches or images add to them.

A table is read in one piece, without a parser: little-endian structured `.npy`, 8-byte fields first so that nothing is
misaligned.

A text shard has packs.npy, segments.npy and checksums.npy, by which a flipped bit of a bin is told when its pack is
read. branches.npy exists when a document has branches.

A shard with images has images.bin / images.idx (uint8, the encoded bytes as they came): one sequence an image or video,
one Megatron document a pack. It also has units.npy, image_checksums.npy, and a shards_cp{P}.npy of shape [packs, P] for
each planned CP degree P.
"""

from __future__ import annotations

import functools

import numpy as np

from megacp.core.data.stored_file import StoredFile

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
_MAGIC = b"\x93NUMPY\x01\x00"
_SHOWN = 300
"""Bytes of a foreign header in an error."""


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple of `pad_multiple` >= 1, int64 [n]."""
    if pad_multiple < 1:
        raise ValueError(f"--pad-multiple is {pad_multiple}, it must be at least 1")
    padded: np.ndarray = -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple
    return padded


def table_of(file: StoredFile, dtype: np.dtype, columns: int | None = None) -> np.ndarray:
    """All of an `.npy` of that dtype, [rows] or [rows, columns], read-only.

    ValueError names a file whose header is another one, or whose sha256 is not the stated one. No header is parsed:
    the only one that a file of this size and dtype can have is compared.
    """
    data = file.whole()
    start = len(_MAGIC) + 2 + int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
    rows, rest = divmod(len(data) - start, dtype.itemsize * (columns or 1))
    shape = (rows,) if columns is None else (rows, columns)
    header = data[len(_MAGIC) + 2 : start]
    expected = f"{{'descr': {_columns(dtype)}, 'fortran_order': False, 'shape': {shape}, }}"
    if rest or rows < 0 or not data.startswith(_MAGIC) or header.rstrip() != expected.encode():
        found = header[:_SHOWN].decode(errors="replace")
        raise ValueError(f"{file.path}: is no table of {dtype.names} with shape {shape}: its header is {found!r}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


@functools.lru_cache
def _columns(dtype: np.dtype) -> str:
    return repr(dtype.descr)
