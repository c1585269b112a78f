"""The manifest of a checkpoint directory: what was written, and the hash of every file and of the manifest itself.

Key property: a directory counts as a checkpoint only if its manifest is whole and every file has the size and sha256 it
names. So truncation, a missing file and a flipped bit are found before a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megacp.core.storage.files import parse_json, seen
from megacp.core.storage.json_fields import LARGEST_COUNT, SHA256, Fields
from megacp.core.storage.place import Place, read_content, sha256_of
from megacp.core.storage.retry import UnreachableError

MANIFEST_FILE = "manifest.json"
FORMAT = 2
_MOST_BYTES = 32 << 20
"""Of a manifest: a quarter of a million files."""
_MOST_RANKS = 1 << 24


class FormatError(ValueError):
    """A whole checkpoint of a format that an earlier version wrote; says what to do."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
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


def checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(manifest: CheckpointManifest) -> str:
    """The manifest as text, with its own checksum. TypeError or ValueError when it could not be read again."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "world_size": manifest.world_size,
        "grid": dict(manifest.grid),
        "extra": dict(manifest.extra),
        "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(manifest.files.items())},
    }
    content = json.loads(json.dumps(content, allow_nan=False))  # keys become text, as they will be when it is read
    _manifest(Fields(content))
    return json.dumps({**content, "checksum": checksum_of(content)}, indent=1)  # no newline: each byte lost is seen


def read_manifest(folder: Place) -> CheckpointManifest:
    """Read and check `manifest.json`. Raises ValueError naming the file, and the field, when it is not what it must.

    It is a FormatError for a manifest that an earlier version wrote. UnreachableError: the store is not reached.
    """
    path = folder / MANIFEST_FILE
    try:
        text = read_content(path, _MOST_BYTES)
    except FileNotFoundError as error:
        if isinstance(folder, Path):
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(f"{folder} has no {MANIFEST_FILE}, which is uploaded last: it is half a checkpoint") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        checksum = content.pop("checksum", None)
        if checksum != checksum_of(content):
            raise ValueError("its checksum does not match")
        if content.get("format") not in range(1, FORMAT):
            return _manifest(Fields(content))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is damaged: {reason}") from error
    raise FormatError(
        f"{path} has format {content['format']}, of a megacp before safetensors files; this version reads format "
        f"{FORMAT}: finish the run with the version that wrote it, or carry its weights over by megacp-convert "
        "--from megacp --to hf there and --from hf --to megacp here"
    )


def _manifest(fields: Fields) -> CheckpointManifest:
    """The checksum says nothing of who wrote a manifest: every value is checked."""
    form = fields.integer("format")
    if form != FORMAT:
        raise ValueError(f"it has format {form}, this version reads {FORMAT}")
    grid, files = fields.object("grid"), fields.object("files")
    return CheckpointManifest(
        step=fields.integer("step", high=LARGEST_COUNT),
        serial=fields.integer("serial", high=LARGEST_COUNT),
        world_size=fields.integer("world_size", high=_MOST_RANKS),
        grid={axis: grid.integer(axis, high=_MOST_RANKS) for axis in grid.values},
        files={name: _record(name, files) for name in files.values},
        extra=fields.object("extra").values,
    )


def _record(name: str, files: Fields) -> FileRecord:
    """One entry of `files`, for a file of this folder alone."""
    if Path(name).name != name or name == ".." or not name.isprintable():
        raise ValueError(f"it names {name[:100]!r}, which is no file of its folder")
    entry = files.object(name)
    return FileRecord(entry.integer("size", high=1 << 62), entry.text("sha256", SHA256, "64 hexadecimal digits"))


def damage(
    folder: Place, files: Mapping[str, FileRecord], names: Sequence[str], seconds: float = 0.0
) -> dict[str, str]:
    """What is wrong with these files of a checkpoint, by name; one that is missing is waited for `seconds`.

    Raises UnreachableError where the store is not reached.
    """
    problems = {}
    for name in names:
        path, record = folder / name, files[name]
        try:
            found = FileRecord(*seen(partial(sha256_of, path, record.size), seconds))
            if found != record:
                problems[name] = f"{path} is damaged: its sha256 is not the one in the manifest"
        except OSError as error:
            problems[name] = f"{path} cannot be read: {error.strerror}"
        except UnreachableError:
            raise
        except ValueError as error:  # it names the file
            problems[name] = str(error)
    return problems
