"""Who failed first: each rank leaves its reason in the run's store, and a rank that was only hit names the others.

The store is no part of a collective, so it mostly answers when none does; a rank that was stopped, killed or hangs is
found by its silence. The report has a deadline, since a store on a frozen machine never answers.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch.distributed as dist

from megacp.core.distributed.grid import Axis
from megacp.core.storage.wording import listed

_ROOM = "megacp_failure"
_SHOWN = 16
"""Ranks that a message names before it only counts."""


def report_failure(error: BaseException, place: str, world: Axis, wait_seconds: float = 5.0) -> str:
    """Leave this rank's reason for the others; what is known of the failure in words, at `place` (`step 12`).

    A RuntimeError may come from a collective that a peer broke: then up to `wait_seconds` are spent to hear from the
    others, and those that say nothing are named. Never raises.
    """
    mine = f"rank {world.rank} failed in {place}: {type(error).__name__}: {_first_line(error)}"
    if world.size == 1 or not dist.is_initialized():
        return mine
    said: list[str] = []

    def exchange() -> None:
        with contextlib.suppress(Exception):  # the store went with the rank or machine that held it
            said.append(_exchanged(mine, error, place, world, wait_seconds))

    # a frozen machine's store answers no request, and torch's own timeouts do not cover `check` and `set`
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(3.0 * wait_seconds)
    return said[0] if said else f"{mine}\nthe run's store does not answer"


def _exchanged(mine: str, error: BaseException, place: str, world: Axis, seconds: float) -> str:
    """This rank's words and those of the others."""
    store = run_store()
    store.set(f"{_ROOM}/{world.rank}", mine)
    if not (type(error) is RuntimeError or isinstance(error, dist.DistError)):  # no collective raises it
        return mine
    others = [rank for rank in range(world.size) if rank != world.rank]
    heard: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while len(heard) < len(others) and time.monotonic() < deadline:
        spoken = [rank for rank in others if rank not in heard and store.check([f"{_ROOM}/{rank}"])]
        heard |= {rank: store.get(f"{_ROOM}/{rank}").decode() for rank in spoken}
        time.sleep(0.05)
    lines = [mine, *(text for _, text in sorted(heard.items()))]
    if silent := [rank for rank in others if rank not in heard]:
        lines.append(f"no word from {named(silent)} in {place}: stopped, dead, or still computing")
    if world.rank == 0:
        time.sleep(min(1.0, seconds))  # it may hold the store: the others read it
    return "\n".join(lines)


def run_store() -> dist.Store:
    """The store in which all ranks of the process group meet."""
    return dist.distributed_c10d._get_default_store()


def named(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 3`; of many the first ones and how many more."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks, _SHOWN)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]
