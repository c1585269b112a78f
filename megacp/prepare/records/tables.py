"""Read records from Parquet files and WebDataset tars.

The readers yield the same `Record`s and `Refusal`s as the JSONL reader. In a table, a row is a
record, its columns are the keys, and nulls count as absent. In a tar, consecutive members belong to
one record if their names are equal up to the first dot after the last slash. `.json` is the record,
`.txt` its text, and all other members are images and videos that the record names. A single image
next to a text or caption needs no name.
"""

from __future__ import annotations

import importlib
import itertools
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from megacp.prepare.records.record import Record, RecordError, Refusal, decode_json
from megacp.storage.place import open_input
from megacp.storage.url import UnreachableError, is_url

_ROWS = 16
"""Rows of a table to convert to Python values at a time."""
_TEXTS = ("txt", "text")
_SEEN = {
    "image": ("avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
    "video": ("avi", "mkv", "mov", "mp4", "webm"),
}
_NAMING = ("image", "images", "video", "videos", "branches")
"""Keys by which a record may name its members itself."""
_TAR_BLOCK = 512


# ---- tables


def arrow_module(name: str) -> Any:
    """Return a module of pyarrow, or pyarrow itself for "". Raise ValueError if it is not
    installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{name}" if name else "pyarrow")
    except ImportError as error:
        raise ValueError(
            "reading tables and .zst needs the package pyarrow: pip install -e '.[data]'"
        ) from error


def read_parquet(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Yield the rows of a Parquet file as records.

    `line` is the 1-based row, `offset` the 0-based row, and `size` an estimate of the row's bytes.
    """
    parquet = arrow_module("parquet")
    row = 0
    try:
        with parquet.ParquetFile(open_input(path) if is_url(path) else path) as file:
            columns = arrow_module("").struct(file.schema_arrow)
            for batch in file.iter_batches(batch_size=_ROWS):
                for found in batch.to_pylist():
                    try:
                        value = _value(found, columns)
                    except RecordError as error:
                        yield Refusal(path, row + 1, row, str(error))
                        row += 1
                        continue
                    size = max(1, _size(value))
                    if size > max_record_bytes:
                        reason = (
                            f"the row has {size} bytes, more than --max-record-bytes "
                            f"{max_record_bytes}"
                        )
                        yield Refusal(path, row + 1, row, reason)
                    else:
                        yield Record(row + 1, row, size, value)
                    row += 1
    # a lost connection is not a damaged file, so it must not become a Refusal
    except UnreachableError:
        raise
    except (arrow_module("").ArrowException, OSError, UnicodeDecodeError) as error:
        yield Refusal(
            path,
            row + 1,
            row,
            f"the Parquet file is damaged or truncated ({' '.join(str(error).split())})",
        )


def _value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type without null keys, and with JSON strings decoded.

    A column of the type `Json` of Hugging Face datasets contains JSON strings.
    """
    if isinstance(value, dict):
        # of two columns with the same name the last wins, as in the value
        kinds = {field.name: field.type for field in kind}
        return {key: _value(item, kinds[key]) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_value(item, getattr(kind, "value_type", kind)) for item in value]
    is_json = isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json"
    return decode_json(value.encode()) if is_json else value


def _size(value: Any) -> int:
    """Estimate the bytes of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum([_size(item) for item in value.values()])
    if isinstance(value, list):
        return sum([_size(item) for item in value])
    return 8


# ---- tars


def read_tar(path: str, max_record_bytes: int, media: bool) -> Iterator[Record | Refusal]:
    """Yield the records of a WebDataset tar.

    `line` is the 1-based number of the record, `offset` the byte at which its first member begins.
    Refused are unsafe members, members apart from the rest of their record, images unless `media`,
    records without text, and whatever follows the damage in a truncated archive.
    """
    number = 1
    offset = 0
    found: list[Record | Refusal] = []
    seen: dict[str, tuple[int, set[str]]] = {}  # key -> first offset, names of its members
    try:
        with open_input(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            members = itertools.groupby((member for member in archive if not member.isdir()), _key)
            for number, (key, group) in enumerate(members, start=1):
                # yield each record only after the next: the archive may be truncated within it
                yield from found
                parts = list(group)
                offset = parts[0].offset
                names = {member.name for member in parts}
                before, others = seen.setdefault(key, (offset, set()))
                # The same key again: with new names it is the rest of an earlier record, but if a
                # name is repeated it is a separate record, as in the webdataset library.
                if others.isdisjoint(names) and others:
                    reason = (
                        f"members of record {key!r} are not consecutive (bytes {before} and "
                        f"{offset}); store them next to each other"
                    )
                    found = [Refusal(path, number, offset, reason)]
                else:
                    found = [
                        _tar_record(path, number, key, parts, archive, max_record_bytes, media)
                    ]
                others |= names
            # tarfile accepts an archive that is truncated within a header: it must end with zeros
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAR_BLOCK))
            if size < _TAR_BLOCK or any(file.read()):
                raise OSError("no end-of-archive block")
        yield from found
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the tar is damaged or truncated; nothing after this record can be read ({error})"
        yield Refusal(path, number, offset, reason)


