"""The manifest of a checkpoint directory: size and sha256 of every file, and a checksum of itself.

Truncation, a missing file and a flipped bit are found before a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacp.core.storage.place import Place, read_content, sha256_of
from megacp.core.storage.url import UnreachableError

MANIFEST_FILE = "manifest.json"
FORMAT = 2


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
    """sha256 of the content as canonical JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(manifest: CheckpointManifest) -> str:
    """The manifest as text, with its own checksum. TypeError or ValueError when `extra` is no JSON."""
    content = json.loads(json.dumps({"format": FORMAT, **asdict(manifest)}, allow_nan=False))
    return json.dumps({**content, "checksum": checksum_of(content)}, indent=1)  # no newline: each byte lost is seen


def read_manifest(folder: Place) -> CheckpointManifest:
    """Read and check `manifest.json`. Raises ValueError naming the file; UnreachableError: the store is not reached."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(read_content(path))
        if content.pop("checksum") != checksum_of(content):
            raise ValueError("its checksum does not match")
        if (form := content.pop("format")) != FORMAT:
            raise ValueError(f"it has format {form}, this version reads {FORMAT}")
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        if outside := [name for name in files if Path(name).name != name]:
            raise ValueError(f"it names {outside[0][:100]!r}, which is no file of its folder")
        return CheckpointManifest(files=files, **content)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, it is written last: {folder} is half a checkpoint") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnreachableError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__ if not str(error) else error}") from error


def damage(folder: Place, files: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """What is wrong with these files of a checkpoint. Raises UnreachableError where the store is not reached."""
    problems = []
    for name in names:
        path, record = folder / name, files[name]
        try:
            if FileRecord(*sha256_of(path, record.size)) != record:
                problems.append(f"{path} is damaged: its sha256 is not the one in the manifest")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
        except UnreachableError:
            raise
        except ValueError as error:  # it names the file
            problems.append(str(error))
    return problems
