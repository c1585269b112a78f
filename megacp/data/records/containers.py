"""Reads records from Parquet files and WebDataset tars.

Key property: both give the `Record`s and `Refusal`s that JSONL gives, so nothing behind a reader knows the format.
Rejected: the webdataset package, which pairs members by their order and skips broken archives silently.

WebDataset: members of one record follow each other and share their name up to the first dot of the last component.
`.json` is the record, `.txt` its text; all others are images and videos that the record names. Parquet: a row is a
record, columns are its keys.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from megacp.data.records.record import Record, Refusal
from megacp.data.records.sample import RecordError, decode_json

TEXT_MEMBERS = ("txt", "text")
RECORD_MEMBERS = ("json",)
_TAR_BLOCK = 512
_ROWS, _FEW_ROWS = 16, 4
_RECORDS_OF_A_PAGE, _LARGEST_RATIO = 4, 100
_SMALL_COLUMN = 16 << 20
"""Bytes of a column below which no value in it is large, however often it is repeated."""


def read_parquet(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Rows of a Parquet file as records: `line` is the row from 1, `offset` the row from 0, `size` about its bytes.

    ValueError when pyarrow is missing; a file that cannot be read gives a Refusal.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("reading Parquet needs the package pyarrow: pip install 'megacp[data]'") from error
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if (problem := _swollen(group, max_record_bytes)) is not None:
                    yield Refusal(path, row + 1, row, f"row group {number} of {group.num_rows} rows: {problem}")
                    row += group.num_rows
                    continue
                for value in _values(file, number, max_record_bytes):
                    yield _checked_row(path, row, value, max_record_bytes)
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Refusal(path, row + 1, row, f"the Parquet file is damaged or cut short ({_one_line(error)})")


def _columns(group: Any) -> list[Any]:
    return [group.column(i) for i in range(group.num_columns)]


def _swollen(group: Any, max_record_bytes: int) -> str | None:
    """Why a row group is not decompressed; None when it can be. A page of it is only read whole."""
    for column in _columns(group):
        packed, size = column.total_compressed_size, column.total_uncompressed_size
        if size > _RECORDS_OF_A_PAGE * max_record_bytes and size > _LARGEST_RATIO * packed:
            return (
                f"{packed} bytes of column {column.path_in_schema} decompress to {size}, "
                f"more than {_LARGEST_RATIO} times as many and {_RECORDS_OF_A_PAGE} times --max-record-bytes "
                f"{max_record_bytes}; write it with smaller row groups, or raise the limit"
            )
    return None


def _values(file: Any, number: int, max_record_bytes: int) -> Iterator[Any]:
    """The rows of a row group, for `_checked_row`; a few are read at a time, as all may repeat one long string."""
    largest = max((column.total_uncompressed_size for column in _columns(file.metadata.row_group(number))), default=0)
    rows = _ROWS if largest <= _SMALL_COLUMN else _FEW_ROWS
    for batch in file.iter_batches(batch_size=rows, row_groups=[number]):
        if batch.nbytes <= max_record_bytes:
            yield from batch.to_pylist()
        else:
            yield from (batch.slice(i, 1) for i in range(batch.num_rows))


def _checked_row(path: str, row: int, value: Any, max_record_bytes: int) -> Record | Refusal:
    """One row; `value`: as a dict, or as a table of one row where several together are large."""
    size = 0 if isinstance(value, dict) else value.nbytes
    if size <= max_record_bytes:
        value = value if isinstance(value, dict) else value.to_pylist()[0]
        # a null column is an absent key, and so are nulls inside structs (Parquet fills them in)
        value = {key: item for key, item in value.items() if item is not None}
        size = max(1, _size(value))
    if size > max_record_bytes:
        return Refusal(path, row + 1, row, f"a row of {size} bytes, more than --max-record-bytes {max_record_bytes}")
    return Record(row + 1, row, size, value)


def _size(value: Any) -> int:
    """About the bytes of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum([_size(item) for item in value.values()])
    return sum([_size(item) for item in value]) if isinstance(value, list) else 8


