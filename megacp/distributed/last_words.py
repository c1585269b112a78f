"""Who failed first: each rank leaves its reason in the run's store, and one that was only hit by it names the others.

Key property: the store is a process or file of its own, so it answers when no collective does, and a rank that was
stopped, killed or hangs is found by its silence. Rejected: `monitored_barrier`, which needs the connections that have
just broken.
"""

from __future__ import annotations

import datetime
import time

import torch.distributed as dist

from megacp.distributed.grid import Axis


def last_words(error: BaseException, place: str, world: Axis, wait_seconds: float = 5.0) -> str:
    """Leave this rank's reason for the others; what is known of the failure, in words. Never raises.

    A RuntimeError may come from a collective that a peer broke: then up to `wait_seconds` are spent to hear from the
    others, and those that say nothing are named. `place` is for example `step 12`.
    """
    mine = f"rank {world.rank} failed in {place}: {type(error).__name__}: {_first_line(error)}"
    if world.size == 1 or not dist.is_initialized():
        return mine
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(datetime.timedelta(seconds=wait_seconds))
        store.set(f"megacp_last_words/{world.rank}", mine)
        if not _may_be_a_peers(error):
            return mine
        others = _heard(store, [rank for rank in range(world.size) if rank != world.rank], wait_seconds)
    except Exception as silence:  # the store went with the rank or machine that held it
        return f"{mine}\nthe run's store does not answer either: {_first_line(silence)}"
    lines = [text for text in others.values() if text]
    silent = [str(rank) for rank, text in others.items() if text is None]
    if silent:
        word = "rank" if len(silent) == 1 else "ranks"
        lines.append(f"no word from {word} {', '.join(silent)} in {place}: stopped, dead, or still computing")
    return "\n".join([mine, *lines])


def _may_be_a_peers(error: BaseException) -> bool:
    """Whether a collective may have raised it."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _heard(store: dist.Store, ranks: list[int], seconds: float) -> dict[int, str | None]:
    """The words of other ranks, None of those that have left none after `seconds`."""
    heard: dict[int, str | None] = dict.fromkeys(ranks)
    deadline = time.monotonic() + seconds
    while None in heard.values() and time.monotonic() < deadline:
        for rank in [rank for rank, text in heard.items() if text is None]:
            key = f"megacp_last_words/{rank}"
            if store.check([key]):
                heard[rank] = store.get(key).decode()
        time.sleep(0.05)
    return heard


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]
