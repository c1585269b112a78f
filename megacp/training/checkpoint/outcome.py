"""Actions on all ranks: either all ranks succeed, or all raise the same error with all reasons."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from megacp.distributed.collectives import await_all, gather_objects
from megacp.distributed.grid import Axis, HostGroup, WorldAxis
from megacp.storage.place import Place

_T = TypeVar("_T")


def on_all_ranks(world: Axis, action: Callable[[], _T], error: type[Exception]) -> list[_T]:
    """Run `action` on every rank and return its results in rank order.

    Raise `error` on all ranks if the action failed on any of them, or if a rank is lost or late.
    """
    result: _T | None = None
    own: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # any error, because the other ranks wait for this rank's outcome
        own = raised
    if isinstance(world, WorldAxis) and world.host is not None:
        _await_files(world.host, error)
    outcome = (result, None if own is None else reason_of(own))
    outcomes = gather_objects(outcome, world)
    # group by reason, so that an error on all ranks is reported once
    failures: dict[str, list[int]] = {}
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            failures.setdefault(why, []).append(rank)
    if failures:
        lines = []
        for why, ranks in failures.items():
            lines.append(f"rank {', '.join(map(str, ranks))}: {why}")
        raise error("; ".join(lines)) from own
    return [value for value, _ in outcomes]


def _await_files(host: HostGroup, error: type[Exception]) -> None:
    """Wait for ranks whose file access may take longer than the timeout of collectives.

    Raise `error`, which names a missing rank, if they take too long. The wait does not use the
    run's store, which may end with torchrun's agent while the ranks still save.
    """
    begun = time.monotonic()
    try:
        await_all(host)
    except RuntimeError as missed:
        why = str(missed).partition("\n")[0]
        is_lost = time.monotonic() - begun < host.seconds
        cause = "rank was lost" if is_lost else "rank, disk or network is slow"
        raise error(
            f"a {cause}: not all ranks have read or written their part of a checkpoint within "
            f"{host.seconds:g} s (6 x --distributed-timeout-minutes): {why}"
        ) from missed


def on_rank_0(world: Axis, action: Callable[[], _T], error: type[Exception]) -> _T:
    """Run `action` only on rank 0, and return its result or raise `error` on all ranks."""
    result = on_all_ranks(world, lambda: action() if world.rank == 0 else None, error)[0]
    return result  # type: ignore[return-value]  # rank 0 ran the action


def sharers(files: Iterable[Place], world: Axis) -> list[int]:
    """Return the ranks on this machine that use the same local files, including this rank.

    Files are compared instead of folders: a container or a bind mount may replace a file in a
    folder that two ranks share, and copies of a folder on two disks may have equal inode numbers.
    An inode number together with size and times identifies a file. Files in an object store are the
    same for all ranks.
    """
    local = sorted({file for file in files if isinstance(file, Path)})
    found: list[str] = []
    if local:
        boot = Path("/proc/sys/kernel/random/boot_id")  # two machines may have the same host name
        found = [socket.gethostname(), boot.read_text() if boot.exists() else ""]
    for path in local:
        try:
            one = path.stat()
        except OSError:  # reported when the file is read
            found.append("missing")
            continue
        found.append(f"{one.st_dev} {one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}")
    # exchange only a hash, because the list has as many files as the run has ranks
    own = hashlib.sha256("\n".join(found).encode()).hexdigest()
    return [rank for rank, other in enumerate(gather_objects(own, world)) if other == own]


def reason_of(error: BaseException) -> str:
    """Return the reason for an error, as text.

    An underlying operating-system error takes precedence: for example, if the disk is full, torch's
    archive writer raises a RuntimeError that contains only a position in the archive.
    """
    cause: BaseException | None = error if isinstance(error, (OSError, RuntimeError)) else None
    while cause is not None:
        # errors without a number, such as io.UnsupportedOperation, have only a message
        if isinstance(cause, OSError) and cause.errno is not None:
            where = f" {cause.filename}" if cause.filename else ""
            return (
                f"{os.strerror(cause.errno)} "
                f"({errno.errorcode.get(cause.errno, cause.errno)}){where}"
            )
        cause = cause.__cause__ or cause.__context__
    known = isinstance(error, (ValueError, RuntimeError)) and str(error)
    return str(error) if known else f"{type(error).__name__}: {error}"