@dataclass
class _Group:
    """Members of one record of a tar."""

    key: str
    offset: int
    size: int = 0
    members: dict[str, bytes | None] = field(default_factory=dict)
    """Content by extension; None for kinds that are not read."""
    media: dict[str, bytes] = field(default_factory=dict)
    """Content of all other kinds by whole name, when it is wanted."""
    problem: str | None = None


def read_tar(path: str, max_record_bytes: int, media: bool) -> Iterator[Record | Refusal]:
    """Records of a WebDataset tar; `line` is the record's number from 1, `offset` where its first member begins.

    Refusals: unsafe or nameless members, members that are no files, images unless `media`, a record without text, a
    cut archive.
    """
    number = 0
    group: _Group | None = None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                name = PurePosixPath(member.name)
                stem, _, extension = name.name.partition(".")
                key = str(name.with_name(stem)) if stem else member.name
                if group is None or group.key != key:
                    if group is not None:
                        number += 1
                        yield _finish(path, number, group)
                    group = _Group(key, member.offset)
                _add(archive, member, extension, group, (max_record_bytes, media))
        whole = _has_end(path)
    except (tarfile.TarError, OSError, EOFError) as error:
        yield Refusal(path, number + 1, group.offset if group else 0, _cut(error))
        return
    if group is not None and whole:
        yield _finish(path, number + 1, group)
    if not whole:
        yield Refusal(path, number + 1, group.offset if group else 0, _cut("no end-of-archive block"))


def _add(
    archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, group: _Group, wanted: tuple[int, bool]
) -> None:
    """Read one member into its group; `wanted`: the most bytes of one, and whether images and videos are."""
    limit, media = wanted
    is_record = extension in (*TEXT_MEMBERS, *RECORD_MEMBERS)
    group.size += member.size
    if not _is_text(member.name):
        group.problem = f"the name of member {member.name!r} is not UTF-8".encode(errors="backslashreplace").decode()
    elif member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        group.problem = f"member {member.name!r} is named outside the archive"
    elif not member.isfile():
        group.problem = f"member {member.name!r} is a link or a device, not a file"
    elif extension in group.members or member.name in group.media:
        group.problem = f"member {member.name!r} occurs twice"
    elif not is_record and not media:
        group.members[extension] = None
    elif group.size > limit:
        group.problem = (
            f"its members up to {member.name!r} have {group.size} bytes, more than --max-record-bytes {limit}"
        )
    else:
        stream = archive.extractfile(member)
        content = stream.read() if stream else b""
        if len(content) != member.size:
            raise tarfile.ReadError(f"member {member.name!r} has {len(content)} of {member.size} bytes")
        if is_record:
            group.members[extension] = content
        else:
            group.media[member.name] = content


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finish(path: str, number: int, group: _Group) -> Record | Refusal:
    try:
        if group.problem:
            raise RecordError(group.problem)
        others = [name for name, content in group.members.items() if content is None]
        if others:
            raise RecordError(
                f"record {group.key!r} has members of kind {', '.join(others)}: this build makes text datasets "
                f"(json, {', '.join(TEXT_MEMBERS)}), images need the vision build"
            )
        value: Any = {}
        for name in RECORD_MEMBERS:
            if (content := group.members.get(name)) is not None:
                value = decode_json(content)
        for name in TEXT_MEMBERS:
            if (content := group.members.get(name)) is not None:
                if not isinstance(value, dict) or "text" in value:
                    raise RecordError(
                        f"record {group.key!r} has its text in both .json and .{name}, or .json is no object"
                    )
                value["text"] = content.decode()
    except UnicodeDecodeError as error:
        return Refusal(
            path, number, group.offset, f"record {group.key!r}: not UTF-8 at byte {error.start + 1} of its text"
        )
    except RecordError as error:
        return Refusal(path, number, group.offset, str(error))
    return Record(number, group.offset, group.size, value, group.media)


def _has_end(path: str) -> bool:
    """Whether the archive ends with a block of zeros; tarfile accepts one that is cut between members."""
    size = os.path.getsize(path)
    if size < _TAR_BLOCK:
        return False
    with open(path, "rb") as stream:
        stream.seek(size - _TAR_BLOCK)
        return not any(stream.read(_TAR_BLOCK))


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _cut(error: object) -> str:
    return f"the tar is damaged or cut short, nothing after this record can be read ({_one_line(error)})"
