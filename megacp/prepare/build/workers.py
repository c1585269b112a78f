"""Runs tasks in worker processes that may die.

Key property: the parent waits on every worker's pipe and process at once. A killed worker ends the job with a message
that says what it was reading, and a worker whose parent dies ends too. Rejected: multiprocessing.Pool, which waits for
ever for a killed worker, and concurrent.futures, which says only that some worker died. `distributed/spawn` runs one
function on all ranks of a process group instead, where a failure ends the group.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
Handler = Callable[[Any, MutableSequence[int]], Any]


class WorkerFailed(RuntimeError):
    """A worker died or raised something unforeseen; the message says where."""


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    position: MutableSequence[int]
    task: Any = None


def run_tasks(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Task],
    workers: int,
    describe: Callable[[Task, Sequence[int]], str],
) -> Iterator[Any]:
    """Yield `start(settings)(task, position)` for every task, in the order in which they finish.

    `start` is called once in each worker; it, settings, tasks and results must pickle. With one worker, or one task,
    everything runs in this process. `position` is two integers the handler keeps up to date; `describe(task,
    position)` turns them into words for the message. ValueError of a handler is raised here as it is;
    WorkerFailed: a worker died, or raised anything else.
    """
    if not tasks:
        return
    if workers <= 1 or len(tasks) == 1:
        handler = start(settings)
        for task in tasks:
            yield handler(task, [0, 0])
        return
    running = [_launch(start, settings) for _ in range(min(workers, len(tasks)))]
    waiting = list(reversed(tasks))
    try:
        for worker in running:
            _assign(worker, waiting.pop())
        while any(worker.task is not None for worker in running):
            yield from _collect([w for w in running if w.task is not None], waiting, describe)
    finally:
        for worker in running:
            worker.pipe.close()
            worker.process.terminate()
        for worker in running:
            worker.process.join()


def _collect(busy: list[_Worker], waiting: list[Any], describe: Callable[[Any, Sequence[int]], str]) -> Iterator[Any]:
    """Wait until some workers have something to say; yield their results and give them their next tasks."""
    ready = wait([item for worker in busy for item in (worker.pipe, worker.process.sentinel)])
    for worker in busy:
        if worker.pipe not in ready and worker.process.sentinel not in ready:
            continue
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerFailed(f"{_end(worker.process)} {describe(worker.task, worker.position)}") from error
        if kind == "wrong input":
            raise value
        if kind == "failed":
            raise WorkerFailed(f"a worker failed {describe(worker.task, worker.position)}:\n{value}")
        worker.task = None
        if waiting:
            _assign(worker, waiting.pop())
        yield value


def _launch(start: Callable[[Any], Handler], settings: Any) -> _Worker:
    context = multiprocessing.get_context("spawn")  # fork would copy the parent's threads' locks
    position = context.RawArray("q", 2)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(start, settings, theirs, position), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, position)


def _assign(worker: _Worker, task: Any) -> None:
    worker.task = task
    try:
        worker.pipe.send(task)
    except OSError:  # it is dead; waiting for it says so
        pass


def _end(process: multiprocessing.process.BaseProcess) -> str:
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        return f"a worker was killed by {signal.Signals(-code).name}"
    return f"a worker ended with exit code {code}"


def _serve(start: Callable[[Any], Handler], settings: Any, pipe: Connection, position: MutableSequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        handler = start(settings)
        while True:
            pipe.send(("result", handler(pipe.recv(), position)))
    except (EOFError, BrokenPipeError):  # the parent is gone or done
        return
    except ValueError as error:
        pipe.send(("wrong input", error))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
