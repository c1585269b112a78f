"""Who failed first: what ranks tell each other through the store of the run, and its deadlines."""

from __future__ import annotations

import time
from unittest import mock

from megacp.core.distributed import launch
from megacp.core.distributed.collectives import barrier
from megacp.core.distributed.launch import named, report_failure, run_store
from tests.ranks import grid, run_ranks


def _reported(rank: int, world_size: int, silent: int) -> tuple[str, float]:
    """What a rank says, and after how many seconds; rank 1 fails by itself, the others in a collective with it."""
    run_store().delete_key(f"megacp_failure/{rank}")  # other tests of this pool have used it
    world = grid(dp=world_size).world
    barrier(world)
    begun = time.monotonic()
    if rank == silent:
        time.sleep(3.0)  # the store may go with it
        return "", 0.0
    error = ValueError("bad input") if rank == 1 else RuntimeError("connection closed by peer")
    text = report_failure(error, "step 1", world, 1.0)
    seconds = time.monotonic() - begun
    time.sleep(1.0)
    return text, seconds


def test_ranks_that_were_hit_tell_the_reason_of_the_first_at_once() -> None:
    found = run_ranks(_reported, 3, -1)
    assert all("rank 1 failed in step 1: ValueError: bad input" in text for text, _ in found)
    assert max(seconds for _, seconds in found) < 2.5


def test_a_rank_that_says_nothing_is_named() -> None:
    (first, _), _, (third, _) = run_ranks(_reported, 3, 1)
    for text in (first, third):
        assert "no word from rank 1 in step 1: stopped, dead, or still computing" in text


def _of_a_frozen_store(rank: int, world_size: int) -> str:
    with mock.patch.object(launch, "run_store", lambda: time.sleep(30)):
        return report_failure(ValueError("bad input"), "step 1", grid(dp=world_size).world, 0.1)


def test_a_store_that_does_not_answer_is_left_behind() -> None:
    for text in run_ranks(_of_a_frozen_store, 2):
        assert "ValueError: bad input\nthe run's store does not answer" in text


def test_many_ranks_are_counted_and_not_listed() -> None:
    assert named([3]) == "rank 3"
    assert named(list(range(20))).endswith("13, 14, 15, and 4 more")
