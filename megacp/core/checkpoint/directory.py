"""A directory of checkpoints: which names are committed, which are damaged, which a crash has left, and `latest`.

    DIRECTORY/latest                  name of the last committed checkpoint
    DIRECTORY/step_0000100/           manifest.json, config.yaml, index.json, rank_00000.safetensors, ...
    DIRECTORY/step_0000100.tmp-*/     being written, being deleted, or left by a crash: never read
    DIRECTORY/lock                    held by the run that writes here

Key property: a name without `.tmp-` was given by a rename of something complete. An object store has no rename: there
a step is complete with its manifest, which is written last and removed first, and there is no lock.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import overload

from megacp.core.checkpoint.manifest import MANIFEST_FILE, read_manifest
from megacp.core.storage.files import StrPath, open_regular, rename, sync_folder, write_new
from megacp.core.storage.place import Place, folders_in, place_of, read_content, size_of
from megacp.core.storage.retry import UnreachableError
from megacp.core.storage.url import Url

LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
MOST_CONFIG_BYTES = 1 << 20
_MOST_LATEST = 4096
_LOOKS = 10
"""At a directory that has a `latest` and no checkpoint."""
_STEP = re.compile(r"step_\d{7,}(\.\d+)?")
_TEMPORARY = re.compile(r"(step_\d{7,}(\.\d+)?|latest)\.tmp-[0-9a-f]{8}")


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
    whole, damaged = _listed(directory)
    for _ in range(_LOOKS):
        if whole or damaged or not (directory / LATEST_FILE).exists():
            break
        whole, damaged = _listed(directory)  # a running job removed the one that was listed, after it made the next
    return whole, damaged


def _listed(directory: Place) -> tuple[list[Place], list[Place]]:
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
        name = read_content(place_of(directory) / LATEST_FILE, _MOST_LATEST).decode().strip()
    except UnreachableError:
        raise
    except (OSError, ValueError):
        return None
    return name if is_step_name(name) else None


def refuse_unpointable(directory: Path | str) -> None:
    """ValueError when `latest` is a link or no regular file, which the first save would find out or replace."""
    latest = Path(directory) / LATEST_FILE
    try:
        if latest.is_symlink():
            raise ValueError(f"{latest} is a link; it must be a file, or nothing")
        open_regular(latest).close()
    except (FileNotFoundError, PermissionError):  # whatever it holds, it can be replaced
        return
    except ValueError as error:
        raise ValueError(f"{error}: move it away") from error


def point_and_prune(final: Place, keep_last: int, distrusted: Collection[Place] = ()) -> list[str]:
    """Let `latest` name the new checkpoint; when `keep_last` is above 0, remove older ones until that many are left.

    Only sound ones count, neither `distrusted` nor damaged ones. Distrusted ones had wrong hashes when this run looked
    for a start. Damaged ones have a file of another size than their manifest says. Distrusted ones are removed with the
    old ones: a later run does not know of them and would count them. Others stay until enough sound ones are newer.
    Returns what there is to say: what could not be removed, and which damaged ones were. OSError only when `latest`
    cannot be written.
    """
    root = final.parent
    _point(root, f"{final.name}\n".encode())
    if keep_last <= 0:
        return []
    rejected = {folder.resolve() for folder in distrusted}
    older = [folder for folder in committed(root) if folder != final]
    doomed = [folder for folder in older if folder.resolve() in rejected]
    sound = 1
    for folder in older:
        if folder in doomed:
            continue
        if sound >= keep_last:
            doomed.append(folder)
        sound += _has_its_files(folder)
    notes = []
    for folder in doomed:
        told = [f"removed {folder}, which was damaged when this run started"] if folder.resolve() in rejected else []
        notes += _remove_checkpoint(folder) or told
    return notes


def _point(root: Place, content: bytes) -> None:
    """Write `latest`."""
    if isinstance(root, Url):
        (root / LATEST_FILE).write(content)
        return
    pointer = temporary(root, LATEST_FILE)
    try:
        write_new(pointer, content)
        rename(pointer, root / LATEST_FILE)
    except OSError:
        pointer.unlink(missing_ok=True)
        raise
    sync_folder(root)


def _has_its_files(folder: Place) -> bool:
    """Whether the files have the sizes of the manifest: no more than names and sizes are read."""
    try:
        return all(size_of(folder / name) == record.size for name, record in read_manifest(folder).files.items())
    except (OSError, ValueError):
        return False


def _remove_checkpoint(folder: Place) -> list[str]:
    """Remove a committed checkpoint, or a link to one; why it could not be, in words."""
    if isinstance(folder, Url):
        try:
            (folder / MANIFEST_FILE).unlink()  # a half-deleted one is never taken for a checkpoint
            folder.remove_below()
        except ValueError as error:
            return [f"the old checkpoint could not be removed: {error}"]
        return []
    doomed = temporary(folder.parent, folder.name)
    try:
        rename(folder, doomed)  # a half-deleted directory is never taken for a checkpoint
    except OSError as error:
        return [f"the old checkpoint {folder} could not be removed: {error.strerror}"]
    return _remove(doomed)


def _remove(path: Path) -> list[str]:
    """Remove a file, a link (never what it points to) or a folder; why it could not be, in words."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            _remove_folder(path)
    except OSError as error:
        return [f"{path} could not be removed: {error.strerror or error}"]
    return []


def _remove_folder(path: Path) -> None:
    """`shutil.rmtree`, again when a file was gone before it came to it, as on NFS or with a second remover."""
    for last in (False, False, False, False, True):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if last and path.exists():
                raise
        else:
            return


def remove_leftovers(directory: Path | str) -> list[str]:
    """Remove what crashed runs left half-written or half-deleted; what was removed or could not be, in words.

    Only for the holder of the directory's lock: a live run's unfinished checkpoint looks the same.
    """
    root = Path(directory)
    left = sorted(path for path in root.iterdir() if _TEMPORARY.fullmatch(path.name)) if root.is_dir() else []
    return [note for path in left for note in _remove(path) or [f"removed {path}, left by a crash"]]
