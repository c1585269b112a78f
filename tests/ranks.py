"""The rank pool: run a function on 2, 4 or 8 gloo ranks inside a test, with processes kept alive between tests.

Key property: a raise or a hang in one rank becomes one `RankError` that holds that rank's traceback, and the next test
gets a fresh pool. Processes come from a forkserver that imported torch once; they meet through a FileStore, so no
port is taken. Rejected: torchrun per test (5 s and 1.2 GB for 8 ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank raised or hung; the message holds its number and its traceback."""


@functools.cache
def grid(tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> Any:
    """The process grid of this worker for a shape; called inside a rank, groups are made once per worker."""
    import torch.distributed as dist

    from megacp.distributed.grid import GridShape, build_grid

    rank = dist.get_rank() if dist.is_initialized() else 0
    return build_grid(GridShape(tp=tp, cp=cp, dp=dp, pp=pp), rank)


def _worker(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    with open(f"{folder}/stack_{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world_size)
        timeout = datetime.timedelta(seconds=300)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, function(rank, world_size, *args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        self.folder = tempfile.mkdtemp(prefix="megacp_ranks_")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world_size, self.folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.pipes):
            waiting = [r for r in range(len(self.pipes)) if r not in results and r not in failures]
            # After a first failure the others usually wait for it: give them a moment to report their own.
            limit = min(deadline, time.monotonic() + 1.0) if failures else deadline
            ready = wait([self.pipes[r] for r in waiting], max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.pipes[rank] in ready:
                    self._take(rank, results, failures)
        if len(results) < len(self.pipes):
            raise RankError(self._report(results, failures, timeout))
        return [results[rank] for rank in range(len(self.pipes))]

    def _take(self, rank: int, results: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            succeeded, value = self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(1)
            succeeded, value = False, f"the process ended with exit code {self.processes[rank].exitcode}"
        (results if succeeded else failures)[rank] = value

    def _report(self, results: dict[int, Any], failures: dict[int, str], timeout: float) -> str:
        parts = [f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items())]
        for rank, process in enumerate(self.processes):
            if rank in results or rank in failures or process.pid is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            stack = Path(self.folder, f"stack_{rank}").read_text()
            reason = "was still waiting" if failures else f"did not finish within {timeout} s"
            parts.append(f"rank {rank} {reason}:\n{stack}")
        return "\n".join(parts)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[int, _Pool] = {}


def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


atexit.register(_close_all)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `function(rank, world_size, *args)` on every rank; results in rank order.

    `function` is a module-level function; arguments and results are picklable. Raises RankError with the traceback of
    every failed rank (or the stack of one that hangs) and restarts the pool.
    """
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    try:
        return _pools[world_size].run(function, args, timeout)
    except BaseException:
        _pools.pop(world_size).close()
        raise
