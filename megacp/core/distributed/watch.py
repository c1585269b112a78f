"""A thread in each rank that answers while the rank itself hangs: its stack, its calls, and that it lives.

Key property: the thread has a connection of its own to the run's store and takes part in no collective. So any rank may
ask all others what they are doing. Between questions it costs one small request a second. Rejected: signals, which
reach one machine only, and a hook in the step loop, which a hang never reaches.

NCCL ends the process itself when a collective takes too long, and no failure report is written then. So on NCCL the
first rank that has made no call for most of the timeout asks and prints, while all are still there.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist

from megacp.core.distributed.grid import Axis, ProcessGrid
from megacp.core.distributed.hang_report import report

ROOM = "megacp_watch"
_PERIOD = 1.0
"""Seconds between two looks at the store."""
_BEATS = 5
"""Looks between two signs of life."""
_FRAMES = 12
"""Innermost frames of a stack that are told."""


class Watch:
    """Answers for this rank from `with` to its end; nothing for a run of one rank.

    with Watch(grid):
        train()

    `stall_seconds`: without a call for so long, one rank prints what all are doing; None never does.
    """

    def __init__(self, grid: ProcessGrid, stall_seconds: float | None = None) -> None:
        self._grid, self._stall_seconds = grid, stall_seconds
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._made, self._since = 0, time.monotonic()

    def __enter__(self) -> Watch:
        if self._grid.world.size > 1:
            self._thread = threading.Thread(target=self._serve, args=(_connection(),), name="megacp watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2.0)  # not longer: the store may be frozen, and the thread dies with the process

    def _serve(self, store: dist.Store) -> None:
        rank, answered, looks = self._grid.rank, "", 0
        try:
            store.set(f"{ROOM}/host/{rank}", socket.gethostname())
            while not self._over.wait(_PERIOD):
                if looks % _BEATS == 0:
                    store.add(f"{ROOM}/beat/{rank}", 1)
                looks += 1
                self._look_for_a_stall(store)
                if not store.check([f"{ROOM}/question"]):
                    continue
                question = store.get(f"{ROOM}/question").decode()
                if question != answered:
                    store.set(f"{ROOM}/answer/{question}/{rank}", json.dumps(self._answer()))
                    answered = question
        except dist.DistError:  # the store went with the rank or machine that held it: the collectives will tell
            return

    def _look_for_a_stall(self, store: dist.Store) -> None:
        calls = [axis.calls for axis in self._grid.with_groups()]
        made = sum(each.collectives + sum(list(each.messages.values())) for each in calls)
        now = time.monotonic()
        if made != self._made:
            if self._since > now:  # what was told was no hang: the next one is told again
                store.delete_key(f"{ROOM}/stalled")
            self._made, self._since = made, now
        elif self._stall_seconds and now - self._since > self._stall_seconds:
            self._since = math.inf
            if store.add(f"{ROOM}/stalled", 1) == 1:
                threading.Thread(target=self._tell, args=(_connection(),), daemon=True).start()

    def _tell(self, store: dist.Store) -> None:
        """Print what all ranks are doing."""
        ranks = list(range(self._grid.world.size))
        answers = ask_all(store, ranks, f"stall after {self._made} calls of rank {self._grid.rank}", 10.0)
        silent = [rank for rank in ranks if rank not in answers]
        head = f"rank {self._grid.rank} has made no call for {self._stall_seconds:g} s; if this is a hang:"
        print(f"{head}\n{report(answers, silent)}", file=sys.stderr, flush=True)

    def _answer(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main)
        stack = frames(traceback.extract_stack(frame)) if frame else []
        return {"stack": stack, "calls": {group_name(axis): calls_of(axis) for axis in self._grid.with_groups()}}


def frames(stack: traceback.StackSummary) -> list[list[Any]]:
    """File, line, function and source of the innermost frames, the innermost last."""
    return [[frame.filename, frame.lineno, frame.name, frame.line] for frame in stack[-_FRAMES:]]


def run_store() -> dist.Store:
    """The store in which all ranks of the process group meet."""
    return dist.distributed_c10d._get_default_store()


def _connection() -> dist.Store:
    """A connection to the run's store that no other thread uses."""
    return run_store().clone()  # type: ignore[attr-defined]  # torch's stubs leave it out


def group_name(axis: Axis) -> str:
    """A name of the axis's process group that all its ranks give it, and no other group has."""
    assert axis.group is not None
    return str(axis.group.group_name)


def calls_of(axis: Axis) -> dict[str, Any]:
    """What this rank does on an axis, as JSON."""
    now = time.monotonic()
    return {
        "axis": axis.name,
        "ranks": list(axis.global_ranks),
        "number": axis.calls.collectives,
        "messages": [[name, peer, count] for (name, peer), count in list(axis.calls.messages.items())],
        "under_way": [
            [call.name, call.number, call.bytes, call.peer, now - call.begun] for call in axis.calls.under_way()
        ],
    }


def ask_all(store: dist.Store, ranks: list[int], question: str, seconds: float) -> dict[int, dict[str, Any]]:
    """The answers of the ranks that give one within `seconds`."""
    store.set(f"{ROOM}/question", question)
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            key = f"{ROOM}/answer/{question}/{rank}"
            if rank not in answers and store.check([key]):
                answers[rank] = json.loads(store.get(key))
        time.sleep(0.05)
    return answers
