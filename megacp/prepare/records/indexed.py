"""Read the documents of a tokenized Megatron dataset as records.

Megatron's `tools/preprocess_data.py` writes two files: `x_text_document.bin` with all token ids,
and `x_text_document.idx` with the lengths of its sequences and the boundaries of its documents
(`IndexedReader` describes the format). A document is a range of sequences. The .idx represents
both files as an input, and byte positions count in the .bin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacp.prepare.records.record import Record, Refusal
from megacp.storage.place import place_of, size_of, suffix_of
from megacp.storage.url import Url, is_url
from megacp.training.data.reader import StoredObject
from megacp.training.data.tables import (
    DTYPE_OF_CODE,
    HEADER,
    MAGIC,
    VERSION,
    IndexedReader,
    StoredFile,
)

INDEX_SUFFIX = ".idx"
_DATA_SUFFIX = ".bin"
_OPEN_DATASETS = 4
"""Datasets that a process keeps open: reading an index takes longer than reading a unit."""


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Value of a record that another program has tokenized."""

    ids: np.ndarray
    """int64 [n], n >= 1."""

    def __repr__(self) -> str:
        # numpy would shorten a long array, but --valid-share hashes the whole content
        return f"TokenIds({self.ids.tolist()})"


# ---- the two files


def input_of(path: str) -> str:
    """Return the .idx for the .bin or the common prefix of a dataset, and other paths unchanged."""
    if path.endswith(_DATA_SUFFIX):
        return path.removesuffix(_DATA_SUFFIX) + INDEX_SUFFIX
    if not is_url(path) and not Path(path).exists():
        for suffix in (INDEX_SUFFIX, _DATA_SUFFIX):
            if Path(path + suffix).is_file():
                return path + INDEX_SUFFIX
    return path


def is_index(path: str) -> bool:
    """Return whether an input is the index of a tokenized dataset."""
    return suffix_of(path) == INDEX_SUFFIX


def data_of(path: str) -> str:
    """Return the path of the .bin for an .idx."""
    return path.removesuffix(INDEX_SUFFIX) + _DATA_SUFFIX


def index_problem(path: str) -> str | None:
    """Return why a tokenized dataset cannot be read; None if it can."""
    try:
        _reader_of(path)
    except ValueError as error:
        return str(error)
    return None


def _reader_of(path: str) -> IndexedReader:
    """Return the reader of a dataset. Raise ValueError, naming the file, if it cannot be read."""
    # report a missing partner before anything is read
    names = (path, data_of(path))
    missing = [name for name in names if not _exists(name)]
    if missing:
        reason = f"no such file: {missing[0]}"
        if len(missing) == 1:
            reason += (
                "; a tokenized Megatron dataset has two files with the same name, one .idx and one "
                ".bin: copy both into the same folder"
            )
        raise ValueError(reason)
    # a file that has changed since the last build in this process must be opened again
    return _opened(path, tuple(_version(name) for name in names))


def _exists(path: str) -> bool:
    """Return whether a path or URL exists."""
    return place_of(path).exists()


def _version(path: str) -> tuple[int, int]:
    """Return the size of a file, and the time of its last change if it is local."""
    place = place_of(path)
    changed = 0 if isinstance(place, Url) else place.stat().st_mtime_ns
    return size_of(place), changed


