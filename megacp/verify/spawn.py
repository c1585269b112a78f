"""Ranks started by a tool itself: a pool of gloo processes on this machine, kept alive between
calls.

The processes come from a forkserver that has done all imports. They meet through a file, so no port
is taken.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from megacp.training.start.launch import meet_in_file, settle_cpu

_GRACE = 2.0
"""Seconds the other ranks get to report their own failure after the first one, and a late rank to
write its stack.
"""


class RankFailure(RuntimeError):
    """Some rank raised, died or hung; the message holds its number and its traceback."""


def preloaded() -> list[str]:
    """Modules that ranks find imported; none starts a thread or asks for a device: then no process
    could be forked.

    The first torch.optim optimizer of a process imports torch._dynamo, 1.8 s of a core in every
    rank, and full sharding torch.distributed.fsdp, one second.
    """
    later = ["torch._dynamo", "torch.distributed.fsdp"]
    return [
        "torch",
        "torch.distributed",
        *later,
        *sorted(n for n in sys.modules if n.startswith("megacp.")),
    ]


def _serve(rank: int, world_size: int, folder: str, threads: int, pipe: Connection) -> None:
    """A rank: runs what comes through the pipe until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    # what was imported before the fork stays: to walk it would copy its pages into this process
    gc.freeze()
    settle_cpu()
    torch.set_num_threads(threads)
    with open(f"{folder}/stack_{rank}", "w") as stack:
        meet_in_file(f"{folder}/store", rank, world_size)
        while True:
            try:
                function, args, timeout = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(timeout, exit=True, file=stack)
            try:
                answer = (True, function(rank, world_size, *args))
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


class RankPool(contextlib.AbstractContextManager):
    """`world_size` processes in one gloo process group (none for one rank), `threads` torch threads
    each.
    """

    def __init__(self, world_size: int, threads: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded())
        self._folder = tempfile.mkdtemp(prefix="megacp_pool_")
        pairs = [context.Pipe() for _ in range(world_size)]
        self._pipes, self.processes = [ours for ours, _ in pairs], []
        for rank, (_, theirs) in enumerate(pairs):
            arguments = (rank, world_size, self._folder, threads, theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """Results of `function(rank, world_size, *args)` in rank order; all of them can be pickled.

        Raises RankFailure, after which the pool is closed, when a rank raises, dies, or needs more
        than `timeout` s.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # `recv` tells of it
                pipe.send((function, args, timeout))
        left: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        failures: list[str] = []  # the first comes first
        while left and (ready := wait(list(left), _GRACE if failures else timeout + _GRACE)):
            for rank in [left.pop(pipe) for pipe in ready]:
                try:
                    succeeded, answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(_GRACE)
                    succeeded, stack = False, Path(self._folder, f"stack_{rank}").read_text()
                    died = f"the process died with exit code {self.processes[rank].exitcode}"
                    # it ended itself
                    late = f"it did not finish within {timeout:g} s; it was at\n{stack}"
                    answers[rank] = late if stack else died
                failures += [] if succeeded else [f"rank {rank} failed:\n{answers[rank]}"]
        if left or failures:
            self.close()
            raise RankFailure(
                "\n".join(
                    failures or [f"no answer of ranks {[*left.values()]} within {timeout:g} s"]
                )
            )
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all processes; may be called twice."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *error: object) -> None:
        self.close()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0
) -> list[Any]:
    """`RankPool.run` once, on processes of its own."""
    with RankPool(world_size) as pool:
        return pool.run(function, *args, timeout=timeout)
