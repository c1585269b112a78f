"""Cut input files into units of work and read records from any supported file.

A unit depends only on the files and `unit_bytes`, not on the worker that reads it. A plain JSONL
file is cut into byte ranges; a line belongs to the range in which it begins. JSON arrays and
concatenated multi-line objects (as printed by jq) are cut between values. A compressed file or a
container is a single extent. The documents of a Megatron index are divided like lines. A bad
record becomes a `Refusal` with its file and line, and reading continues after it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from megacp.prepare.records.contents import content_problem, missing_problem
from megacp.prepare.records.indexed import (
    INDEX_SUFFIX,
    data_of,
    index_problem,
    is_index,
    read_indexed,
)
from megacp.prepare.records.plain import read_csv, read_text_file
from megacp.prepare.records.record import (
    DEFAULT_MAX_RECORD_BYTES,
    Record,
    RecordError,
    Refusal,
    decode_json,
    json_fault,
    json_hint,
    of_text,
)
from megacp.prepare.records.tables import arrow_module, read_parquet, read_tar
from megacp.prepare.records.turns import are_messages
from megacp.storage.files import open_regular
from megacp.storage.place import open_input, place_of, size_of, suffix_of
from megacp.storage.url import Url, is_url

_BLOCK = 1 << 20  # bytes (or characters) per read
_FORMS = (
    ".jsonl, .json (lines or one array), each also as .gz or .zst, .parquet, .tar, .csv, .tsv, "
    ".txt, .idx (Megatron)"
)
_TEXTS = (".csv", ".tsv", ".txt")
_READ_SUFFIXES = (".parquet", ".jsonl", ".json", ".gz", ".zst", ".tar", *_TEXTS, INDEX_SUFFIX)
# commands that error messages suggest; `_CONVERSIONS` fills in {read} and {part}
_PANDAS = (
    "python -c \"import pandas; pandas.{read}('{path}').to_json('{stem}.jsonl', "
    "orient='records', lines=True)\""
)
_DATASETS = (
    "python -c \"import datasets; datasets.{read}('{path}'){part}.to_parquet('{stem}.parquet')\""
)
_CONVERSIONS = {
    ".xlsx": _PANDAS.replace("{read}", "read_excel"),
    ".xls": _PANDAS.replace("{read}", "read_excel"),
    ".arrow": _DATASETS.replace("{read}", "Dataset.from_file").replace("{part}", ""),
    ".feather": _PANDAS.replace("{read}", "read_feather"),
    ".zip": "unzip {path}",
    ".bz2": "bunzip2 -k {path}",
    ".xz": "unxz -k {path}",
    ".7z": "7z x {path}",
    ".tgz": "gunzip -c {path} > {stem}.tar",
    ".tar.gz": "gunzip -c {path} > {stem}.tar",
    ".tar.zst": "unzstd {path}",
}
"""Common file types that cannot be read, by suffix, with a command that converts them."""


class _Layout(NamedTuple):
    """Syntax around the values of a JSON file that does not have one record per line."""

    name: str
    opening: str
    """Mark before the first value."""
    between: str
    """Mark between two values."""
    before: re.Pattern[str]
    """Everything before a value; its group is the mark."""
    empty: re.Pattern[str]
    """The whole file if it has no values."""
    end: re.Pattern[str]
    """Everything after the last value."""


_ARRAY = _Layout(
    "array",
    "[",
    ",",
    re.compile(r"\s*([\[,]?)\s*"),
    re.compile(r"\s*\[\s*\]\s*"),
    re.compile(r"\s*\]\s*"),
)
_STREAM = _Layout("JSON", "", "", re.compile(r"\s*()"), re.compile(r"\s*"), re.compile(r"\s*"))
"""Objects one after another, each over any number of lines."""
SAMPLED_BYTES = 1 << 16
"""Bytes read at each end of a file to detect that it has changed."""
_CONTAINERS: dict[str, Callable[[str, int, bool], Iterator[Record | Refusal]]] = {
    ".parquet": lambda path, max_record_bytes, media: read_parquet(path, max_record_bytes),
    ".tar": read_tar,
    ".csv": lambda path, max_record_bytes, media: read_csv(path, max_record_bytes),
    ".tsv": lambda path, max_record_bytes, media: read_csv(path, max_record_bytes),
    ".txt": lambda path, max_record_bytes, media: read_text_file(path, max_record_bytes),
}


# how to open each compressed format for reading; Python has no zstd decoder, so .zst needs pyarrow
_COMPRESSED: dict[str, Callable[[str], Any]] = {
    ".gz": lambda path: gzip.open(open_input(path) if is_url(path) else path, "rb"),
    ".zst": lambda path: io.BufferedReader(
        arrow_module("").CompressedInputStream(
            arrow_module("").PythonFile(open_input(path), mode="r"), "zstd"
        ),
        1 << 16,
    ),
}

# ---- files and units


@dataclass(frozen=True)
class Extent:
    """A byte range of one input file.

    It covers the lines (or JSON values) that begin in [start, stop), or the whole file if the file
    cannot be cut.
    """

    source: int
    """Index into the list of input files."""
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A piece of work: the input that one worker turns into one shard."""

    index: int
    extents: tuple[Extent, ...]

    def __str__(self) -> str:
        ranges = ", ".join(f"{e.path} (bytes {e.start} to {e.stop})" for e in self.extents)
        return f"unit {self.index}: {ranges}"


