"""A directory of checkpoints: which names are committed, `latest`, the lock of the run that writes here.

    DIRECTORY/latest                  name of the last committed checkpoint
    DIRECTORY/step_0000100/           manifest.json, config.yaml, index.json, rank_00000.safetensors, ...
    DIRECTORY/step_0000100.tmp-*/     being written, being deleted, or left by a crash: never read
    DIRECTORY/lock                    held by the run that writes here

A name without `.tmp-` was given by a rename of something complete. An object store has no rename: there a step is
complete with its manifest, which is written last and removed first, and there is no lock.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from pathlib import Path
from typing import overload

from megacp.core.checkpoint.manifest import MANIFEST_FILE, read_manifest
from megacp.core.storage import files
from megacp.core.storage.files import StrPath
from megacp.core.storage.place import Place, folders_in, place_of, read_content
from megacp.core.storage.url import UnreachableError, Url

LATEST_FILE = "latest"
LOCK_FILE = "lock"
CONFIG_FILE = "config.yaml"
_STEP = re.compile(r"step_\d{7,}(\.\d+)?")
_TEMPORARY = re.compile(r"step_\d{7,}(\.\d+)?\.tmp-[0-9a-f]{8}|\.latest\.[0-9a-f]{12}\.partial")
_OWNER = re.compile(rb"(host [^\n]*, process \d+\n)?")
"""What a lock file may hold: it is written over."""


def is_step_name(name: str) -> bool:
    """Whether a committed checkpoint may have this name."""
    return _STEP.fullmatch(name) is not None


@overload
def temporary(root: Path, base: str) -> Path: ...
@overload
def temporary(root: Url, base: str) -> Url: ...
def temporary(root: Place, base: str) -> Place:
    """A fresh name below `root` that never counts as a checkpoint."""
    return root / f"{base}.tmp-{secrets.token_hex(4)}"


def step_folders(directory: Place) -> tuple[list[Place], list[Place]]:
    """Step directories with a whole manifest, newest first, and those whose manifest is missing or damaged."""
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
    """The committed step directories below `directory`, newest first; their payload is not verified."""
    return step_folders(place_of(directory))[0]


def traces_of_checkpoints(directory: StrPath | Url) -> list[Place]:
    """What says that checkpoints were committed here, whole or not: step directories and `latest`.

    Where a store has no `latest`, none was: a step without a manifest is what the first save of a run has left.
    """
    root = place_of(directory)
    whole, damaged = step_folders(root)
    latest = root / LATEST_FILE
    pointed = [latest] if latest.exists() else []
    return [*whole, *damaged, *pointed] if isinstance(root, Path) or pointed else whole


def latest_of(directory: StrPath | Url) -> str | None:
    """The name in `latest`; None where it cannot be read, or holds no name of a step directory."""
    try:
        name = read_content(place_of(directory) / LATEST_FILE).decode().strip()
    except UnreachableError:
        raise
    except (OSError, ValueError):
        return None
    return name if is_step_name(name) else None


def point_and_prune(final: Place, keep_last: int) -> list[str]:
    """Let `latest` name the new checkpoint; when `keep_last` is above 0, remove all but that many of the newest.

    Returns what could not be removed. OSError only when `latest` cannot be written.
    """
    root, content = final.parent, f"{final.name}\n".encode()
    if isinstance(root, Url):
        (root / LATEST_FILE).write(content)
    else:
        files.write_atomically(root / LATEST_FILE, content)
    older = [folder for folder in committed(root) if folder != final] if keep_last > 0 else []
    return [note for folder in older[keep_last - 1 :] for note in _remove_checkpoint(folder)]


def _remove_checkpoint(folder: Place) -> list[str]:
    """Remove a committed checkpoint, or a link to one, so that no half of it is ever taken for one."""
    try:
        if isinstance(folder, Url):
            (folder / MANIFEST_FILE).unlink()
            folder.remove_below()
            return []
        doomed = temporary(folder.parent, folder.name)
        files.rename(folder, doomed)
        doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return [f"the old checkpoint {folder} could not be removed: {reason}"]
    return []


def remove_leftovers(directory: Path | str) -> list[str]:
    """Remove what crashed runs left half-written or half-deleted; what was removed.

    Only for the holder of the directory's lock: a live run's unfinished checkpoint looks the same.
    """
    left = sorted(path for path in Path(directory).iterdir() if _TEMPORARY.fullmatch(path.name))
    for path in left:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path, ignore_errors=True)
    return [f"removed {path}, left by a crash" for path in left]


class DirectoryLock:
    """A POSIX record lock on DIRECTORY/lock, held until `release` or the end of this process, kill -9 included.

    A forked child does not keep it, as it would an `flock`. Between machines it acts where the file system has locks
    (NFS with a lock daemon, GPFS, Lustre with `-o flock`); without any, `problem` says so and the run goes on.
    Raises ValueError with host and process of the owner when another process holds it, or when the file is no lock.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory) / LOCK_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self.problem: str | None = None
        """Why there is no protection; None where there is."""
        self._descriptor: int | None = None
        try:
            self._descriptor = files.lock(path)
        except BlockingIOError as taken:
            owner = files.read_regular(path).decode(errors="replace").strip()
            raise ValueError(
                f"--save {directory} is in use by {owner or 'another run'}: choose another directory, or end that run"
            ) from taken
        except files.NoLocksError as error:
            self.problem = f"{path} cannot be locked ({error.strerror}): a second run would not be noticed"
            return
        if not _OWNER.fullmatch(os.pread(self._descriptor, 4096, 0)):
            self.release()  # a second name of another file, for example
            raise ValueError(f"{path} is no lock of a run and would be written over: move it away")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next run in; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
