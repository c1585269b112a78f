"""Wait for all ranks of an axis without a collective: as long as the caller says, not as long as the group allows.

Key property: a rank that is slow but alive is waited for up to the limit, then named. A rank that failed or was killed
ends the wait at once, a frozen one after the group's timeout. Rejected: a barrier, which ends the run when a disk is
slower than `--distributed-timeout-minutes`, and longer timeouts for all groups, which find real hangs late.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from megacp.core.distributed.failure_report import last_words
from megacp.core.distributed.grid import Axis
from megacp.core.distributed.meeting import within
from megacp.core.distributed.restart_store import named
from megacp.core.distributed.watch import ROOM, group_name, run_store

SILENT_SECONDS = 30.0
"""A rank that answered and gives no sign of life for so long is taken for dead; signs come every five seconds."""
_MARGIN = 30.0
_LOOKING, _AFTER_THEM = 2, 5.0
"""Ranks that look after the late ones, the first to arrive; seconds after which the others would do it themselves."""


class LateError(RuntimeError):
    """Some ranks did not arrive; the message names them, what they were at, and the limit."""


def wait_for_all(axis: Axis, seconds: float, what: str) -> None:
    """Return once every rank of the axis has called it alike; raises LateError after `seconds`, naming the late ones.

    `what` is what the ranks were doing, for the message: `writing files`.
    """
    if axis.size == 1:
        return
    number = axis.calls.waits
    axis.calls.waits += 1

    def wait() -> None:
        store, rooms = run_store(), f"megacp_wait/{group_name(axis)}"
        if number:  # everybody has arrived there, or nobody would be here
            store.delete_key(f"{rooms}/{number - 1}/{axis.rank}")
        _wait(store, f"{rooms}/{number}", axis, seconds, what)

    try:
        within(seconds + _MARGIN, wait)
    except TimeoutError as silence:
        raise LateError(f"waiting for {what}: {silence}: the store of the run is frozen or gone") from silence
    except dist.DistError as lost:
        raise LateError(f"waiting for {what}: the store of the run is gone") from lost


def _wait(store: dist.Store, room: str, axis: Axis, seconds: float, what: str) -> None:
    """Arrive, then look for the last one."""
    store.set(f"{room}/{axis.rank}", "")
    arrived = store.add(f"{room}/count", 1)
    if arrived == axis.size:
        store.set(f"{room}/all", "")
    looks = arrived <= _LOOKING  # with every rank looking at every other the store would do nothing else
    deadline, pause = time.monotonic() + seconds + (0.0 if looks else _AFTER_THEM), 0.002
    beats: dict[int, tuple[int, float]] = {}
    looked = time.monotonic()
    while not store.check([f"{room}/all"]) or store.check([f"{room}/given_up"]):
        now = time.monotonic()
        if store.check([f"{room}/given_up"]):
            raise LateError(store.get(f"{room}/given_up").decode())
        if now >= deadline:
            late = [axis.global_ranks[place] for place in _late(store, room, axis)]
            store.set(f"{room}/given_up", f"{named(late)}{_hosts(store, late)} still {what} after {seconds:g} s")
            continue
        if looks and now - looked > 1.0:
            looked = now
            if dead := _dead(store, axis, _late(store, room, axis), beats, what):
                store.set(f"{room}/given_up", dead)
                continue
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)


def _late(store: dist.Store, room: str, axis: Axis) -> list[int]:
    return [rank for rank in range(axis.size) if not store.check([f"{room}/{rank}"])]


def _hosts(store: dist.Store, ranks: list[int]) -> str:
    """` (on HOST)` for the ranks that are watched."""
    keys = [f"{ROOM}/host/{rank}" for rank in ranks]
    hosts = sorted({store.get(key).decode() for key in keys if store.check([key])})
    return f" (on {', '.join(hosts)})" if hosts else ""


def _dead(store: dist.Store, axis: Axis, late: list[int], beats: dict[int, tuple[int, float]], what: str) -> str:
    """What is known of a late rank that failed or shows no sign of life; `beats` is when its count last changed."""
    now = time.monotonic()
    for rank in [axis.global_ranks[place] for place in late]:
        if words := last_words(store, rank):
            return f"{what}: {words}"
        if not store.check([f"{ROOM}/beat/{rank}"]):
            continue  # it is not watched
        count = store.add(f"{ROOM}/beat/{rank}", 0)
        if beats.setdefault(rank, (count, now))[0] != count:
            beats[rank] = (count, now)
        if now - beats[rank][1] > SILENT_SECONDS:
            return f"rank {rank} shows no sign of life while {what}: killed, stopped, or cut off"
    return ""