def plan_units(paths: Sequence[str], unit_bytes: int) -> list[Unit]:
    """Cut input files into units of about `unit_bytes`.

    Large plain files are cut into ranges; consecutive small files share a unit.
    """
    extents = []
    for source, path in enumerate(paths):
        size = data_size(path)
        count = -(-size // unit_bytes) if is_plain(path) or is_index(path) else 1
        cuts = [size * i // count for i in range(count + 1)] if count else [0]
        # Lines can be found from any byte, but the beginnings of JSON values only by parsing the
        # file from its start. Move each inner cut to the first value at or after it.
        if count > 1 and _layout(path) is not None:
            whole = read_extent(Extent(source, path, 0, size))
            begins = (item.offset for item in whole if isinstance(item, Record))
            inner = []
            for cut in cuts[1:-1]:
                # `begins` continues where the previous cut stopped: one pass for all cuts
                inner.append(next((begin for begin in begins if begin >= cut), size))
            cuts = sorted({0, *inner, size})
        extents += [Extent(source, path, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    # group neighbouring extents until a unit is full
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


def is_plain(path: str) -> bool:
    """Return whether a file is uncompressed JSON.

    Such a file can be cut into byte ranges, and the line of a record follows from its offset.
    """
    return suffix_of(path) not in (*_COMPRESSED, *_CONTAINERS, INDEX_SUFFIX)


def data_size(path: str) -> int:
    """Return the bytes of an input that units divide: for a Megatron index, those of its .bin."""
    return size_of(place_of(data_of(path) if is_index(path) else path))


def _opened(path: str) -> Any:
    """Open a file for reading, decompressed."""
    return _COMPRESSED.get(suffix_of(path), open_input)(path)


def _layout(path: str) -> _Layout | None:
    """Return the layout of a JSON file, judged by its beginning; None for one record per line."""
    try:
        with _opened(path) as stream:
            data = stream.read(SAMPLED_BYTES)
    except (EOFError, OSError, zlib.error):  # the reader of its lines reports the damage
        return None
    # the sample may end within a character, so ignore decoding errors
    head = data.removeprefix(codecs.BOM_UTF8).decode(errors="ignore").lstrip()
    if head.startswith("["):
        return None if _is_line_of_messages(head) else _ARRAY
    first, newline, _ = head.partition("\n")
    if not (head.startswith("{") and newline):
        return None
    # a first line that is not JSON by itself may begin an object that spans several lines
    try:
        json.loads(first)
    except ValueError:
        # a bare `{` is never a broken record of JSONL
        if first.strip() == "{":
            return _STREAM
        _, lines = _first_value(head, 0)
        return _STREAM if lines else None
    return None


def _is_line_of_messages(head: str) -> bool:
    """Return whether a text starts with a list of messages on a single line.

    Such a file has one conversation per line. Otherwise the list is an array of records. Only the
    first element is parsed: it must be a message and end on the first line.
    """
    value, lines = _first_value(head, 1)
    return lines == 0 and are_messages([value])


def _first_value(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position and the number of newlines in `text` before its end.

    Return (None, 0) if no complete value is there.
    """
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, 0
    return value, text.count("\n", 0, end)


def input_problem(path: str) -> str | None:
    """Return why an input file cannot be opened or is not supported; None if it can be read."""
    try:
        if is_index(path):
            return index_problem(path)
        is_folder = Url(path).is_dir() if is_url(path) else os.path.isdir(path)
        if is_folder:
            return _folder_problem(path)
        # both raise an error if there is no such file or it is not regular
        if is_url(path):
            Url(path).size()
        else:
            open_regular(path).close()
        # the longest match, such as .tar.gz
        unread = [suffix for suffix in _CONVERSIONS if path.lower().endswith(suffix)]
        suffix = max(unread, key=len, default=None)
        if suffix is not None:
            # commands cannot read a URL: suggest them for a downloaded copy of that name
            name = path.rpartition("/")[2] if is_url(path) else path
            way = _CONVERSIONS[suffix].format(path=name, stem=name[: -len(suffix)])
            return f"{path}: this file type is not supported; use {_FORMS}. To convert it: {way}"
        if not is_url(path):
            return content_problem(path, _FORMS)
    except FileNotFoundError:
        return f"no such file: {path}" if is_url(path) else missing_problem(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    except ValueError as error:  # such as a pipe, which several workers cannot read repeatedly
        return str(error)
    return None


def _folder_problem(path: str) -> str:
    """Return an error message for a folder that suggests its files, if it has readable ones."""
    what = f"{path} is a directory; give the files in it, such as {path}/*.jsonl"
    if is_url(path):
        return what
    folder = Path(path)
    stem = path.rstrip("/")
    # folders that `save_to_disk` of Hugging Face datasets has written
    for name, part in (
        ("dataset_dict.json", "['train']"),
        ("state.json", ""),
    ):
        if (folder / name).is_file():
            way = _DATASETS.format(read="load_from_disk", path=path, part=part, stem=stem)
            return (
                f"{path} is a directory written by `save_to_disk` of datasets. To convert it: {way}"
            )
    # a dataset repository on the Hub keeps its files in data/, one level deeper
    for pattern in ("*", "*/*"):
        suffixes = {file.suffix for file in folder.glob(pattern) if file.suffix in _READ_SUFFIXES}
        for suffix in _READ_SUFFIXES:
            if suffix in suffixes:
                return f"{path} is a directory; give the files in it, as '{stem}/{pattern}{suffix}'"
    return f"{path} is a directory without a supported file ({_FORMS})"


def identity(path: str) -> list[Any]:
    """Return name, size and a value that changes with the content of a file.

    The value is the version that the object store reports, or a hash of both ends of the file. A
    Megatron index is followed by its .bin.
    """
    if is_index(path):
        return [*_identity(path), *_identity(data_of(path))]
    return _identity(path)


def _identity(path: str) -> list[Any]:
    """Return `identity` of a single file."""
    place = place_of(path)
    size = size_of(place)
    if isinstance(place, Url) and (version := place.version()):
        return [path, size, version]
    # hashing the whole file would read it once more; a changed file differs at its ends or in size
    with open_input(path) as stream:
        data = stream.read(SAMPLED_BYTES)
        stream.seek(max(0, size - SAMPLED_BYTES))
        data += stream.read()
    return [path, size, hashlib.sha256(data).hexdigest()]


# ---- records


def read_extent(
    extent: Extent, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES, media: bool = False
) -> Iterator[Record | Refusal]:
    """Yield the records of one extent in order; each bad record is a Refusal.

    `media` keeps the images and videos of tar records. `line` counts from the first line of the
    extent and `number` from its first record; `LinesBefore` and `records_before` count those before
    the extent. A truncated or damaged file ends with a Refusal.
    """
    suffix = suffix_of(extent.path)
    container = _CONTAINERS.get(suffix)
    if container is not None:
        yield from container(extent.path, max_record_bytes, media)
        return
    if is_index(extent.path):
        yield from read_indexed(extent.path, extent.start, extent.stop, max_record_bytes)
        return
    with _opened(extent.path) as stream:
        # a compressed file is one extent, and its size does not say how much text is in it
        stop = None if suffix in _COMPRESSED else extent.stop
        layout = _layout(extent.path)
        if layout is not None:
            stream.seek(extent.start)
            yield from _read_values(layout, extent, stream, stop, max_record_bytes)
        else:
            yield from _read_lines(extent.path, stream, extent.start, stop, max_record_bytes)


class LinesBefore:
    """Count the lines of a plain file that end before an extent.

    Calls with extents in order read the text before them only once.
    """

    def __init__(self) -> None:
        self._path = ""
        self._offset = 0
        self._lines = 0

    def __call__(self, extent: Extent) -> int:
        # the documents of a Megatron index are numbered from its first one
        if is_index(extent.path):
            return 0
        if extent.path != self._path or extent.start < self._offset:
            # another file, or an earlier extent: count from the beginning
            self._path = extent.path
            self._offset = 0
            self._lines = 0
        with open_input(extent.path) as stream:
            stream.seek(self._offset)
            while block := stream.read(min(_BLOCK, extent.start - self._offset)):
                self._lines += block.count(b"\n")
                self._offset += len(block)
        return self._lines


def records_before(extent: Extent) -> int:
    """Count the records of a file before an extent, by reading all of them."""
    if not extent.start:
        return 0
    return sum(1 for _ in read_extent(Extent(extent.source, extent.path, 0, extent.start)))


def _read_lines(
    path: str, stream: IO[bytes], offset: int, stop: int | None, max_record_bytes: int
) -> Iterator[Record | Refusal]:
    """Yield the records of a JSONL file from byte `offset` on; `stop` is None if compressed."""
    line = 0
    if offset:
        # A line that crosses the beginning of the range belongs to the previous range. Starting
        # one byte earlier also finds a line that begins exactly at `offset`.
        stream.seek(offset - 1)
        size = _skip_line(stream) - 1
        line = int(size > 0)
        offset += size

    while stop is None or offset < stop:
        line += 1
        try:
            # two more bytes than allowed, for "\r\n": a longer line is read up to there and skipped
            data = stream.readline(max_record_bytes + 2)
            size = len(data)
            content = data.rstrip(b"\r\n")
            if len(content) > max_record_bytes and not data.endswith(b"\n"):
                size += _skip_line(stream)
        except (EOFError, OSError, zlib.error) as error:
            yield Refusal(
                path,
                line,
                offset,
                f"the compressed file is damaged or truncated at this record ({error})",
            )
            return
        # the end of the file
        if not size:
            return
        if len(content) > max_record_bytes:
            yield Refusal(
                path,
                line,
                offset,
                f"the line has {size} bytes, more than --max-record-bytes {max_record_bytes}",
            )
        else:
            try:
                if offset == 0:  # byte order mark
                    content = content.removeprefix(b"\xef\xbb\xbf")
                if content.strip():
                    yield Record(line, offset, size, decode_json(content))
            except RecordError as error:
                yield Refusal(path, line, offset, str(error))
        offset += size


def _read_values(
    layout: _Layout,
    extent: Extent,
    stream: io.BufferedReader,
    stop: int | None,
    max_record_bytes: int,
) -> Iterator[Record | Refusal]:
    """Yield the values of a JSON file that begin in an extent.

    Only the current value and one block are kept in memory. Nothing after invalid JSON can be read,
    because the beginning of the next value is unknown.
    """
    path = extent.path
    decode = json.JSONDecoder().raw_decode
    offset = extent.start
    if not offset and stream.peek(3)[:3] == codecs.BOM_UTF8:
        offset = len(codecs.BOM_UTF8)
    # text[at:] has been read, but not parsed; it begins at byte `offset` in `line`
    text = ""
    at = 0
    line = 1
    number = 1
    # a later extent begins with a value, without the opening bracket
    mark = "" if extent.start else layout.opening
    is_first = not extent.start
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as source:
        try:
            while True:
                before = layout.before.match(text, at)
                end = (layout.empty if is_first else layout.end).fullmatch(text, at)
                assert before is not None, "it may be empty"
                begin = before.end()
                try:
                    if before[1] != mark or end is not None:
                        raise RecordError(f"expected {mark!r} or the end of the array")
                    value, until = decode(text, begin)
                except (ValueError, RecursionError) as error:
                    # The value may only be incomplete in memory: read at least as much again, so
                    # a long value is parsed a logarithmic number of times.
                    fits = len(text) - at <= max_record_bytes
                    if fits and (block := source.read(max(_BLOCK, len(text) - at))):
                        text = text[at:] + block
                        at = 0
                        continue
                    # the end of the file, invalid JSON, or a record that is too long
                    line += text.count("\n", at, begin)
                    offset += begin - at
                    limit = ""
                    if not fits:
                        limit = f", or a record has more than --max-record-bytes {max_record_bytes}"
                    fault = "it is nested too deeply"
                    if isinstance(error, ValueError):
                        fault = json_fault(error)
                    if isinstance(error, json.JSONDecodeError):
                        # a record may have many lines, so also show where it is wrong
                        rest = text[error.pos : error.pos + 30]
                        place = f"before {rest!r}" if rest else "at the end of the file"
                        fault += f" {place}{json_hint(text, error.pos)}"
                    if end is None:
                        reason = f"the rest of the {layout.name} cannot be read: {fault}{limit}"
                        yield Refusal(path, line, offset, reason, number)
                    return
                line += text.count("\n", at, begin)
                offset += begin - at
                # a value that begins at `stop` belongs to the next extent
                if stop is not None and offset >= stop:
                    return
                element = text[begin:until]
                size = len(element.encode())
                at = until
                mark = layout.between
                is_first = False
                try:
                    if size > max_record_bytes:
                        raise RecordError(
                            f"the record has {size} bytes, more than --max-record-bytes "
                            f"{max_record_bytes}"
                        )
                    yield Record(line, offset, size, of_text(value, element), number=number)
                except RecordError as error:
                    yield Refusal(path, line, offset, str(error), number)
                line += element.count("\n")
                offset += size
                number += 1
        except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            yield Refusal(
                path,
                line,
                offset,
                f"the file is damaged or truncated at this record ({error})",
                number,
            )


def _skip_line(stream: IO[bytes]) -> int:
    """Read to the end of the line without keeping it. Return the number of bytes."""
    size = 0
    while block := stream.readline(_BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size
