"""The manifest of a checkpoint directory: what was written, by whom, with the hash of every file and of itself.

Key property: a directory counts as a checkpoint only if its manifest is whole and every file has the size and sha256
it names, so truncation, a missing file and a flipped bit are found before a tensor is read. Rejected: trusting a
rename alone, which protects against a crash but not against a disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST_FILE = "manifest.json"
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`."""

    step: int
    serial: int
    """Rises with every checkpoint written to a directory: the newest has the highest."""
    world_size: int
    """Ranks that wrote it; for people, nothing depends on it."""
    grid: Mapping[str, int]
    """Sizes of the axes that wrote it; for people, too."""
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state: loader position, samples consumed, optimizer updates, seed."""


def hash_file(path: Path) -> FileRecord:
    """Size and sha256 of a file as it is on disk."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(stream.tell(), digest)


def write_synced(path: Path, text: str) -> None:
    """Write a new text file and wait until it is on disk."""
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries (new names, renames) are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    """The manifest as text, with its own checksum. Raises TypeError when `extra` is not JSON."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "world_size": manifest.world_size,
        "grid": dict(manifest.grid),
        "extra": dict(manifest.extra),
        "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(manifest.files.items())},
    }
    content = json.loads(json.dumps(content))  # keys become text, as they will be when it is read
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)  # no newline: each byte lost is seen


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`. Raises ValueError naming the file when it is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise ValueError("its checksum does not match")
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, this version reads {FORMAT}")
        files = {name: _record(name, entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
        numbers = [_whole_number(name, content[name]) for name in ("step", "serial", "world_size")]
        for name in ("grid", "extra"):
            if not isinstance(content[name], dict):
                raise ValueError(f"its {name} is no object")
        return Manifest(*numbers, content["grid"], files, content["extra"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _whole_number(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"its {name} is {value!r}, no whole number")
    return value


def _record(name: str, size: Any, sha256: Any) -> FileRecord:
    """One entry of `files`, for a file of this folder alone: the checksum says nothing of who wrote the manifest."""
    if Path(name).name != name or name == ".." or "\0" in name:
        raise ValueError(f"it names {name!r}, which is no file of its folder")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name} is {sha256!r}")
    return FileRecord(_whole_number(f"size of {name}", size), sha256)


def damage(folder: Path, files: Mapping[str, FileRecord], names: Sequence[str]) -> list[str]:
    """What is wrong with these files of a checkpoint, one line per file."""
    problems = []
    for name in names:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != files[name].size:
                problems.append(f"{path} has {size} bytes, the manifest says {files[name].size}")
            elif hash_file(path) != files[name]:
                problems.append(f"{path} is damaged: its sha256 is not the one in the manifest")
        except (OSError, ValueError) as error:  # ValueError: no name at all, with a NUL byte
            problems.append(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
    return problems
