"""Runs tasks in worker processes that may die: a killed worker ends the job, a worker whose parent
dies ends too.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any

Handler = Callable[[Any], Any]


class WorkerFailed(RuntimeError):
    """A worker died or raised something unforeseen; the message says at which tasks."""


def run_tasks(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Any],
    workers: int,
) -> Iterator[Any]:
    """Yield `start(settings)(task)` for every task, in the order in which they finish.

    `start` is called once in each worker; it, settings, tasks and results must pickle. With one
    worker, or one task, everything runs in this process. ValueError and OSError of a handler are
    raised here as they are; WorkerFailed: a worker died, or raised anything else, and the message
    says at which task.
    """
    if not tasks:
        return
    if workers <= 1 or len(tasks) == 1:
        yield from map(start(settings), tasks)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy the parent's threads' locks
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (start, settings))
    processes: list[Any] = []
    waiting, running = list(reversed(tasks)), dict[Future[Any], Any]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                future = pool.submit(_work, waiting[-1])
                running[future] = waiting.pop()
            processes = list(pool._processes.values())
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                answer = done.result()
                yield result_of(answer, f"while working on {running.pop(done)}")
    except BrokenProcessPool as error:  # of `submit` too, where the worker died before
        at = "; ".join(f"while working on {task}" for task in running.values() or waiting[-1:])
        raise WorkerFailed(f"a worker was killed or ended (out of memory?) {at}") from error
    finally:
        for process in processes:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


_handlers: list[Callable[[], Handler]] = []
"""What starts, once, the handler of this worker process."""


def _begin(start: Callable[[Any], Handler], settings: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _handlers.append(functools.cache(functools.partial(start, settings)))


def _work(task: Any) -> tuple[str, Any]:
    return answer_of(
        lambda each: _handlers[0]()(each), task
    )  # what `start` refuses is raised by the first task


def answer_of(handler: Handler, task: Any) -> tuple[str, Any]:
    """What became of a task in a worker, and its result or why there is none."""
    try:
        return "result", handler(task)
    except (ValueError, OSError) as error:
        return "wrong input", error
    except Exception:
        return "failed", traceback.format_exc()


def result_of(answer: tuple[str, Any], at: str) -> Any:
    """The result of an `answer_of`; raises what a worker refused, WorkerFailed for anything
    else.
    """
    kind, value = answer
    if kind == "wrong input":
        raise value
    if kind == "failed":
        raise WorkerFailed(f"a worker failed {at}:\n{value}")
    return value


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)
