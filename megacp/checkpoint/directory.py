"""A directory of checkpoints: which names are committed, which are damaged, which a crash has left, and `latest`.

    DIRECTORY/latest                  name of the last committed checkpoint
    DIRECTORY/step_0000100/           manifest.json, config.yaml, DCP files (.metadata, __0_0.distcp)
    DIRECTORY/step_0000100.tmp-*/     being written, being deleted, or left by a crash: never read
    DIRECTORY/lock                    held by the run that writes here

Key property: a name without `.tmp-` was given by a rename of something complete. Rejected: looking at what a directory
holds to find out whether it is complete.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from megacp.checkpoint.manifest import read_manifest, sync_folder, write_synced

LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
_STEP = re.compile(r"step_\d{7,}(\.\d+)?")
_TEMPORARY = re.compile(r"(step_\d{7,}(\.\d+)?|latest)\.tmp-[0-9a-f]{8}")


def is_step_name(name: str) -> bool:
    """Whether a committed checkpoint may have this name."""
    return _STEP.fullmatch(name) is not None


def temporary(root: Path, base: str) -> Path:
    """A fresh name below `root` that never counts as a checkpoint."""
    return root / f"{base}.tmp-{secrets.token_hex(4)}"


def step_folders(directory: Path) -> tuple[list[Path], list[Path]]:
    """Step directories with a whole manifest, newest first, and those whose manifest is missing or damaged."""
    serials: dict[Path, int] = {}
    damaged = []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if is_step_name(folder.name) and folder.is_dir():
            try:
                serials[folder] = read_manifest(folder).serial
            except ValueError:
                damaged.append(folder)
    return sorted(serials, key=lambda folder: serials[folder], reverse=True), damaged


def committed(directory: Path | str) -> list[Path]:
    """The committed step directories below `directory`, newest first; their payload is not verified."""
    return step_folders(Path(directory))[0]


def traces_of_checkpoints(directory: Path | str) -> list[Path]:
    """What says that checkpoints were committed here, whole or not: step directories and `latest`."""
    root = Path(directory)
    whole, damaged = step_folders(root)
    latest = root / LATEST_FILE
    return [*whole, *damaged, *([latest] if latest.exists() else [])]


def point_and_prune(final: Path, keep_last: int) -> None:
    """Let `latest` name the new checkpoint; remove older ones beyond `keep_last` when that is above 0."""
    root = final.parent
    pointer = temporary(root, LATEST_FILE)
    write_synced(pointer, final.name + "\n")
    pointer.replace(root / LATEST_FILE)
    sync_folder(root)
    if keep_last > 0:
        for old in [folder for folder in committed(root) if folder != final][keep_last - 1 :]:
            doomed = temporary(root, old.name)
            old.rename(doomed)  # a half-deleted directory is never taken for a checkpoint
            shutil.rmtree(doomed)


def remove_leftovers(directory: Path | str) -> list[str]:
    """Remove what crashed runs left half-written or half-deleted; returns the names.

    Only for the holder of the directory's lock: a live run's unfinished checkpoint looks the same.
    """
    root = Path(directory)
    names = sorted(path.name for path in root.iterdir() if _TEMPORARY.fullmatch(path.name)) if root.is_dir() else []
    for name in names:
        if (root / name).is_dir():
            shutil.rmtree(root / name)
        else:
            (root / name).unlink()
    return names
