"""Ranks in a pool return their results, report failures with a traceback, and never hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp.verify.spawn import RankFailure, RankPool, run_ranks
from tests.conftest import LEFT


def total(rank: int, world_size: int, factor: int) -> tuple[int, int]:
    x = torch.tensor([rank * factor])
    if world_size > 1:
        dist.all_reduce(x)
    return int(x), torch.get_num_threads()


def fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("of rank one")
    dist.barrier()


def waits(rank: int, world_size: int) -> None:
    time.sleep(60)


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def test_ranks_talk_and_answer_in_rank_order_and_one_needs_no_group() -> None:
    assert run_ranks(total, 3, 10) == [(30, 1)] * 3
    with RankPool(1, threads=2) as pool:
        assert pool.run(total, 5) == [(0, 2)]


# Only full sharding needs these modules. They would double the import time of a run.
NEEDLESS = ("torch.distributed.fsdp", "torch.distributed.tensor")


@pytest.mark.slow
def test_a_run_that_is_not_fully_sharded_does_not_import_fsdp() -> None:
    command = "import sys, megacp.train; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert not set(NEEDLESS) & set(done.stdout.split())


PRELOADS = """
import sys, threading, torch
for module in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count", "current_device_index", "init", "_lazy_init"):
        setattr(module, name, lambda *_: sys.exit(f"{name} was asked"))
import megacp.train, importlib
from megacp.verify.spawn import preloaded
for name in preloaded():
    importlib.import_module(name)
assert "megacp.training.loop.trainer" in preloaded()
print(threading.active_count())
"""


@pytest.mark.slow
def test_what_ranks_find_imported_asks_for_no_device_and_starts_no_thread() -> None:
    """After a parent has used a GPU or started a thread, a forked rank fails or hangs."""
    done = subprocess.run([sys.executable, "-c", PRELOADS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_stopped_process_of_a_test_run_ends_with_it() -> None:
    stopped = subprocess.Popen(["sleep", "60"], env={"MEGACP_TESTS": "of this test"})
    os.kill(stopped.pid, signal.SIGSTOP)
    subprocess.run(["sh", "-c", LEFT, "of this test"], stdin=subprocess.DEVNULL, check=True)
    assert stopped.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (fails, r"(?s)rank 1 failed:\nTraceback.*KeyError: 'of rank one'"),
        (dies, "rank 1 failed:\nthe process died with exit code 7"),
        (waits, r"(?s)rank 0 failed:\nit did not finish within 1 s.*in waits"),
    ],
)
def test_a_rank_that_raises_dies_or_hangs_ends_the_pool_with_its_place(
    function: Any, told: str
) -> None:
    begin = time.monotonic()
    with RankPool(2) as pool:
        pids = pool.run(pid)
        assert pool.run(pid) == pids
        with pytest.raises(RankFailure, match=told):
            pool.run(function, timeout=1.0)
        for process in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
    assert time.monotonic() - begin < 30
