"""A rank that the grid has no place for: it waits until the others are through, and ends as they do.

Key property: it stays in the launcher's world, so a later restart may use it, and it ends with the status of the run.
Rejected: an immediate exit, after which torchrun closes the meeting and the run cannot be restarted.
"""

from __future__ import annotations

import signal
import time

import torch.distributed as dist

from megacp.core.distributed.failure import within
from megacp.core.distributed.meeting import Meeting

_KEY = "megacp_over"
_FAILED = 1


def wait_as_spare(meeting: Meeting) -> int:
    """The exit status of the run, once it has one; signals that ask a run to stop are left to its ranks."""
    assert meeting.store is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        while not meeting.store.check([_KEY]):
            time.sleep(0.5)
        status = int(meeting.store.get(_KEY))
        meeting.store.add(f"{_KEY}/read", 1)
    except dist.DistError:
        return _FAILED
    return status


def tell_spares(meeting: Meeting, used: int, status: int, seconds: float = 5.0) -> None:
    """Tell the ranks from `used` on how the run ended, and let them read it: rank 0 may hold the store."""
    spares = meeting.size - used
    if meeting.rank != 0 or spares <= 0 or meeting.store is None:
        return
    store = meeting.store

    def tell() -> None:
        store.set(_KEY, str(status))
        deadline = time.monotonic() + seconds
        while store.add(f"{_KEY}/read", 0) < spares and time.monotonic() < deadline:
            time.sleep(0.05)

    try:
        within(2 * seconds, tell)
    except (TimeoutError, dist.DistError):
        return  # their launcher ends them
