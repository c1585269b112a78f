"""A directory of checkpoints: names and manifests, which are committed, `latest`, the lock of the
run that writes.

    DIRECTORY/latest                  name of the last committed checkpoint DIRECTORY/step_0000100/
    manifest.json, config.yaml, index.json, rank_00000.safetensors, ...
    DIRECTORY/step_0000100.tmp-*/     being written, being deleted, or left by a crash: never read
    DIRECTORY/lock                    held by the run that writes here

A name without `.tmp-` was given by a rename of something complete. An object store has no rename:
there a step is complete with its manifest, which is written last and removed first, and there is no
lock.
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
    """Content of `manifest.json`: what the checkpoint is of, and size and hash of its files."""

    step: int
    serial: int
    """Rises with every checkpoint written to a directory: the newest has the highest."""
    world_size: int
    """Ranks that wrote it."""
    grid: Mapping[str, int]
    """Sizes of their axes, for people."""
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state: samples consumed, optimizer updates, seed."""


def checksum_of(content: Mapping[str, Any]) -> str:
    """sha256 of the content as canonical JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(manifest: CheckpointManifest) -> str:
    """The manifest as text, with its own checksum. TypeError or ValueError when `extra` is no
    JSON.
    """
    content = json.loads(json.dumps({"format": FORMAT, **asdict(manifest)}, allow_nan=False))
    return json.dumps(
        {**content, "checksum": checksum_of(content)}, indent=1
    )  # no newline: each byte lost is seen


def read_manifest(folder: Place) -> CheckpointManifest:
    """Read and check `manifest.json`. Raises ValueError naming the file; UnreachableError: the
    store is not reached.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(read_content(path))
        if content.pop("checksum") != checksum_of(content):
            raise ValueError("its checksum does not match")
        if (form := content.pop("format")) != FORMAT:
            raise ValueError(f"it has format {form}, this version reads {FORMAT}")
        records = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        if outside := [name for name in records if Path(name).name != name]:
            raise ValueError(f"it names {outside[0][:100]!r}, which is no file of its folder")
        return CheckpointManifest(files=records, **content)
    except UnreachableError:  # says nothing of the checkpoint: an earlier one is no answer
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read, it is written last: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from error


def damage(folder: Place, records: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """What is wrong with these files of a checkpoint. Raises UnreachableError where the store is
    not reached.
    """
    problems = []
    for name in names:
        try:
            if digest_of(folder / name, records[name].size)[1] != records[name].sha256:
                problems.append(
                    f"{folder / name} is damaged: its sha256 is not the one in the manifest"
                )
        except UnreachableError:
            raise
        except OSError as error:
            problems.append(f"{folder / name} cannot be read: {error.strerror}")
        except ValueError as error:  # it names the file
            problems.append(str(error))
    return problems


def is_step_name(name: str) -> bool:
    """Whether a committed checkpoint may have this name."""
    return _STEP.fullmatch(name) is not None


def temporary(folder: Path) -> Path:
    """A fresh name beside `folder` that never counts as a checkpoint."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


def step_folders(directory: Place) -> tuple[list[Place], list[Place]]:
    """Step directories with a whole manifest, newest first, and those whose manifest is missing or
    damaged.
    """
    serials: dict[Place, int] = {}
    damaged: list[Place] = []
    for folder in folders_in(directory):
        if is_step_name(folder.name):
            try:
                serials[folder] = read_manifest(folder).serial
            except UnreachableError:  # no reason to go on from an earlier one
                raise
            except ValueError:
                damaged.append(folder)
    return sorted(serials, key=lambda folder: serials[folder], reverse=True), damaged


def committed(directory: StrPath | Url) -> list[Place]:
    """The committed step directories below `directory`, newest first; their payload is not
    verified.
    """
    return step_folders(place_of(directory))[0]


def holds_checkpoints(directory: StrPath | Url) -> bool:
    """Whether checkpoints were ever committed here, whole or not: there are step directories, or
    `latest`.

    Where a store has no `latest`, none was: a step without a manifest is what the first save of a
    run has left.
    """
    root = place_of(directory)
    whole, damaged = step_folders(root)
    return (
        bool(whole) or (root / LATEST_FILE).exists() or (isinstance(root, Path) and bool(damaged))
    )


def latest_of(directory: Place) -> str | None:
    """The name in `latest`; None where it cannot be read, or holds no name of a step directory."""
    try:
        name = read_content(directory / LATEST_FILE).decode().strip()
    except UnreachableError:
        raise
    except (OSError, ValueError):
        return None
    return name if is_step_name(name) else None


def point_and_prune(final: Place, keep_last: int) -> list[str]:
    """Let `latest` name the new checkpoint; when `keep_last` is above 0, remove all but that many
    of the newest.

    Returns what could not be removed. OSError only when `latest` cannot be written.
    """
    latest, content = final.parent / LATEST_FILE, f"{final.name}\n".encode()
    latest.write(content) if isinstance(latest, Url) else files.write_atomically(latest, content)
    older = (
        [folder for folder in committed(final.parent) if folder != final] if keep_last > 0 else []
    )
    notes = []
    for folder in older[keep_last - 1 :]:
        try:  # so that no half of it is ever taken for one
            if isinstance(folder, Url):
                (folder / MANIFEST_FILE).unlink()
                folder.remove_below()
                continue
            doomed = temporary(folder)
            files.rename(folder, doomed)
            doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed)
        except (OSError, ValueError) as error:
            notes.append(f"the old checkpoint {folder} could not be removed: {error}")
    return notes


def remove_leftovers(directory: Path | str) -> list[str]:
    """Remove what crashed runs left half-written or half-deleted; what was removed.

    Only for the holder of the directory's lock: a live run's unfinished checkpoint looks the same.
    """
    left = sorted(path for path in Path(directory).iterdir() if _TEMPORARY.fullmatch(path.name))
    for path in left:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(
            path, ignore_errors=True
        )
    return [f"removed {path}, left by a crash" for path in left]


class DirectoryLock:
    """A POSIX record lock on DIRECTORY/lock, held until `release` or the end of this process, kill
    -9 included.

    A forked child does not keep it, as it would an `flock`. Between machines it acts where the file
    system has locks (NFS with a lock daemon, GPFS, Lustre with `-o flock`); without any, `problem`
    says so and the run goes on. Raises ValueError with host and process of the owner when another
    process holds it.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory) / LOCK_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self.problem: str | None = None
        """Why there is no protection; None where there is."""
        self.owner = f"host {socket.gethostname()}, process {os.getpid()}"
        """What stands in the file."""
        self._descriptor: int | None = None
        try:
            self._descriptor = files.lock(path)
        except BlockingIOError as taken:
            owner = files.read_regular(path).decode(errors="replace").strip()
            raise ValueError(
                f"--save {directory} is in use by {owner or 'another run'}: choose another "
                "directory, or end that run"
            ) from taken
        except files.NoLocksError as error:
            self.problem = (
                f"{path} cannot be locked ({error.strerror}): a second run would not be noticed"
            )
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self.owner.encode(), 0)

    def release(self) -> None:
        """Let the next run in; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
