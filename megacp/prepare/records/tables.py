"""Reads records from containers: Parquet, WebDataset tars.

They are the `Record`s and `Refusal`s that JSONL gives. In a table a row is a record, columns are
its keys, and what is null is absent. In a tar, members of one record follow each other and share
their name up to the first dot of the last component: `.json` is the record, `.txt` its text, all
others are images and videos that the record names. One beside a text or a caption that names none
belongs to it.
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
"""Rows of a table that become Python values at a time."""
_TEXTS = ("txt", "text")
_SEEN = {
    "image": ("avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
    "video": ("avi", "mkv", "mov", "mp4", "webm"),
}
_NAMING = ("image", "images", "video", "videos", "branches")
"""Keys of a record that may say by themselves where its members stand."""
_TAR_BLOCK = 512


# ---- tables


def arrow_module(name: str) -> Any:
    """A module of pyarrow, or all of it."""
    try:
        return importlib.import_module(f"pyarrow.{name}" if name else "pyarrow")
    except ImportError as error:
        raise ValueError(
            "reading tables and .zst needs the package pyarrow: pip install 'megacp[data]'"
        ) from error


def read_parquet(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Rows of a Parquet file as records: `line` is the row from 1, `offset` the row from 0, `size`
    about its bytes.
    """
    parquet, row = arrow_module("parquet"), 0
    try:
        with parquet.ParquetFile(open_input(path) if is_url(path) else path) as file:
            columns = arrow_module("").struct(file.schema_arrow)
            for found in (
                each for batch in file.iter_batches(batch_size=_ROWS) for each in batch.to_pylist()
            ):
                try:
                    value = _value(found, columns)
                except RecordError as error:
                    yield Refusal(path, row + 1, row, str(error))
                    row += 1
                    continue
                size = max(1, _size(value))
                if size > max_record_bytes:
                    reason = (
                        f"a row of {size} bytes, more than --max-record-bytes {max_record_bytes}"
                    )
                    yield Refusal(path, row + 1, row, reason)
                else:
                    yield Record(row + 1, row, size, value)
                row += 1
    except UnreachableError:
        raise
    except (arrow_module("").ArrowException, OSError, UnicodeDecodeError) as error:
        yield Refusal(
            path,
            row + 1,
            row,
            f"the Parquet file is damaged or cut short ({' '.join(str(error).split())})",
        )


def _value(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, without null keys of objects, and what a text of JSON (`Json` of
    datasets) holds.
    """
    if isinstance(value, dict):
        kinds = {
            field.name: field.type for field in kind
        }  # of two of one name the last, as in the value
        return {key: _value(item, kinds[key]) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_value(item, getattr(kind, "value_type", kind)) for item in value]
    is_json = isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json"
    return decode_json(value.encode()) if is_json else value


def _size(value: Any) -> int:
    """Estimated bytes of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict | list):
        return sum([_size(item) for item in (value.values() if isinstance(value, dict) else value)])
    return 8


# ---- tars


def read_tar(path: str, max_record_bytes: int, media: bool) -> Iterator[Record | Refusal]:
    """Records of a WebDataset tar; `line` is the record's number from 1, `offset` where its first
    member begins.

    Refusals: unsafe members, those of a record that stand apart, images unless `media`, no text, a
    cut archive.
    """
    number, offset, found, seen = 1, 0, list[Record | Refusal](), dict[str, tuple[int, set[str]]]()
    try:
        with open_input(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            members = itertools.groupby((member for member in archive if not member.isdir()), _key)
            for number, (key, group) in enumerate(members, start=1):
                yield from found  # one record late: the archive may be cut behind it
                parts = list(group)
                offset, names = parts[0].offset, {member.name for member in parts}
                before, others = seen.setdefault(key, (offset, set()))
                if (
                    others.isdisjoint(names) and others
                ):  # with a name again it is another record, as in webdataset
                    reason = (
                        f"members of record {key!r} stand apart, at bytes {before} and "
                        f"{offset}: join them"
                    )
                    found = [Refusal(path, number, offset, reason)]
                else:
                    found = [
                        _tar_record(path, number, key, parts, archive, max_record_bytes, media)
                    ]
                others |= names
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAR_BLOCK))
            if size < _TAR_BLOCK or any(
                file.read()
            ):  # tarfile accepts an archive that is cut in a header
                raise OSError("no end-of-archive block")
        yield from found
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the tar is damaged or cut short, nothing after this record can be read ({error})"
        yield Refusal(path, number, offset, reason)


def _key(member: tarfile.TarInfo) -> str:
    """What the members of one record share: the name up to the first dot of its last component."""
    name = PurePosixPath(member.name)
    return str(name.with_name(name.name.partition(".")[0] or name.name))


def _extension(name: str) -> str:
    """What a member is, by its last extension: `a.b.jpg` is a jpg."""
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
    """The record of some members: its JSON and texts by what follows their last dot, all others by
    whole name.
    """
    texts, others = dict[str, bytes](), dict[str, bytes]()
    size = sum(member.size for member in members)
    offset = members[0].offset
    try:
        for member in members:
            extension = _extension(member.name)
            is_text = extension in ("json", *_TEXTS)
            is_double = extension in texts or member.name in others
            _refuse_member(member, key, is_double, is_text or media)
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
    """Raise RecordError for a member that a record cannot have."""
    what = f"member {member.name!r}"
    if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        raise RecordError(f"{what} is named outside the archive")
    if not member.isfile():
        raise RecordError(f"{what} is a link or a device, not a file")
    if is_double:
        same = f"members share their names up to the first dot, here {key!r}, as in webdataset"
        raise RecordError(
            f"{what} is not the only .{_extension(member.name)} of its record: {same}"
        )
    if not is_wanted:
        raise RecordError(
            f"{what} is no text: this build makes text datasets, images need the vision build"
        )


def _content(member: tarfile.TarInfo, archive: tarfile.TarFile) -> bytes:
    """Read a member. Raises tarfile.ReadError if the archive ends within it."""
    stream = archive.extractfile(member)
    content = stream.read() if stream else b""
    if len(content) != member.size:
        raise tarfile.ReadError(f"member {member.name!r} has {len(content)} of {member.size} bytes")
    return content


def _value_of(texts: Mapping[str, bytes], key: str) -> Any:
    """Return a record's JSON, with its text if that is a member of its own. Raises RecordError for
    two texts.
    """
    value: Any = decode_json(texts["json"]) if "json" in texts else {}
    for name in _TEXTS:
        if name not in texts:
            continue
        if not isinstance(value, dict) or "text" in value:
            raise RecordError(f"record {key!r} has its text in both .json and .{name}")
        value["text"] = texts[name].decode()
        if value.get("caption") == value["text"]:  # img2dataset writes it twice
            del value["caption"]
    return value


def _name_image(value: Any, others: Mapping[str, bytes]) -> None:
    """Write into a record with a text where its only image or video is, unless it says so
    itself.
    """
    seen = [(kind, name) for name in others for kind, of in _SEEN.items() if _extension(name) in of]
    says = isinstance(value, dict) and not {"text", "caption"}.isdisjoint(value)
    if says and len(seen) == 1 and value.keys().isdisjoint(_NAMING):
        ((kind, name),) = seen
        value[kind] = {"member": name}
