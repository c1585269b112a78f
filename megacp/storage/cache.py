"""Folders of small files that are made once and kept for all processes of a user.

Nothing in the cache is believed. The hash of each file is stored when a folder is made and compared
whenever it is used; a folder that does not match is made again. If the cache cannot be written,
each process makes its own copy.
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
"""Where this user's copies and conversions are kept."""
_FILES, _RECORD = "files", "sha256.json"
"""Names in a kept folder: what was made, and size and hash of each of its files."""


def cache_folder(name: str) -> Path:
    """Return a folder of the cache that new files can be written to.

    If a file is in its place or the disk is read-only, that is a temporary folder of this process.
    """
    folder = _root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permissions do not tell what a mounted disk allows
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = _folder_of_process() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def kept_folder(key: str, make: Callable[[Path], None]) -> Path:
    """Return the folder with the files that `make` writes into an empty folder; `key` names all
    they depend on.

    The folder is taken from the cache if each of its files still has the hash that it was made
    with. What `make` raises is raised, and nothing is kept then.
    """
    kept = _root() / "folders" / key
    if _is_whole(kept):
        return kept / _FILES
    kept = cache_folder("folders") / key
    made = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=kept.parent))
    try:
        (made / _FILES).mkdir()
        make(made / _FILES)
        files.write_new(made / _RECORD, files.json_bytes(_hashes(made / _FILES)))
        files.sync_below(made)
        # another process may have been faster: its files are as good, and may be in use
        if not _is_whole(kept):
            files.replace_folder(made, kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return kept / _FILES


def _root() -> Path:
    try:
        return Path(CACHE).expanduser()
    except RuntimeError:  # this user has no home
        return _folder_of_process()


def _is_whole(kept: Path) -> bool:
    """Whether a kept folder holds exactly the files that it was made with."""
    try:
        stated = files.read_json(kept / _RECORD)
        return bool(stated) and stated == _hashes(kept / _FILES)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, list[int | str]]:
    """Size and sha256 of all files below a folder, by their paths in it."""
    found: dict[str, list[int | str]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            size, sha256 = files.sha256_of(path)
            found[str(path.relative_to(folder))] = [size, sha256]
    return found


@functools.cache
def _folder_of_process() -> Path:
    """A folder that ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="megacp_cache_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
