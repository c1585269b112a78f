"""Reads records from WebDataset tars.

Key property: they are the `Record`s and `Refusal`s that JSONL gives, so nothing behind a reader knows the format.
Rejected: the webdataset package, which pairs members by their order and skips broken archives silently.

Members of one record follow each other and share their name up to the first dot of the last component. `.json` is the
record, `.txt` its text; all others are images and videos that the record names.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from megacp.core.storage.place import open_input, place_of, size_of
from megacp.prepare.records.record import Record, RecordError, Refusal
from megacp.prepare.records.sample import decode_json

TEXT_MEMBERS = ("txt", "text")
RECORD_MEMBERS = ("json",)
_TAR_BLOCK = 512


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
        with open_input(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
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
    size = size_of(place_of(path))
    if size < _TAR_BLOCK:
        return False
    with open_input(path) as stream:
        stream.seek(size - _TAR_BLOCK)
        return not any(stream.read(_TAR_BLOCK))


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _cut(error: object) -> str:
    return f"the tar is damaged or cut short, nothing after this record can be read ({_one_line(error)})"
