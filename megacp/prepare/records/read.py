"""Cuts the input files into units of work, and reads the records of any supported file.

A unit depends only on the files and `unit_bytes`, never on who reads it. A plain JSONL file is cut
into byte ranges, and a line belongs to the range in which it begins. A JSON array is cut between
elements, and so are objects over many lines, one after another, as jq prints them. A compressed
file or a container is one extent. A bad record becomes a `Refusal` with its file and line, and
reading continues after it.
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

from megacp.prepare.records.record import (
    DEFAULT_MAX_RECORD_BYTES,
    Record,
    RecordError,
    Refusal,
    decode_json,
    json_fault,
    of_text,
)
from megacp.prepare.records.tables import arrow_module, read_parquet, read_tar
from megacp.prepare.records.turns import are_messages
from megacp.storage.files import open_regular
from megacp.storage.place import open_input, place_of, size_of, suffix_of
from megacp.storage.url import Url, is_url

_BLOCK = 1 << 20
_FORMS = ".jsonl, .json (lines, or one array), both also as .gz or .zst, .parquet, .tar"
_READ_SUFFIXES = (".parquet", ".jsonl", ".json", ".gz", ".zst", ".tar")
_PANDAS = "python -c \"import pandas; pandas.{read}('{path}').to_json('{stem}.jsonl', orient='records', lines=True)\""
_DATASETS = (
    "python -c \"import datasets; datasets.{read}('{path}'){part}.to_parquet('{stem}.parquet')\""
)
_CONVERSIONS = {
    ".csv": _PANDAS.replace("{read}", "read_csv"),
    ".tsv": _PANDAS.replace("{read}", "read_table"),
    ".xlsx": _PANDAS.replace("{read}", "read_excel"),
    ".xls": _PANDAS.replace("{read}", "read_excel"),
    ".arrow": _DATASETS.replace("{read}", "Dataset.from_file").replace("{part}", ""),
    ".feather": _PANDAS.replace("{read}", "read_feather"),
    ".txt": "jq -Rc '{{text: .}}' {path} > {stem}.jsonl makes a record of each line",
    ".zip": "unzip {path}",
    ".bz2": "bunzip2 -k {path}",
    ".xz": "unxz -k {path}",
    ".7z": "7z x {path}",
    ".tgz": "gunzip -c {path} > {stem}.tar",
    ".tar.gz": "gunzip -c {path} > {stem}.tar",
    ".tar.zst": "unzstd {path}",
}
"""What people have and what is not read, by suffix, and the command that makes of it what is."""


class _Layout(NamedTuple):
    """Where the values of a file of JSON stand that is not one record a line."""

    name: str
    opening: str
    """What stands before the first value."""
    between: str
    """What stands between two."""
    before: re.Pattern[str]
    """All before a value, with its mark as a group."""
    empty: re.Pattern[str]
    """The whole file, where it holds no value."""
    end: re.Pattern[str]
    """All after the last value."""


_ARRAY = _Layout(
    "array",
    "[",
    ",",
    re.compile(r"\s*([\[,]?)\s*"),
    re.compile(r"\s*\[\s*\]\s*"),
    re.compile(r"\s*\]\s*"),
)
_STREAM = _Layout("JSON", "", "", re.compile(r"\s*()"), re.compile(r"\s*"), re.compile(r"\s*"))
"""One object after another, each over as many lines as it likes."""
SAMPLED_BYTES = 1 << 16
"""Bytes of the edges of a file, by which a changed one is recognised."""
_CONTAINERS: dict[str, Callable[[str, int, bool], Iterator[Record | Refusal]]] = {
    ".parquet": lambda path, max_record_bytes, media: read_parquet(path, max_record_bytes),
    ".tar": read_tar,
}


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
    """A byte range of one input file: the lines that begin in [start, stop); all of it when it
    cannot be cut.
    """

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

    def __str__(self) -> str:
        parts = [
            f"{extent.path} (bytes {extent.start} to {extent.stop})" for extent in self.extents
        ]
        return f"unit {self.index}: {', '.join(parts)}"


def plan_units(paths: Sequence[str], unit_bytes: int) -> list[Unit]:
    """Cut input files into units of about `unit_bytes`: large plain files into ranges, small files
    grouped in order.
    """
    extents = []
    for source, path in enumerate(paths):
        size = size_of(place_of(path))
        count = -(-size // unit_bytes) if is_plain(path) else 1
        cuts = [size * i // count for i in range(count + 1)] if count else [0]
        if count > 1 and _layout(path) is not None:  # only reading tells where a value begins
            begins = (
                item.offset
                for item in read_extent(Extent(source, path, 0, size))
                if isinstance(item, Record)
            )
            inner = [next((begin for begin in begins if begin >= cut), size) for cut in cuts[1:-1]]
            cuts = sorted({0, *inner, size})
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


def is_plain(path: str) -> bool:
    """Whether a file is uncompressed JSON, which byte ranges can cut and where an offset gives the
    line.
    """
    return suffix_of(path) not in (*_COMPRESSED, *_CONTAINERS)


def _opened(path: str) -> Any:
    return _COMPRESSED.get(suffix_of(path), open_input)(path)


def _layout(path: str) -> _Layout | None:
    """Return how the values of a file of JSON stand in it, as its beginning tells; None: a record
    each line.
    """
    try:
        with _opened(path) as stream:
            data = stream.read(SAMPLED_BYTES)
    except (EOFError, OSError, zlib.error):  # reported where its lines are read
        return None
    head = data.removeprefix(codecs.BOM_UTF8).decode(errors="ignore").lstrip()
    if head.startswith("["):
        return None if _is_line_of_messages(head) else _ARRAY
    first, newline, _ = head.partition("\n")
    if not (head.startswith("{") and newline):
        return None
    try:
        json.loads(first)
    except ValueError:
        if first.strip() == "{":  # no record begins so that ends in its line
            return _STREAM
        _, lines = _first_value(head, 0)
        return _STREAM if lines else None
    return None


def _is_line_of_messages(head: str) -> bool:
    """Whether a text that begins with a list has the list's first element in its first line, and
    that is a message.
    """
    value, lines = _first_value(head, 1)
    return lines == 0 and are_messages([value])


def _first_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value of JSON from a place on and the newlines before its end; (None, 0) where
    none is whole.
    """
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, 0
    return value, text.count("\n", 0, end)


