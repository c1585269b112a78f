"""A rank that hangs, or a machine that freezes with the store: everybody else ends, with a message that says where."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import committed
from megacp.core.distributed.grid import single_axis
from tests.faults.processes import ROOT, Ended, ends, environment, free_port, launch
from tests.training.runs import TINY, grid_flags, losses

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
@pytest.mark.parametrize(
    ("fault", "where", "size", "flags", "told"),
    [
        ("stop in step", 0, 3, grid_flags(tp=1), "the run's store does not answer"),
        ("stop in step", 1, 2, grid_flags(tp=1), "no word from rank 1 in step 3: stopped, dead, or still computing"),
        ("hang in step", 1, 4, grid_flags(tp=2), "no word from rank 1 in step 3: stopped, dead, or still computing"),
        ("hang in step", 1, 4, grid_flags(pp=2), "no word from rank 1 in step 3: stopped, dead, or still computing"),
        ("hang in step", 1, 4, grid_flags(cp=2), "no word from rank 1 in step 3: stopped, dead, or still computing"),
    ],
    ids=["a frozen machine with the store", "a frozen rank", "tp", "pp", "cp"],
)
def test_a_rank_that_hangs_ends_the_others_and_is_named(
    tmp_path: Path, fault: str, where: int, size: int, flags: list[str], told: str
) -> None:
    """Also a report that would wait for a store that does not answer has its end."""
    for rank, ended in survivors(tmp_path, fault, where, size, [*flags, "--global-batch-size", "12"]).items():
        assert ended.status == 1
        assert f"rank {rank} failed in step 3: RuntimeError" in ended.err and told in ended.err


def slow_save(tmp_path: Path, where: int, *flags: str) -> list[Ended]:
    """Two ranks, of which one takes 25 s to write; a collective may take 15."""
    port = free_port()
    saving = ["--save-interval", "0", *flags, "--save", str(tmp_path / "out")]
    arguments = ["slow in writing", str(where), "0", *SIX, *saving]
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
def test_the_ranks_of_a_killed_agent_go_on_and_save(tmp_path: Path) -> None:
    """Would catch a save that waits in the store of torchrun's agent."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*TINY, "--train-iters", "100000", "--lr-decay-iters", "300", "--save-interval", "50", "--keep-last", "2"]
    command = [*launcher, "-m", "megacp.train", *flags, "--save", str(tmp_path)]
    with open(tmp_path / "said", "wb") as said:
        agent = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
        )
    ranks: list[int] = []
    try:
        wait_for(lambda: bool(committed(tmp_path)))
        ranks = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
        agent.kill()
        agent.wait()
        before = committed(tmp_path)
        wait_for(lambda: max(committed(tmp_path)) > max(before))
        os.kill(ranks[0], signal.SIGTERM)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        assert b"stopped on request" in (tmp_path / "said").read_bytes()
        assert max(committed(tmp_path)).name == f"step_{max(losses(tmp_path)):07d}"
    finally:
        for pid in [agent.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    """Until it happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)
