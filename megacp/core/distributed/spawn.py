"""Ranks started by a tool itself: a pool of gloo processes on this machine, kept alive between calls.

A raise, a death or a hang in one rank becomes one `RankFailure` with that rank's number and traceback. The processes
come from a forkserver that has done all imports. They meet through a file, so no port is taken.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
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

import torch
import torch.distributed as dist

from megacp.core.distributed.launch import steady_heap

_GRACE = 2.0
"""Seconds the other ranks get to report their own failure after the first one."""


class RankFailure(RuntimeError):
    """Some rank raised, died or hung; the message holds its number and its traceback."""


def preloaded() -> list[str]:
    """Modules that ranks find imported: torch's, and those of megacp that this process has.

    torch._dynamo is what the first torch.optim optimizer of a process imports: 1.8 s of a core in every rank. None of
    them starts a thread or asks for a device, after which a process could not be forked.
    """
    return ["torch", "torch.distributed", "torch._dynamo", *sorted(n for n in sys.modules if n.startswith("megacp."))]


def _serve(rank: int, world_size: int, folder: str, threads: int, pipe: Connection) -> None:
    """A rank: runs what comes through the pipe until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    gc.freeze()  # what was imported before the fork stays: to walk it would copy its pages into this process
    with open(f"{folder}/stack_{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        steady_heap()
        torch.set_num_threads(threads)
        if world_size > 1:
            store = dist.FileStore(f"{folder}/store", world_size)
            hours = datetime.timedelta(hours=12)  # the parent notices a hang sooner
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=hours)
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                return
            try:
                answer = (True, function(rank, world_size, *args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)


class RankPool(contextlib.AbstractContextManager):
    """`world_size` processes in one gloo process group (none for one rank), `threads` torch threads each."""

    def __init__(self, world_size: int, threads: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded())
        self._folder = tempfile.mkdtemp(prefix="megacp_pool_")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self._folder, threads, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """Results of `function(rank, world_size, *args)` in rank order.

        `function` is a module-level function; arguments and results are picklable. Raises RankFailure, after which the
        pool is closed, when a rank raises, dies, or needs more than `timeout` seconds.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args))
        answers: dict[int, Any] = {}
        failures: list[str] = []  # the first comes first
        deadline = time.monotonic() + timeout
        while waiting := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}:
            limit = min(deadline, time.monotonic() + _GRACE) if failures else deadline
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                failures += self._stacks(list(waiting.values()), timeout) if not failures else []
                break
            for rank in [rank for pipe, rank in waiting.items() if pipe in ready]:
                try:
                    succeeded, answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(_GRACE)
                    succeeded, answers[rank] = (
                        False,
                        f"the process died with exit code {self._processes[rank].exitcode}",
                    )
                failures += [] if succeeded else [f"rank {rank} failed:\n{answers[rank]}"]
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return [answers[rank] for rank in range(len(self._pipes))]

    def _stacks(self, ranks: list[int], timeout: float) -> list[str]:
        """Where ranks are that have not answered."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks to be written
        stacks = [Path(self._folder, f"stack_{rank}").read_text() for rank in ranks]
        shown = zip(ranks, stacks, strict=True)
        return [f"rank {rank} did not finish within {timeout:g} s; it is at\n{stack}" for rank, stack in shown]

    def close(self) -> None:
        """End all processes; may be called twice."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *error: object) -> None:
        self.close()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """`RankPool.run` once, on processes of its own."""
    with RankPool(world_size) as pool:
        return pool.run(function, *args, timeout=timeout)
