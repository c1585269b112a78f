"""Folders of small files that are created once and shared by all processes of a user.

The cache is never trusted. The hash of each file is stored when a folder is created and compared
whenever the folder is used; a folder that does not match is created again. If the cache is not
writable, each process creates its own copy.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megacp.storage import files

CACHE = "~/.cache/megacp"
"""This user's folder for copies and conversions."""
_FILES, _RECORD = "files", "sha256.json"
"""Names in a kept folder: the folder of files, and the record of their sizes and hashes."""


def cache_folder(name: str) -> Path:
    """Return a folder of the cache in which new files can be written.

    If a file with this name exists or the disk is read-only, return a temporary folder of this
    process instead.
    """
    folder = _root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permissions do not show whether a mounted disk is writable, so try to write
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = _folder_of_process() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def kept_folder(key: str, make: Callable[[Path], None]) -> Path:
    """Return a cached folder with the files that `make` writes into an empty folder.

    `key` must identify everything that the files depend on. An existing folder is reused if each of
    its files still has its original hash. Errors from `make` propagate, and nothing is kept.
    """
    kept = _root() / "folders" / key
    # the common case: an earlier run or another process has created the folder
    if _is_whole(kept):
        return kept / _FILES
    kept = cache_folder("folders") / key
    made = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=kept.parent))
    try:
        (made / _FILES).mkdir()
        make(made / _FILES)
        # the record is written last, so an incomplete folder never matches
        files.write_new(made / _RECORD, files.json_bytes(_hashes(made / _FILES)))
        files.sync_below(made)
        # another process may have been faster; its files are equal and may already be in use
        if not _is_whole(kept):
            files.replace_folder(made, kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return kept / _FILES


def _root() -> Path:
    """Return the cache folder, or a folder of this process if the user has no home folder."""
    try:
        return Path(CACHE).expanduser()
    except RuntimeError:  # no home folder
        return _folder_of_process()


def _is_whole(kept: Path) -> bool:
    """Return whether a kept folder contains exactly its original files."""
    try:
        stated = files.read_json(kept / _RECORD)
        return bool(stated) and stated == _hashes(kept / _FILES)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, list[int | str]]:
    """Return the sizes and sha256 hashes of all files below a folder, by relative path."""
    found: dict[str, list[int | str]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            size, sha256 = files.sha256_of(path)
            found[str(path.relative_to(folder))] = [size, sha256]
    return found


@functools.cache
def _folder_of_process() -> Path:
    """Return a temporary folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="megacp_cache_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