@functools.lru_cache(_OPEN_DATASETS)
def _opened(path: str, versions: tuple[tuple[int, int], ...]) -> IndexedReader:
    """Open both files of a dataset, of known `versions`.

    Raise ValueError, naming the file, if one of them is damaged or not supported.
    """
    # the header first: its errors are clearer than an error of a table
    sizes = [size for size, _ in versions]
    index, data = map(_stored, (path, data_of(path)), sizes)
    _check_header(index)
    try:
        reader = IndexedReader(index, data)
    except ValueError as error:
        raise ValueError(
            f"{error}. One of the two files is truncated or belongs to another dataset: copy both "
            "again"
        ) from error

    # the format also has datasets that are not texts
    if reader.dtype.kind not in "iu":
        raise ValueError(f"{path}: its values are {reader.dtype.name}, but token ids are integers")
    if reader.modes.any():
        raise ValueError(
            f"{path}: {np.count_nonzero(reader.modes)} of its sequences are not text (multimodal "
            "dataset of Megatron); build from the original records instead"
        )
    # documents must cover all sequences, or some tokens would be lost
    bounds = reader.boundaries
    is_whole = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(reader)
    if not is_whole or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{path}: its {len(bounds)} document boundaries do not divide its {len(reader)} "
            "sequences: the first must be 0, the last the number of sequences, and none may "
            "decrease. Write the index again (IndexedDatasetBuilder.end_document ends a document)"
        )
    # one document of such a file is a whole pack, whose documents must not see each other
    if not is_url(path) and (Path(path).parent / "packs.npy").exists():
        folder = Path(path).parent.parent
        raise ValueError(
            f"{path} is a part of the finished dataset {folder}: train with --data-path {folder}"
        )
    return reader


def _stored(path: str, size: int) -> StoredFile:
    """Open a file of `size` bytes for reading by offset."""
    return StoredObject(Url(path), size) if is_url(path) else StoredFile(path)


def _check_header(index: StoredFile) -> None:
    """Raise ValueError unless a file begins with the header of a supported index."""
    found = index.read(0, min(index.size, HEADER.size))
    if not found.startswith(MAGIC):
        raise ValueError(
            f"{index.path} begins with {found[: len(MAGIC)]!r}, but an index of Megatron-Core's "
            f"IndexedDataset begins with {MAGIC!r}: other formats of .idx are not supported. Build "
            "from the original texts, or write the dataset again with Megatron's "
            "tools/preprocess_data.py"
        )
    if len(found) < HEADER.size:
        raise ValueError(
            f"{index.path} has {index.size} bytes, but its header has {HEADER.size}: the file is "
            "truncated, copy it again"
        )
    _, version, code, _, _ = HEADER.unpack(found)
    if version != VERSION or code not in DTYPE_OF_CODE:
        raise ValueError(
            f"{index.path} has version {version} and type code {code}; supported are version "
            f"{VERSION} and the codes {min(DTYPE_OF_CODE)} to {max(DTYPE_OF_CODE)}"
        )


# ---- documents


def count_empty(path: str) -> int:
    """Return the number of documents without tokens, which a build leaves out."""
    reader = _reader_of(path)
    sizes = np.diff(reader.document_starts(), append=reader.bin.size)  # [documents]
    return int((sizes == 0).sum())


def read_indexed(
    path: str, start: int, stop: int, max_record_bytes: int
) -> Iterator[Record | Refusal]:
    """Yield the documents of a dataset that begin in the bytes [start, stop) of its .bin.

    `line` is the 1-based number of the document in the file, `offset` the 0-based number, and
    `size` the bytes of its tokens. Documents without tokens are left out.
    """
    reader = _reader_of(path)
    starts = reader.document_starts()  # [documents]
    # documents without tokens share their start with the next one, so both are in one extent
    first, last = np.searchsorted(starts, (start, stop)).tolist()
    for document in range(first, last):
        begin, end = reader.boundaries[document : document + 2].tolist()
        data_bytes = int(reader.lengths[begin:end].sum(dtype=np.int64)) * reader.dtype.itemsize
        if not data_bytes:
            continue
        if data_bytes > max_record_bytes:
            reason = (
                f"the document has {data_bytes} bytes, more than --max-record-bytes "
                f"{max_record_bytes}"
            )
            yield Refusal(path, document + 1, document, reason)
            continue
        ids = np.frombuffer(reader.stored(begin, end), reader.dtype).astype(np.int64)  # [n]
        yield Record(document + 1, document, data_bytes, TokenIds(ids))
