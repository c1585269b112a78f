"""One action on all ranks: all succeed, or all raise the same error with the reasons of those that
failed.
"""

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

    Raises `error` on all ranks if the action raised on any of them, or if a rank is lost or late.
    """
    result: _T | None = None
    own: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks wait to hear of it
        own = raised
    if isinstance(world, WorldAxis) and world.host is not None:
        _await_files(world.host, error)
    outcomes = gather_objects((result, None if own is None else reason_of(own)), world)
    failures: dict[str, list[int]] = {}
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            failures.setdefault(why, []).append(rank)
    if failures:
        lines = (f"rank {', '.join(map(str, ranks))}: {why}" for why, ranks in failures.items())
        raise error("; ".join(lines)) from own
    return [value for value, _ in outcomes]


def _await_files(host: HostGroup, error: type[Exception]) -> None:
    """Wait for ranks whose files take longer than the timeout of collectives; `error` says which
    rank did not come.

    The wait does not use the run's store, which may have gone with torchrun's agent while its ranks
    continue and save.
    """
    begun = time.monotonic()
    try:
        await_all(host)
    except RuntimeError as missed:
        why = str(missed).partition("\n")[0]
        is_lost = time.monotonic() - begun < host.seconds
        raise error(
            f"a {'rank was lost' if is_lost else 'rank, disk or network is slow'}: not all ranks "
            "have read or written "
            f"their part of a checkpoint within {host.seconds:g} s (6 x "
            f"--distributed-timeout-minutes): {why}"
        ) from missed


def on_rank_0(world: Axis, action: Callable[[], _T], error: type[Exception]) -> _T:
    """Run `action` on rank 0 only; its result on every rank, or `error` on all ranks."""
    result = on_all_ranks(world, lambda: action() if world.rank == 0 else None, error)[0]
    return result  # type: ignore[return-value]  # the first rank has an action


def sharers(files: Iterable[Place], world: Axis) -> list[int]:
    """Return the ranks that see the same local files as this one, on the same machine; it is one of
    them.

    The files decide, not their folder: a container or a bind mount may put another file into a
    folder that two ranks share, and copies of one folder on two disks may have equal numbers. A
    file's number with its size and times is that of one file. Files in a store are the same for
    all.
    """
    local = sorted({file for file in files if isinstance(file, Path)})
    found: list[str] = []
    if local:
        boot = Path("/proc/sys/kernel/random/boot_id")  # for machines of one name
        found = [socket.gethostname(), boot.read_text() if boot.exists() else ""]
    for path in local:
        try:
            one = path.stat()
        except OSError:  # it is reported where it is read
            found.append("missing")
            continue
        found.append(f"{one.st_dev} {one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}")
    own = hashlib.sha256(
        "\n".join(found).encode()
    ).hexdigest()  # a checkpoint has a file of each rank
    return [rank for rank, other in enumerate(gather_objects(own, world)) if other == own]


def reason_of(error: BaseException) -> str:
    """Why something failed, in words.

    An operating-system error below it is what counts: torch's archive writer turns a full disk into
    a RuntimeError that says where in the archive it was.
    """
    cause: BaseException | None = error if isinstance(error, (OSError, RuntimeError)) else None
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            where = f" {cause.filename}" if cause.filename else ""
            return (
                f"{os.strerror(cause.errno)} "
                f"({errno.errorcode.get(cause.errno, cause.errno)}){where}"
            )
        cause = cause.__cause__ or cause.__context__
    known = isinstance(error, (ValueError, RuntimeError)) and str(error)
    return str(error) if known else f"{type(error).__name__}: {error}"
