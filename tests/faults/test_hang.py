"""A rank that hangs, or a machine that freezes with the store: everybody else ends, with a message that says where."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import committed
from megacp.core.distributed.grid import single_axis
from tests.faults.processes import Ended, ends, environment, free_port, launch
from tests.training.runs import TINY, grid_flags

MODULE = "tests.training.faulty_rank"
SIX = [*TINY, "--train-iters", "6", "--save-interval", "2", "--distributed-timeout-minutes", "0.25"]


def survivors(tmp_path: Path, fault: str, where: int, size: int, flags: list[str]) -> dict[int, Ended]:
    """How the other ranks end when the one at `where` has a fault in step 3; it is killed after them."""
    port = free_port()
    arguments = [fault, str(where), "3", *SIX, *flags, "--save", str(tmp_path / "out")]
    processes = [launch(arguments, environment(rank, size, port), module=MODULE) for rank in range(size)]
    others = [rank for rank in range(size) if rank != where]
    try:
        return dict(zip(others, ends([processes[rank] for rank in others]), strict=True))
    finally:
        assert processes[where].poll() is None
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.faults
def test_a_frozen_machine_that_holds_the_store_leaves_no_survivor_waiting(tmp_path: Path) -> None:
    """Would catch a failure report that waits for ever for a store that does not answer."""
    flags = [*grid_flags(tp=1), "--global-batch-size", "6"]
    for rank, ended in survivors(tmp_path, "stop in step", 0, 3, flags).items():
        assert ended.status == 1
        assert f"rank {rank} failed in step 3: RuntimeError" in ended.err
        assert "the run's store: no answer within 15 s: its machine is stopped" in ended.err


@pytest.mark.faults
@pytest.mark.parametrize("flags", [grid_flags(tp=2), grid_flags(pp=2), grid_flags(cp=2)], ids=lambda f: f[0])
def test_a_hang_is_told_with_the_call_its_missing_ranks_and_all_stacks(tmp_path: Path, flags: list[str]) -> None:
    """Would catch a timeout of which nobody knows who was late, and where that rank was."""
    ended = survivors(tmp_path, "hang in step", 1, 4, flags)
    assert {one.status for one in ended.values()} == {1}
    (report,) = [one.err for one in ended.values() if "calls under way:" in one.err]
    assert "not called by rank 1" in report or "rank 1 has made" in report
    assert "in _hang\n      time.sleep(600)" in report
    stacks = report.partition("stacks:")[2]
    assert all(f"{rank}" in stacks for rank in range(4))
    assert "trainer.py" in stacks
    quiet = [one.err for one in ended.values() if "calls under way:" not in one.err]
    assert all("the rank that gave up first tells what all ranks were doing" in text for text in quiet)


@pytest.mark.faults
def test_a_stopped_rank_answers_nothing_and_is_told_apart_from_one_that_hangs(tmp_path: Path) -> None:
    ended = survivors(tmp_path, "stop in step", 1, 2, [])
    assert "no answer from rank 1: stopped, dead, or cut off from the store" in ended[0].err
    assert "no word from rank 1 in step 3: stopped, dead, or still computing" in ended[0].err


def slow_save(tmp_path: Path, where: int, *flags: str) -> list[Ended]:
    """Two ranks, of which one takes 25 s to write; a collective may take 15."""
    port = free_port()
    arguments = [
        "slow in writing",
        str(where),
        "0",
        *SIX,
        "--save-interval",
        "0",
        *flags,
        "--save",
        str(tmp_path / "out"),
    ]
    return ends([launch(arguments, environment(rank, 2, port), module=MODULE) for rank in range(2)])


@pytest.mark.faults
@pytest.mark.parametrize(("where", "saving"), [(0, []), (1, []), (1, ["--async-save"])])
def test_a_save_that_takes_longer_than_a_collective_may_ends_no_run(
    tmp_path: Path, where: int, saving: list[str]
) -> None:
    """Would catch a slow disk that is taken for a lost rank."""
    first, second = slow_save(tmp_path, where, *saving)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert load_checkpoint(tmp_path / "out", single_axis("world")).step == 6


@pytest.mark.faults
def test_a_save_beyond_its_own_limit_names_the_slow_rank(tmp_path: Path) -> None:
    first, second = slow_save(tmp_path, 1, "--checkpoint-timeout-minutes", "0.1")
    host = socket.gethostname()
    assert (first.status, second.status) == (1, 1)
    assert f"rank 1 (on {host}) still reading or writing a checkpoint after 6 s (--checkpoint-timeout" in first.err
    assert "the store of the run is gone" in second.err  # rank 0 had it
    assert committed(tmp_path / "out") == []
