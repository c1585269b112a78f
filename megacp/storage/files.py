"""Files that other processes may have written, or may be writing: opened, parsed, made, replaced
and locked here.

A pipe, a device or a folder under a file's name is refused before it is read. A size is compared
before the content is read, and a new file never follows a link.
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
"""A file or folder name that cannot lead anywhere else."""

StrPath = str | os.PathLike[str]
TEXT_LIMIT = 64 << 20
"""Bytes of the largest JSON or YAML file that is read as a whole."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a Git LFS pointer begins: a clone without Git LFS has one in place of each large file."""
_LATE = (errno.ENOENT, errno.ESTALE)
"""What a network file system answers for a name that another machine has just made."""


_FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags that open any file without waiting for a writer."""


class TooLargeError(ValueError):
    """A file or an object has more bytes than its reader takes; the message names it."""


def open_regular(path: StrPath, size: int | None = None) -> BufferedReader:
    """Open a regular file for reading bytes; links to regular files count.

    Raises ValueError naming the path when it is a folder, pipe, device or socket, or has not `size`
    bytes; OSError when it cannot be opened. Never waits for a writer.
    """
    return _regular(os.open(path, _FOR_READING), path, size)


def open_below(root: StrPath, path: StrPath) -> BufferedReader:
    """Open a regular file below a folder for reading bytes; both paths are resolved
    (`os.path.realpath`).

    Each part of the path is opened from the folder before it and must not be a link: one that
    somebody puts there after the path was resolved leads nowhere. Raises as `open_regular`, and
    OSError at such a link.
    """
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
    """Return the stream of a descriptor, which is closed when it is not a regular file of this
    size.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{os.fspath(path)} is {_kind(status.st_mode)}, no regular file")
        if size is not None and status.st_size != size:
            raise ValueError(f"{os.fspath(path)} has {status.st_size} bytes, expected {size}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: StrPath, limit: int = TEXT_LIMIT) -> bytes:
    """The whole content of a regular file. Raises like `open_regular`, and TooLargeError above
    `limit` bytes.
    """
    with open_regular(path) as stream:
        return read_within(stream, path, limit)


def read_within(stream: BufferedReader, path: StrPath, limit: int) -> bytes:
    """Read the rest of a file. Raises TooLargeError, which names `path`, above `limit` bytes."""
    if os.fstat(stream.fileno()).st_size <= limit:
        content = stream.read(limit + 1)  # one more byte, as the file may be growing
        if len(content) <= limit:
            return content
    raise TooLargeError(
        f"{os.fspath(path)} has more than {limit:,} bytes, the most that is read of such a file"
    )


def refuse_pointer(path: StrPath) -> None:
    """Raise ValueError for a regular file that holds a Git LFS pointer instead of its own
    content.
    """
    with open_regular(path) as stream:
        begin = stream.read(len(_POINTER))
    if begin == _POINTER:
        raise ValueError(
            f"{os.fspath(path)} is a Git LFS pointer, not the file itself: fetch it with git lfs "
            "pull"
        )


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for text nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: StrPath, limit: int = TEXT_LIMIT) -> Any:
    """`parse_json` of a regular file; ValueError names the path. Raises OSError when it cannot be
    opened.
    """
    content = read_regular(path, limit)
    try:
        return parse_json(content)
    except ValueError as error:
        refuse_pointer(path)
        raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from error


def json_bytes(content: Any) -> bytes:
    """The canonical JSON of a value."""
    return json.dumps(content, sort_keys=True).encode()


