"""Directory of checkpoints: names, manifests, `latest`, and the lock of the run that saves there.

    DIRECTORY/latest                  name of the last committed checkpoint
    DIRECTORY/step_0000100/           manifest.json, config.yaml, index.json,
                                      rank_00000.safetensors, ...
    DIRECTORY/step_0000100.tmp-*/     being written or deleted, or left by a crash; never read
    DIRECTORY/lock                    locked by the run that saves here

A folder gets a name without `.tmp-` only by a rename when it is complete. An object store has
neither renames nor locks. There, a step is complete if it has a manifest, which is written last and
removed first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacp.storage import files
from megacp.storage.files import StrPath
from megacp.storage.place import Place, digest_of, folders_in, place_of, read_content
from megacp.storage.url import UnreachableError, Url

LATEST_FILE = "latest"
LOCK_FILE = "lock"
CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"
FORMAT = 2
_STEP = re.compile(r"step_\d{7,}(\.\d+)?")
_TEMPORARY = re.compile(r"step_\d{7,}(\.\d+)?\.tmp-[0-9a-f]{8}|\.latest\.[0-9a-f]{12}\.partial")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of `manifest.json`: the checkpoint's origin, and the size and hash of its files."""

    step: int
    serial: int
    """Number of the checkpoint in its directory. The newest checkpoint has the highest number."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    grid: Mapping[str, int]
    """Sizes of the ranks' grid axes, only for human readers."""
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state, such as consumed samples, optimizer updates and seed."""


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return the sha256 of `content` as canonical JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(manifest: CheckpointManifest) -> str:
    """Return the text of a manifest, including its checksum.

    Raise TypeError or ValueError if `extra` cannot be written as JSON.
    """
    content = json.loads(json.dumps({"format": FORMAT, **asdict(manifest)}, allow_nan=False))
    content["checksum"] = checksum_of(content)
    # without a newline at the end, a file that has lost its last byte is not valid JSON
    return json.dumps(content, indent=1)


def read_manifest(folder: Place) -> CheckpointManifest:
    """Return the checked contents of a folder's `manifest.json`.

    Raise a ValueError that names the file if it is missing or damaged, and UnreachableError if the
    store cannot be reached.
    """
    path = folder / MANIFEST_FILE
    try:
        # the checksum covers everything except itself
        content = json.loads(read_content(path))
        if content.pop("checksum") != checksum_of(content):
            raise ValueError("its checksum does not match")
        form = content.pop("format")
        if form != FORMAT:
            raise ValueError(f"it has format {form}, but this version reads format {FORMAT}")
        records = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        # a damaged or malicious manifest must not refer to files in other folders
        outside = [name for name in records if Path(name).name != name]
        if outside:
            raise ValueError(f"it lists {outside[0][:100]!r}, which is not a file in its folder")
        return CheckpointManifest(files=records, **content)
    except UnreachableError:  # this does not mean that an older checkpoint should be used
        raise
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read, perhaps because the save is incomplete: {error.strerror}"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from error


def damage(folder: Place, records: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """Return the problems of the files `names` in a checkpoint.

    Raise UnreachableError if the store cannot be reached.
    """
    problems = []
    for name in names:
        try:
            _, digest = digest_of(folder / name, records[name].size)
            if digest != records[name].sha256:
                problems.append(
                    f"{folder / name} is damaged: its sha256 differs from the manifest's"
                )
        except UnreachableError:
            raise
        except OSError as error:
            problems.append(f"{folder / name} cannot be read: {error.strerror}")
        except ValueError as error:  # the message names the file
            problems.append(str(error))
    return problems


def is_step_name(name: str) -> bool:
    """Return whether a committed checkpoint may have this name."""
    return _STEP.fullmatch(name) is not None


def temporary(folder: Path) -> Path:
    """Return a new path next to `folder` with a name that never counts as a checkpoint."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


def step_folders(directory: Place) -> tuple[list[Place], list[Place]]:
    """Return step directories with a valid manifest, newest first, and those without one."""
    serials: dict[Place, int] = {}
    damaged: list[Place] = []
    for folder in folders_in(directory):
        if is_step_name(folder.name):  # not a temporary name
            try:
                serials[folder] = read_manifest(folder).serial
            except UnreachableError:  # this does not mean that an older checkpoint should be used
                raise
            except ValueError:
                damaged.append(folder)
    return sorted(serials, key=lambda folder: serials[folder], reverse=True), damaged


