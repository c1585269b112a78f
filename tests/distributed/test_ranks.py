"""The rank pool itself: failures and hangs carry their rank's traceback, and the next run gets a fresh pool."""

from __future__ import annotations

import os
import time

import pytest
import torch

from megacp.core.distributed.collectives import all_reduce
from tests.ranks import RankError, grid, run_ranks


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def total(rank: int, world_size: int, value: float) -> float:
    return all_reduce(torch.tensor([value * rank]), grid(dp=world_size).world).item()


def raise_on_one(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ZeroDivisionError(f"only rank {failing}")
    total(rank, world_size, 1.0)


def hang_on_one(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(60)


def die_on_one(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        os._exit(7)


def test_results_come_in_rank_order_and_processes_are_kept() -> None:
    assert run_ranks(total, 2, 3.0) == [3.0, 3.0]
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)


def test_a_raise_in_one_rank_is_reported_with_its_traceback_and_the_pool_restarts() -> None:
    before = run_ranks(process_id, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on_one, 2, 1)
    text = str(caught.value)
    assert "rank 1 failed" in text and "ZeroDivisionError: only rank 1" in text and "raise_on_one" in text
    assert not set(run_ranks(process_id, 2)) & set(before)
    assert run_ranks(total, 2, 2.0) == [2.0, 2.0]


@pytest.mark.slow
def test_a_hang_in_one_rank_is_reported_with_its_stack_within_the_timeout() -> None:
    run_ranks(total, 2, 1.0)
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(hang_on_one, 2, 0, timeout=1.0)
    assert time.monotonic() - begin < 10
    text = str(caught.value)
    assert "rank 0 did not finish within 1 s" in text and "in hang_on_one" in text and "rank 1" not in text
    assert run_ranks(total, 2, 1.0) == [1.0, 1.0]


def test_a_process_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 1 failed:\nthe process died with exit code 7"):
        run_ranks(die_on_one, 2, 1)
    assert run_ranks(total, 2, 1.0) == [1.0, 1.0]