def input_problem(path: str) -> str | None:
    """Why an input file cannot be read, as far as opening it tells; None when it can."""
    try:
        if Url(path).is_dir() if is_url(path) else os.path.isdir(path):
            return _folder_problem(path)
        if is_url(path):
            Url(path).size()
        else:
            open_regular(path).close()
        if (suffix := _unread_suffix(path)) is not None:
            name = path.rpartition("/")[2] if is_url(path) else path
            way = _CONVERSIONS[suffix].format(path=name, stem=name[: -len(suffix)])
            return f"{path} is no form of records; read are {_FORMS}. To convert it: {way}"
    except FileNotFoundError:
        return f"no such file: {path}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    except ValueError as error:  # a pipe could be read once, and units are read by several workers
        return str(error)
    return None


def _unread_suffix(path: str) -> str | None:
    """Return the suffix of a path that is one of _CONVERSIONS, the longest; None for any other."""
    found = [suffix for suffix in _CONVERSIONS if path.lower().endswith(suffix)]
    return max(found, key=len, default=None)


def _folder_problem(path: str) -> str:
    """Return what to give in place of a folder."""
    what = f"{path} is a directory; give the files in it, as {path}/*.jsonl"
    if is_url(path):
        return what
    folder = Path(path)
    stem = path.rstrip("/")
    for name, part in (
        ("dataset_dict.json", "['train']"),
        ("state.json", ""),
    ):  # of datasets' save_to_disk
        if (folder / name).is_file():
            way = _DATASETS.format(read="load_from_disk", path=path, part=part, stem=stem)
            return (
                f"{path} is a directory that `save_to_disk` of datasets wrote. To convert it: {way}"
            )
    for pattern in ("*", "*/*"):  # a repository of the hub has its files in data/
        suffixes = {file.suffix for file in folder.glob(pattern) if file.suffix in _READ_SUFFIXES}
        for suffix in _READ_SUFFIXES:
            if suffix in suffixes:
                return f"{path} is a directory; give the files in it, as '{stem}/{pattern}{suffix}'"
    return f"{path} is a directory without a file that is read ({_FORMS})"


def identity(path: str) -> list[Any]:
    """Name, size, and what differs once the content does: what its store says of it, or a hash of
    both its edges.
    """
    place = place_of(path)
    size = size_of(place)
    if isinstance(place, Url) and (version := place.version()):
        return [path, size, version]
    with open_input(path) as stream:
        data = stream.read(SAMPLED_BYTES)
        stream.seek(max(0, size - SAMPLED_BYTES))
        data += stream.read()
    return [path, size, hashlib.sha256(data).hexdigest()]


# ---- records