def _key(member: tarfile.TarInfo) -> str:
    """Return the name that the members of a record share: up to the first dot after the last
    slash.
    """
    name = PurePosixPath(member.name)
    return str(name.with_name(name.name.partition(".")[0] or name.name))


def _extension(name: str) -> str:
    """Return the last extension of a member's name in lower case: `a.b.jpg` is a jpg."""
    return PurePosixPath(name).suffix.removeprefix(".").lower()


def _tar_record(
    path: str,
    number: int,
    key: str,
    members: Sequence[tarfile.TarInfo],
    archive: tarfile.TarFile,
    limit: int,
    media: bool,
) -> Record | Refusal:
    """Return the record of some members: JSON and texts by extension, all other members by full
    name.
    """
    texts: dict[str, bytes] = {}  # extension -> content
    others: dict[str, bytes] = {}  # full name -> content
    size = sum(member.size for member in members)
    offset = members[0].offset
    try:
        for member in members:
            extension = _extension(member.name)
            is_text = extension in ("json", *_TEXTS)
            is_double = extension in texts or member.name in others
            _refuse_member(member, key, is_double, is_text or media)
            # checked before reading: the headers state the sizes
            if size > limit:
                raise RecordError(
                    f"its members have {size} bytes, more than --max-record-bytes {limit}"
                )
            content = _content(member, archive)
            if is_text:
                texts[extension] = content
            else:
                others[member.name] = content
        value = _value_of(texts, key)
    except UnicodeDecodeError as error:
        return Refusal(
            path, number, offset, f"record {key!r}: not UTF-8 at byte {error.start + 1} of its text"
        )
    except RecordError as error:
        return Refusal(path, number, offset, str(error))
    _name_image(value, others)
    return Record(number, offset, size, value, others)


def _refuse_member(member: tarfile.TarInfo, key: str, is_double: bool, is_wanted: bool) -> None:
    """Raise RecordError for a member that a record may not have."""
    what = f"member {member.name!r}"
    if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        raise RecordError(f"the path of {what} leads outside the archive")
    if not member.isfile():
        raise RecordError(f"{what} is a link or a device, not a file")
    if is_double:
        raise RecordError(
            f"{what} is not the only .{_extension(member.name)} of record {key!r}; members belong "
            "to one record if their names are equal up to the first dot, as in webdataset"
        )
    if not is_wanted:
        raise RecordError(
            f"{what} is not a text, but this build makes a text dataset; use --image-root or "
            "another image flag to build with images"
        )


def _content(member: tarfile.TarInfo, archive: tarfile.TarFile) -> bytes:
    """Return the bytes of a member. Raise tarfile.ReadError if the archive ends within it."""
    # tarfile returns fewer bytes, without an error, if the archive is truncated
    stream = archive.extractfile(member)
    content = stream.read() if stream else b""
    if len(content) != member.size:
        raise tarfile.ReadError(f"member {member.name!r} has {len(content)} of {member.size} bytes")
    return content


def _value_of(texts: Mapping[str, bytes], key: str) -> Any:
    """Return the JSON of a record, with the text of a separate member. Raise RecordError for two
    texts.
    """
    # a record may consist of a text only
    value: Any = decode_json(texts["json"]) if "json" in texts else {}
    for name in _TEXTS:
        if name not in texts:
            continue
        if not isinstance(value, dict) or "text" in value:
            raise RecordError(f"record {key!r} has its text in both .json and .{name}")
        value["text"] = texts[name].decode()
        # img2dataset writes the caption into both members
        if value.get("caption") == value["text"]:
            del value["caption"]
    return value


def _name_image(value: Any, others: Mapping[str, bytes]) -> None:
    """Add the only image or video to a record with a text, unless the record names it itself."""
    seen = []  # (kind, name) of each image and video
    for name in others:
        for kind, extensions in _SEEN.items():
            if _extension(name) in extensions:
                seen.append((kind, name))
    # of several media, or next to messages, the position would be a guess
    says = isinstance(value, dict) and not {"text", "caption"}.isdisjoint(value)
    if says and len(seen) == 1 and value.keys().isdisjoint(_NAMING):
        ((kind, name),) = seen
        value[kind] = {"member": name}
