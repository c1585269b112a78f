"""Ranks that wait for one that is late: dead ones end the wait at once, slow ones are waited for up to the limit."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megacp.core.distributed import failure_report, patience
from megacp.core.distributed.calls import Calls
from megacp.core.distributed.patience import LateError, wait_for_all
from megacp.core.distributed.watch import ROOM

LATE = 2
"""The rank that the others wait for."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a run, in which the ranks are threads."""
    store = dist.HashStore()
    monkeypatch.setattr(patience, "run_store", lambda: store)
    monkeypatch.setattr(failure_report, "run_store", lambda: store)
    monkeypatch.setattr(patience, "SILENT_SECONDS", 2.0)
    store.set(f"{ROOM}/host/{LATE}", "node7")
    return store


def axis_of(rank: int) -> Any:
    group = types.SimpleNamespace(group_name="g")
    return types.SimpleNamespace(name="dp", rank=rank, size=3, global_ranks=(0, 1, 2), group=group, calls=Calls())


def told(late: Callable[[], object], seconds: float) -> tuple[list[str], float]:
    """What ranks 0 and 1 are told by a wait while rank 2 does `late`, and after how long."""
    words, begun = ["", ""], time.monotonic()

    def wait(rank: int) -> None:
        try:
            wait_for_all(axis_of(rank), seconds, "writing files")
        except LateError as error:
            words[rank] = str(error)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    late()
    for thread in threads:
        thread.join(30.0)
    return words, time.monotonic() - begun


@pytest.mark.slow
def test_a_rank_that_failed_is_told_at_once_with_its_reason(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are left where `report_failure` leaves them."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    failed = OSError("the disk is full")
    words, seconds = told(lambda: failure_report.report_failure(failed, "step 3", axis_of(LATE)), 20.0)
    assert words == ["writing files: rank 2 failed in step 3: OSError: the disk is full"] * 2
    assert seconds < 10.0


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_told_before_the_limit(store: dist.Store) -> None:
    words, seconds = told(lambda: store.add(f"{ROOM}/beat/{LATE}", 1), 20.0)
    assert words == ["rank 2 shows no sign of life while writing files: killed, stopped, or cut off"] * 2
    assert seconds < 12.0


@pytest.mark.slow
def test_a_slow_rank_that_lives_is_waited_for(store: dist.Store) -> None:
    def late() -> None:
        for _ in range(8):  # longer than a silent one is given
            store.add(f"{ROOM}/beat/{LATE}", 1)
            time.sleep(0.5)
        wait_for_all(axis_of(LATE), 20.0, "writing files")

    assert told(late, 20.0)[0] == ["", ""]


@pytest.mark.slow
def test_a_rank_beyond_the_limit_is_named_with_its_host(store: dist.Store) -> None:
    assert told(lambda: None, 1.0)[0] == ["rank 2 (on node7) still writing files after 1 s"] * 2
