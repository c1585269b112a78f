"""Who failed first: each rank leaves its reason in the run's store, and a rank that was only hit names the others.

Key property: the store is a process or file of its own, so it answers when no collective does. A rank that was stopped,
killed or hangs is found by its silence. After a timeout one rank also asks all others for their calls and stacks. The
report has a deadline, since a store on a frozen machine never answers.
"""

from __future__ import annotations

import json
import time
import traceback

import torch.distributed as dist

from megacp.core.distributed.grid import Axis
from megacp.core.distributed.hang_report import report
from megacp.core.distributed.meeting import within
from megacp.core.distributed.restart_store import named
from megacp.core.distributed.watch import ask_all, frames, run_store

_ROOM = "megacp_failure"


def report_failure(error: BaseException, place: str, world: Axis, wait_seconds: float = 5.0) -> str:
    """Leave this rank's reason for the others; what is known of the failure, in words. Never raises.

    A RuntimeError may come from a collective that a peer broke: then up to `wait_seconds` are spent to hear from the
    others, and those that say nothing are named. `place` is for example `step 12`. Returns after three times
    `wait_seconds` at the latest.
    """
    mine = f"rank {world.rank} failed in {place}: {type(error).__name__}: {_first_line(error)}"
    if world.size == 1 or not dist.is_initialized():
        return mine
    try:
        return within(3.0 * wait_seconds, lambda: _exchanged(mine, error, place, world, wait_seconds))
    except TimeoutError as silence:
        return f"{mine}\nthe run's store: {silence}: its machine is stopped, cut off or very busy"
    except Exception as silence:  # the store went with the rank or machine that held it
        return f"{mine}\nthe run's store does not answer either: {_first_line(silence)}"


def _exchanged(mine: str, error: BaseException, place: str, world: Axis, seconds: float) -> str:
    """This rank's words and those of the others."""
    store, begun = run_store(), time.monotonic()
    store.set(f"{_ROOM}/stack/{world.rank}", json.dumps(frames(traceback.extract_tb(error.__traceback__))))
    store.set(f"{_ROOM}/{world.rank}", mine)
    if not _may_be_a_peers(error):
        store.set(f"{_ROOM}/done/{world.rank}", "")
        return mine
    asks = _is_a_timeout(error) and store.add(f"{_ROOM}/asked", 1) == 1
    ranks = list(range(world.size))
    answers = ask_all(store, ranks, f"of rank {world.rank}", seconds) if asks else {}
    others = _heard(store, [rank for rank in ranks if rank != world.rank], seconds)
    lines = [text for text in others.values() if text]
    silent = [rank for rank, text in others.items() if text is None]
    if silent:
        lines.append(f"no word from {named(silent)} in {place}: stopped, dead, or still computing")
    for rank in [rank for rank in answers if others.get(rank, mine)]:  # where it failed, not where it reports that
        answers[rank]["stack"] = json.loads(store.get(f"{_ROOM}/stack/{rank}"))
    if answers:
        lines.append(report(answers, [rank for rank in ranks if rank not in answers]))
    elif _is_a_timeout(error) and not asks:
        lines.append("the rank that gave up first tells what all ranks were doing")
    store.set(f"{_ROOM}/done/{world.rank}", "")
    if world.rank == 0:  # it may hold the store
        _until_others_are_done(store, world.size, begun + 2.8 * seconds)
    return "\n".join([mine, *lines])


def _until_others_are_done(store: dist.Store, size: int, deadline: float) -> None:
    """Wait for the ranks that have failed too and still ask or listen; those of no word are not waited for."""
    late = list(range(1, size))
    while late and time.monotonic() < deadline:
        late = [rank for rank in late if last_words(store, rank) and not store.check([f"{_ROOM}/done/{rank}"])]
        time.sleep(0.05)


def last_words(store: dist.Store, rank: int) -> str | None:
    """Why a rank failed, where it has said so."""
    key = f"{_ROOM}/{rank}"
    return store.get(key).decode() if store.check([key]) else None


def _may_be_a_peers(error: BaseException) -> bool:
    """Whether a collective may have raised it."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _is_a_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return _may_be_a_peers(error) and ("timed out" in text or "timeout" in text)


def _heard(store: dist.Store, ranks: list[int], seconds: float) -> dict[int, str | None]:
    """The words of other ranks, None of those that have left none after `seconds`."""
    heard: dict[int, str | None] = dict.fromkeys(ranks)
    deadline = time.monotonic() + seconds
    while None in heard.values() and time.monotonic() < deadline:
        for rank in [rank for rank, text in heard.items() if text is None]:
            heard[rank] = last_words(store, rank)
        time.sleep(0.05)
    return heard


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]
