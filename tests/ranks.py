"""Run a function on 2, 4 or 8 gloo ranks inside a test, with processes that live across tests.

The tools use the same pool (`megacp.verify.spawn`). An exception or a hang in one rank is a failure
with that rank's traceback, and the next test gets a new pool. Ranks are forked after the tests'
modules have been imported, so a new pool takes tenths of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from megacp.distributed.large_blocks import BLOCKS, LARGE
from megacp.verify.spawn import RankFailure as RankError
from megacp.verify.spawn import RankPool, preloaded

__all__ = ["RankError", "grid", "preload", "run_ranks"]


@functools.cache
def grid(tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 0) -> Any:
    """Return the process grid of this worker for a shape. Call it inside a rank; the groups are
    created once per worker.
    """
    import torch.distributed as dist

    from megacp.distributed.grid import build_grid
    from megacp.distributed.shape import GridShape

    rank = dist.get_rank() if dist.is_initialized() else 0
    return build_grid(GridShape(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep), rank)


POOLS, THREADS = 2, 450
"""Maximum number of pools kept alive, and of threads of a rank before its pool is replaced.

Every gloo group has three threads. One of them wakes up a hundred times per second. Grids of
earlier tests leave tens of threads, so idle ranks are stopped.
"""

_pools: dict[int, RankPool] = {}  # the most recently used pool is last


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _signal(pool: RankPool, number: signal.Signals) -> None:
    for process in pool.processes:
        with contextlib.suppress(ProcessLookupError):  # `run` says which rank has died
            os.kill(process.pid or 0, number)


@functools.cache
def preload() -> None:
    """Start the process that ranks are forked from, with the modules of tests that use ranks.

    Importing hypothesis costs half a second per rank, transformers another half. None of the
    modules starts a thread.
    """
    tests = sorted(
        name
        for name, found in sys.modules.items()
        if name[:6] == "tests." and "run_ranks" in dir(found)
    )
    multiprocessing.set_forkserver_preload([*preloaded(), *tests])
    forkserver.ensure_running()


def _half_in_blocks(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Let odd ranks allocate all but the smallest results in reused blocks; even ranks do not reuse
    such small ones.
    """
    BLOCKS.smallest = 256 if rank % 2 else LARGE
    return function(rank, world_size, *args)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on every rank; return the results in rank order.

    `function` is a module-level function; arguments and results must be picklable. Raise RankError
    with the traceback of every failed rank (or the stack of one that hangs), and restart the pool.
    """
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:  # the ranks inherit it, and find the tests' modules
        sys.path.insert(0, root)
    preload()
    pool = _pools.pop(world_size, None)
    if (
        pool is not None
        and len(list(Path("/proc").glob(f"{pool.processes[0].pid}/task/*"))) > THREADS
    ):
        pool.close()
        pool = None
    while len(_pools) >= POOLS:
        _pools.pop(next(iter(_pools))).close()
    pool = _pools[world_size] = pool or RankPool(world_size)
    try:
        _signal(pool, signal.SIGCONT)
        results = pool.run(_half_in_blocks, function, *args, timeout=timeout)
        _signal(pool, signal.SIGSTOP)
        return results
    except BaseException:
        _pools.pop(world_size).close()
        raise
