"""Runs ranks on this machine, in a pool of gloo processes that stay alive between calls.

A forkserver that has already imported all modules starts the processes. They find each other
through a file and need no port.
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

# Seconds to wait for failures of other ranks after the first failure, and for the stack of a late
# rank after a timeout.
_GRACE = 2.0


class RankFailure(RuntimeError):
    """Raised if a rank raised an error, died or hung; contains the rank and its traceback."""


def preloaded() -> list[str]:
    """Return the modules that the forkserver imports for the ranks.

    No module may start a thread or look for a device, because a process cannot be forked safely
    afterwards.
    """
    # Otherwise, every rank would spend 1.8 s on importing torch._dynamo for its first optimizer,
    # and 1 s on torch.distributed.fsdp if the model is fully sharded.
    later = ["torch._dynamo", "torch.distributed.fsdp"]
    return [
        "torch",
        "torch.distributed",
        *later,
        *sorted(n for n in sys.modules if n.startswith("megacp.")),
    ]


def _serve(rank: int, world_size: int, folder: str, threads: int, pipe: Connection) -> None:
    """Run the functions that this rank receives through its pipe until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # Exclude imported objects from garbage collection, which would copy their shared pages.
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
    """A pool of `world_size` processes in a gloo process group, with `threads` torch threads each.

    A single process has no process group.
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
        """Return the results of `function(rank, world_size, *args)` in rank order.

        The function, its arguments and its results must be picklable. Raise RankFailure and close
        the pool if a rank raises, dies, or needs more than `timeout` seconds.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # `recv` below reports a dead rank
                pipe.send((function, args, timeout))
        left: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        failures: list[str] = []  # in the order in which they arrive
        while left and (ready := wait(list(left), _GRACE if failures else timeout + _GRACE)):
            for rank in [left.pop(pipe) for pipe in ready]:
                try:
                    succeeded, answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(_GRACE)
                    succeeded, stack = False, Path(self._folder, f"stack_{rank}").read_text()
                    died = f"the process died with exit code {self.processes[rank].exitcode}"
                    # If there is a stack, the rank reached its timeout and ended itself.
                    late = f"it did not finish within {timeout:g} s; it was at\n{stack}"
                    answers[rank] = late if stack else died
                failures += [] if succeeded else [f"rank {rank} failed:\n{answers[rank]}"]
        if left or failures:
            self.close()
            raise RankFailure(
                "\n".join(
                    failures or [f"no answer from ranks {[*left.values()]} within {timeout:g} s"]
                )
            )
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Kill all processes and remove the temporary folder. A second call is harmless."""
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
    """Run a function once in a new `RankPool`, and return its results in rank order."""
    with RankPool(world_size) as pool:
        return pool.run(function, *args, timeout=timeout)