def sha256_of_all(*paths: StrPath) -> str:
    """sha256 (hexadecimal) over the hashes of some regular files, in order. Raises like
    `open_regular`.
    """
    digests = [bytes.fromhex(sha256_of(path)[1]) for path in paths]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def sha256_of(path: StrPath, size: int | None = None) -> tuple[int, str]:
    """Size in bytes and sha256 (hexadecimal) of a regular file. Raises like `open_regular`."""
    with open_regular(path, size) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def open_own(path: StrPath, flags: int) -> int:
    """A descriptor of a file that is ours to write, made where there is none (`flags`: os.O_RDWR,
    os.O_APPEND, ...).

    Raises ValueError where a link, a folder, a pipe or a device stands.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise ValueError(
                f"{os.fspath(path)} is a link, which is not written through: remove it"
            )
        if not stat.S_ISREG(mode):
            raise ValueError(
                f"{os.fspath(path)} is {_kind(mode)}, no regular file: choose another path"
            )
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)


def require_free(flag: str, path: StrPath, overwrite: bool = False) -> None:
    """Raise ValueError, which names the flag, unless a command may write its result at this path.

    Nothing may be there, or, with `overwrite`, a regular file. A link is never written through.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    name = os.fspath(path)
    if stat.S_ISLNK(mode):
        raise ValueError(
            f"{flag} {name} is a link, which is not written through: remove it or choose another "
            "path"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(f"{flag} {name} is {_kind(mode)}, not a regular file: choose another path")
    if not overwrite:
        raise ValueError(
            f"{flag} {name} exists; nothing was overwritten, give --overwrite to replace it"
        )


def write_result(flag: str, path: StrPath, data: bytes, overwrite: bool = False) -> None:
    """Write the result of a command, and the folders above it. Raises as `require_free`, and
    OSError.
    """
    require_free(flag, path, overwrite)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if overwrite:
        write_atomically(path, data)
    else:
        write_new(path, data)


def write_new(path: StrPath, data: bytes) -> None:
    """Make a file that does not exist, with this content, and wait until it is on disk. Raises like
    `new_file`.
    """
    with new_file(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def new_file(path: StrPath, seconds: float = 0.0) -> Iterator[BufferedWriter]:
    """A stream into a file that does not exist; it is on disk when the body ends without an error.

    Raises FileExistsError, also where a link stands; a folder that does not exist is waited for
    `seconds`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(seen(lambda: os.open(path, flags, 0o644), seconds), "wb") as stream:
        yield stream
        sync_file(stream)


def write_atomically(path: StrPath, data: bytes) -> None:
    """Replace `path` by `data`: a reader, also after a crash, sees the old or the new content,
    never a part.
    """
    with replacement(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def replacement(path: StrPath) -> Iterator[BufferedWriter]:
    """A stream whose content replaces `path` when the body ends without an error, as by
    `write_atomically`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
    try:
        with new_file(temporary) as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_file(stream: IO[bytes]) -> None:
    """Wait until what was written to the stream is on disk."""
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
    """Wait until all regular files and folders below a folder are on disk, for files that others
    have written.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(place)


def place_folder(folder: StrPath, target: StrPath) -> None:
    """Rename a folder of files that are on disk; its entries and its new name are on disk
    afterwards, too.
    """
    sync_folder(folder)
    os.replace(folder, target)
    sync_folder(Path(target).parent)


def rename(path: StrPath, target: StrPath) -> None:
    """Give a file or folder another name. After a crash it may have the old one."""
    os.replace(path, target)


def replace_folder(folder: StrPath, target: StrPath) -> None:
    """Rename a folder as `place_folder` does; whatever is at `target`, a file or a link too, is
    removed.
    """
    folder, target = Path(folder), Path(target)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.old")
    # a rename replaces no file and no folder with content
    with contextlib.suppress(FileNotFoundError):
        os.replace(target, aside)
    try:
        place_folder(folder, target)
    finally:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def seen(action: Callable[[], _T], seconds: float = 10.0) -> _T:
    """`action`, tried again for `seconds` while it finds no such file: another machine's file may
    be seen late.
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
    """The file system has no locks."""


def lock(path: StrPath, shared: bool = False) -> int:
    """Take the POSIX record lock of a file, made where there is none; the descriptor that holds it
    until it is closed.

    `shared`: beside others that share it.

    Raises BlockingIOError when another process holds it, NoLocksError where the file system has no
    locks, ValueError where a link or no regular file stands. The file is never removed: a lock on a
    file without a name keeps nobody out.
    """
    descriptor = open_own(path, os.O_RDWR)
    try:
        fcntl.lockf(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as taken:  # systems differ in which
        os.close(descriptor)
        raise BlockingIOError(taken.errno, "another process holds the lock") from taken
    except OSError as error:
        os.close(descriptor)
        raise NoLocksError(error.errno, error.strerror) from error
    return descriptor


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def source_digest() -> str:
    """sha256 over the package's Python files: one machine with an older copy would compute
    something else.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
