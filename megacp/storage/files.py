"""Open, parse, write, replace and lock files that other processes may also use.

A pipe, device or folder in place of a file is rejected before it is read. Sizes are compared before
contents are read, and writes never follow links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import IO, Any, TypeVar

_T = TypeVar("_T")

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""A file or folder name that stays in its folder."""

StrPath = str | os.PathLike[str]
TEXT_LIMIT = 64 << 20
"""Maximum size in bytes of JSON and YAML files, which are read as a whole."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer, which replaces each large file in a clone without Git LFS."""
_LATE = (errno.ENOENT, errno.ESTALE)
"""Errors of network file systems for a name that another machine has just created."""


_FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags that open any file, without waiting for another process to open a pipe for writing."""


class TooLargeError(ValueError):
    """A file or an object exceeds its reader's size limit; the message contains its name."""


def open_regular(path: StrPath, size: int | None = None) -> BufferedReader:
    """Open a regular file, or a link to one, for reading bytes. Never wait for a writer.

    Raise ValueError with the path if it is a folder, pipe, device or socket, or does not have
    `size` bytes. Raise OSError if it cannot be opened.
    """
    return _regular(os.open(path, _FOR_READING), path, size)


def open_below(root: StrPath, path: StrPath) -> BufferedReader:
    """Open a regular file below a folder for reading bytes.

    Both paths must be resolved (`os.path.realpath`). Each part of the path is opened relative to
    its folder and must not be a link. A link created after the path was resolved is therefore
    never followed.

    Raise the errors of `open_regular`, and OSError for a link.
    """
    # open folder by folder, each relative to the previous descriptor
    *folders, name = os.path.relpath(path, root).split(os.sep)
    if os.pardir in (*folders, name):
        raise ValueError(f"{os.fspath(path)} is not below {os.fspath(root)}")
    descriptor = os.open(root, _FOR_READING | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for folder in folders:
            inner = os.open(
                folder, _FOR_READING | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor
            )
            os.close(descriptor)
            descriptor = inner
        found = os.open(name, _FOR_READING | os.O_NOFOLLOW, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return _regular(found, path, None)


def _regular(descriptor: int, path: StrPath, size: int | None) -> BufferedReader:
    """Return a stream for a descriptor, or close it if it is not a regular file of this size.

    Raise the errors of `open_regular`.
    """
    # close the descriptor on any error, because no stream owns it yet
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{os.fspath(path)} is {_kind(status.st_mode)}, not a regular file")
        if size is not None and status.st_size != size:
            raise ValueError(f"{os.fspath(path)} has {status.st_size} bytes, expected {size}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: StrPath, limit: int = TEXT_LIMIT) -> bytes:
    """Return the content of a regular file.

    Raise the errors of `open_regular`, and TooLargeError above `limit` bytes.
    """
    with open_regular(path) as stream:
        return read_within(stream, path, limit)


def read_within(stream: BufferedReader, path: StrPath, limit: int) -> bytes:
    """Return a file's remaining content. Raise TooLargeError with `path` above `limit` bytes."""
    if os.fstat(stream.fileno()).st_size <= limit:
        content = stream.read(limit + 1)  # one more byte, because the file may be growing
        if len(content) <= limit:
            return content
    raise TooLargeError(f"{os.fspath(path)} has more than {limit:,} bytes, the limit for this file")


def refuse_pointer(path: StrPath) -> None:
    """Raise ValueError if a regular file is a Git LFS pointer instead of the actual content."""
    with open_regular(path) as stream:
        begin = stream.read(len(_POINTER))
    if begin == _POINTER:
        raise ValueError(
            f"{os.fspath(path)} is a Git LFS pointer, not the file itself: fetch it with git lfs "
            "pull"
        )


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: StrPath, limit: int = TEXT_LIMIT) -> Any:
    """Return the value of a JSON file.

    Raise ValueError with the path if it is not valid JSON, and OSError if it cannot be opened.
    """
    content = read_regular(path, limit)
    try:
        return parse_json(content)
    except ValueError as error:
        refuse_pointer(path)
        raise ValueError(f"{os.fspath(path)} is not valid JSON: {error}") from error


def json_bytes(content: Any) -> bytes:
    """Return the canonical JSON of a value."""
    return json.dumps(content, sort_keys=True).encode()


def sha256_of_all(*paths: StrPath) -> str:
    """Return the sha256 (hexadecimal) of the hashes of some regular files, in order.

    Raise the errors of `open_regular`.
    """
    # hash the binary digests, so that the result does not depend on their text form
    digests = [bytes.fromhex(sha256_of(path)[1]) for path in paths]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def sha256_of(path: StrPath, size: int | None = None) -> tuple[int, str]:
    """Return the size in bytes and the sha256 (hexadecimal) of a regular file.

    Raise the errors of `open_regular`.
    """
    with open_regular(path, size) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def open_own(path: StrPath, flags: int) -> int:
    """Open a file for writing, create it if it does not exist, and return its descriptor.

    `flags` are, for example, os.O_RDWR or os.O_APPEND. Raise ValueError if the path is a link, a
    folder, a pipe or a device.
    """
    # lstat does not follow links; O_NOFOLLOW below excludes a link that is created meanwhile
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise ValueError(
                f"{os.fspath(path)} is a symbolic link, and links are not followed for writing: "
                "remove it"
            )
        if not stat.S_ISREG(mode):
            raise ValueError(
                f"{os.fspath(path)} is {_kind(mode)}, not a regular file: choose another path"
            )
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)


def require_free(flag: str, path: StrPath, overwrite: bool = False) -> None:
    """Raise ValueError with the flag unless a command may write its result to this path.

    The path must not exist; with `overwrite` it may be a regular file. Links are never followed.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    name = os.fspath(path)
    if stat.S_ISLNK(mode):
        raise ValueError(
            f"{flag} {name} is a symbolic link, and links are not followed for writing: remove it "
            "or choose another path"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(f"{flag} {name} is {_kind(mode)}, not a regular file: choose another path")
    if not overwrite:
        raise ValueError(
            f"{flag} {name} exists; nothing was overwritten; use --overwrite to replace it"
        )


def write_result(flag: str, path: StrPath, data: bytes, overwrite: bool = False) -> None:
    """Write the result of a command, creating its folder if necessary.

    Raise the errors of `require_free`, and OSError.
    """
    # nothing is created before the path has been checked
    require_free(flag, path, overwrite)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if overwrite:
        write_atomically(path, data)
    else:
        write_new(path, data)


def write_new(path: StrPath, data: bytes) -> None:
    """Create a file with this content, and wait until it is on disk; see `new_file` for errors."""
    with new_file(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def new_file(path: StrPath, seconds: float = 0.0) -> Iterator[BufferedWriter]:
    """Yield a stream to a new file, which is on disk once the body ends without an error.

    Raise FileExistsError if the path exists, even as a link. If the folder does not exist,
    wait up to `seconds` for it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # a folder that another machine has created may become visible late
    with os.fdopen(seen(lambda: os.open(path, flags, 0o644), seconds), "wb") as stream:
        yield stream
        sync_file(stream)


def write_atomically(path: StrPath, data: bytes) -> None:
    """Replace the content of `path`.

    Readers get either the old or the new content, even after a crash, and never part of it.
    """
    with replacement(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def replacement(path: StrPath) -> Iterator[BufferedWriter]:
    """Yield a stream whose content replaces `path` once the body ends without an error.

    The replacement is atomic, as in `write_atomically`.
    """
    path = Path(path)
    # in the same folder, because a rename is atomic only within a file system
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
    try:
        with new_file(temporary) as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # the new name survives a crash only after its folder is on disk
    sync_folder(path.parent)


def sync_file(stream: IO[bytes]) -> None:
    """Wait until all data written to the stream is on disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: StrPath) -> None:
    """Wait until the folder's entries (new names, renames) are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: StrPath) -> None:
    """Wait until all regular files and folders below a folder are on disk.

    Use this function for files that other code has written.
    """
    # files first, then the entries of their folder
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(place)


def place_folder(folder: StrPath, target: StrPath) -> None:
    """Rename a folder whose files are on disk, and wait until its entries and new name are too."""
    sync_folder(folder)
    os.replace(folder, target)
    sync_folder(Path(target).parent)


def rename(path: StrPath, target: StrPath) -> None:
    """Rename a file or folder; after a crash, it may have its old name again."""
    os.replace(path, target)


def replace_folder(folder: StrPath, target: StrPath) -> None:
    """Rename a folder as `place_folder` does, replacing any file, link or folder at `target`."""
    folder = Path(folder)
    target = Path(target)
    # a rename cannot replace a file or a non-empty folder, so move the old target aside
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.old")
    with contextlib.suppress(FileNotFoundError):
        os.replace(target, aside)
    try:
        place_folder(folder, target)
    finally:
        # the old target may have been a folder, a file or a link
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def seen(action: Callable[[], _T], seconds: float = 10.0) -> _T:
    """Return the result of `action`, retried for `seconds` while a file is not found.

    Files that another machine has created may become visible late.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in _LATE or time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


class NoLocksError(OSError):
    """The file system does not support locks."""


def lock(path: StrPath, shared: bool = False) -> int:
    """Lock a file, created if necessary, and return the descriptor that owns the lock.

    The lock is a POSIX record lock and lasts until the descriptor is closed. `shared` locks exclude
    only exclusive locks. The file is never removed, because a lock on an unlinked file excludes no
    other process.

    Raise BlockingIOError if another process has the lock, NoLocksError if the file system does not
    support locks, and ValueError if the path is a link or not a regular file.
    """
    descriptor = open_own(path, os.O_RDWR)
    try:
        # never wait for the lock
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as taken:  # depends on the system
        os.close(descriptor)
        raise BlockingIOError(taken.errno, "another process holds the lock") from taken
    except OSError as error:
        os.close(descriptor)
        raise NoLocksError(error.errno, error.strerror) from error
    return descriptor


def _kind(mode: int) -> str:
    """Return the kind of a file that is not regular, for messages."""
    # only devices are missing in this table
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def source_digest() -> str:
    """Return a hash of the package's Python files, to detect machines with a different version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        # zero bytes separate names and contents
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