def read_extent(
    extent: Extent, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES, media: bool = False
) -> Iterator[Record | Refusal]:
    """The records of one extent of any supported file, in order, each bad one as a Refusal.

    `media`: whether records of a tar may have images and videos beside them. `line` counts from the
    line in which the extent begins, and `number` from its first record; `LinesBefore` and
    `records_before` have those before it. A file that is cut short or damaged gives a last Refusal.
    """
    suffix = suffix_of(extent.path)
    if (container := _CONTAINERS.get(suffix)) is not None:
        yield from container(extent.path, max_record_bytes, media)
        return
    with _opened(extent.path) as stream:
        stop = None if suffix in _COMPRESSED else extent.stop
        layout = _layout(extent.path)
        if layout is not None:
            stream.seek(extent.start)
            yield from _read_values(layout, extent, stream, stop, max_record_bytes)
        else:
            yield from _read_lines(extent.path, stream, extent.start, stop, max_record_bytes)


class LinesBefore:
    """How many lines of a plain file end before an extent. Extents in order cost one pass over what
    is before them.
    """

    def __init__(self) -> None:
        self._path, self._offset, self._lines = "", 0, 0

    def __call__(self, extent: Extent) -> int:
        if extent.path != self._path or extent.start < self._offset:
            self._path, self._offset, self._lines = extent.path, 0, 0
        with open_input(extent.path) as stream:
            stream.seek(self._offset)
            while block := stream.read(min(_BLOCK, extent.start - self._offset)):
                self._lines += block.count(b"\n")
                self._offset += len(block)
        return self._lines


def records_before(extent: Extent) -> int:
    """Count the records of a file before an extent that begins with one; it reads all of them."""
    if not extent.start:
        return 0
    return sum(1 for _ in read_extent(Extent(extent.source, extent.path, 0, extent.start)))


def _read_lines(
    path: str, stream: IO[bytes], offset: int, stop: int | None, max_record_bytes: int
) -> Iterator[Record | Refusal]:
    """Records from byte `offset` on; `stop`: of a plain file."""
    line = 0
    if offset:  # the line that runs into the range belongs to the range before it
        stream.seek(offset - 1)
        size = _skip_line(stream) - 1
        line, offset = int(size > 0), offset + size

    while stop is None or offset < stop:
        line += 1
        try:
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
                f"the compressed file is damaged or cut short from here on ({error})",
            )
            return
        if not size:
            return
        if len(content) > max_record_bytes:
            yield Refusal(
                path,
                line,
                offset,
                f"a line of {size} bytes, more than --max-record-bytes {max_record_bytes}",
            )
        else:
            try:
                content = content.removeprefix(b"\xef\xbb\xbf") if offset == 0 else content
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
    """The values of a file of JSON that begin in an extent, with only the current one and a block
    in memory.

    They are those of JSONL's reader. After a value that is no JSON nothing can be read.
    """
    path, decode = extent.path, json.JSONDecoder().raw_decode
    offset = extent.start or len(codecs.BOM_UTF8) * (stream.peek(3)[:3] == codecs.BOM_UTF8)
    text, at, line, number = "", 0, 1, 1  # text[at:] is not read yet, from `offset` and `line`
    mark = "" if extent.start else layout.opening  # a later extent begins with a value
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
                except (ValueError, RecursionError) as error:  # or more of it is not in memory yet
                    fits = len(text) - at <= max_record_bytes
                    if fits and (block := source.read(max(_BLOCK, len(text) - at))):
                        text, at = text[at:] + block, 0
                        continue
                    line, offset = line + text.count("\n", at, begin), offset + begin - at
                    limit = (
                        ""
                        if fits
                        else f", or a record has more than --max-record-bytes {max_record_bytes}"
                    )
                    fault = (
                        json_fault(error)
                        if isinstance(error, ValueError)
                        else "it is nested too deeply"
                    )
                    if end is None:
                        reason = f"the {layout.name} cannot be read on: {fault}{limit}"
                        yield Refusal(path, line, offset, reason, number)
                    return
                line, offset = line + text.count("\n", at, begin), offset + begin - at
                if stop is not None and offset >= stop:
                    return
                element = text[begin:until]
                size, at, mark, is_first = len(element.encode()), until, layout.between, False
                try:
                    if size > max_record_bytes:
                        raise RecordError(
                            f"a record of {size} bytes, above --max-record-bytes {max_record_bytes}"
                        )
                    yield Record(line, offset, size, of_text(value, element), number=number)
                except RecordError as error:
                    yield Refusal(path, line, offset, str(error), number)
                line, offset, number = line + element.count("\n"), offset + size, number + 1
        except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            yield Refusal(
                path,
                line,
                offset,
                f"the file is damaged or cut short from here on ({error})",
                number,
            )


def _skip_line(stream: IO[bytes]) -> int:
    """Read to the end of the line without keeping it; returns the number of bytes."""
    size = 0
    while block := stream.readline(_BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size