def committed(directory: StrPath | Url) -> list[Place]:
    """Return the committed step directories in `directory`, newest first.

    Their tensors are not verified.
    """
    return step_folders(place_of(directory))[0]


def holds_checkpoints(directory: StrPath | Url) -> bool:
    """Return whether a checkpoint has ever been committed here, even if it is now damaged.

    In an object store, a step without a manifest does not count, because an interrupted first save
    leaves one. After the first commit, `latest` exists there.
    """
    root = place_of(directory)
    whole, damaged = step_folders(root)
    # `latest` remains if a user deletes the step directories
    if whole or (root / LATEST_FILE).exists():
        return True
    return isinstance(root, Path) and bool(damaged)


def latest_of(directory: Place) -> str | None:
    """Return the step directory named in `latest`; None if it is missing or not a valid name."""
    try:
        name = read_content(directory / LATEST_FILE).decode().strip()
    except UnreachableError:
        raise
    except (OSError, ValueError):
        return None  # `latest` is only a hint: manifests also determine the order
    return name if is_step_name(name) else None


def point_and_prune(final: Place, keep_last: int) -> list[str]:
    """Update `latest` and, if `keep_last` > 0, remove all but this number of newest checkpoints.

    Return messages about folders that could not be removed. Raise OSError only if `latest` cannot
    be written.
    """
    # the write is atomic: readers get either the old or the new name
    latest = final.parent / LATEST_FILE
    content = f"{final.name}\n".encode()
    if isinstance(latest, Url):
        latest.write(content)
    else:
        files.write_atomically(latest, content)
    older: list[Place] = []
    if keep_last > 0:
        older = [folder for folder in committed(final.parent) if folder != final]
    notes = []
    for folder in older[keep_last - 1 :]:
        # First make the folder incomplete, so that a half-deleted checkpoint is never loaded.
        try:
            if isinstance(folder, Url):  # stores have no rename, so remove the manifest first
                (folder / MANIFEST_FILE).unlink()
                folder.remove_below()
                continue
            doomed = temporary(folder)
            files.rename(folder, doomed)
            if doomed.is_symlink():  # the user has moved the checkpoint: keep the target
                doomed.unlink()
            else:
                shutil.rmtree(doomed)
        except (OSError, ValueError) as error:
            notes.append(f"the old checkpoint {folder} could not be removed: {error}")
    return notes


def remove_leftovers(directory: Path | str) -> list[str]:
    """Remove incomplete checkpoints left by crashed runs; return messages about them.

    Only the run that holds the lock may call this, because a running job's unfinished checkpoint
    looks the same.
    """
    # only unfinished or half-deleted checkpoints have these names
    left = sorted(path for path in Path(directory).iterdir() if _TEMPORARY.fullmatch(path.name))
    for path in left:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
    return [f"removed {path}, left by a crash" for path in left]


class DirectoryLock:
    """POSIX record lock on DIRECTORY/lock, held until `release` or until the process ends.

    Even kill -9 releases it. Unlike an `flock`, a forked child does not inherit it. It works across
    machines if the file system supports locks (NFS with a lock daemon, GPFS, Lustre with
    `-o flock`). Otherwise, `problem` is set, and the run continues. The constructor raises
    ValueError with the owner's host and process if another process holds the lock.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory) / LOCK_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self.problem: str | None = None
        """Why the directory cannot be locked; None if it is locked."""
        self.owner = f"host {socket.gethostname()}, process {os.getpid()}"
        """Contents of the lock file."""
        self._descriptor: int | None = None  # closing it releases the lock
        try:
            self._descriptor = files.lock(path)
        except BlockingIOError as taken:
            content = files.read_regular(path).decode(errors="replace").strip()
            owner = content or "another run"
            raise ValueError(
                f"--save {directory} is in use by {owner}: choose another directory, or end the "
                "other run"
            ) from taken
        except files.NoLocksError as error:
            self.problem = (
                f"{path} cannot be locked ({error.strerror}): another run that saves there is not "
                "detected"
            )
            return
        # write through the locked descriptor, because closing another one would release the lock
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self.owner.encode(), 0)

    def release(self) -> None:
        """Release the lock for the next run. Repeated calls are allowed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
