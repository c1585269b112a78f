"""Run tasks in a pool of worker processes on this machine.

If a worker is killed, the job ends with an error. If the parent dies, its workers also exit.
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
    """A worker died or raised an unexpected error; the message includes its task."""


def run_tasks(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Any],
    workers: int,
) -> Iterator[Any]:
    """Yield `start(settings)(task)` for every task, in the order in which the tasks finish.

    Each worker calls `start` once. `start`, `settings`, tasks and results must be picklable. With
    one worker, or one task, everything runs in this process.

    Raise a handler's ValueError or OSError unchanged. Raise WorkerFailed, with the task in its
    message, if a worker died or raised another error.
    """
    if not tasks:
        return
    if workers <= 1 or len(tasks) == 1:
        yield from map(start(settings), tasks)
        return
    # A fork would copy locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (start, settings))
    processes: list[Any] = []
    waiting = list(reversed(tasks))  # popped from the end
    running: dict[Future[Any], Any] = {}
    try:
        while waiting or running:
            # Submit one task per worker, so that an error lists only tasks that were running.
            while waiting and len(running) < workers:
                future = pool.submit(_work, waiting[-1])
                running[future] = waiting.pop()
            processes = list(pool._processes.values())
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                answer = done.result()
                yield result_of(answer, f"while working on {running.pop(done)}")
    except BrokenProcessPool as error:
        # `submit` also raises this error, if a worker has died before; no task may be running then.
        at = "; ".join(f"while working on {task}" for task in running.values() or waiting[-1:])
        raise WorkerFailed(f"a worker was killed or ended (out of memory?) {at}") from error
    finally:
        for process in processes:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


# Cached function that returns the handler of this worker process; `_begin` adds it.
_handlers: list[Callable[[], Handler]] = []


def _begin(start: Callable[[Any], Handler], settings: Any) -> None:
    """Initialise a worker process."""
    # Ctrl-C reaches all processes of the terminal; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _handlers.append(functools.cache(functools.partial(start, settings)))


def _work(task: Any) -> tuple[str, Any]:
    """Run a task in a worker process."""
    # The first task calls `start` inside `answer_of`, which passes its errors to the parent.
    return answer_of(lambda each: _handlers[0]()(each), task)


def answer_of(handler: Handler, task: Any) -> tuple[str, Any]:
    """Run a task in a worker; return the kind of outcome, and the result or error."""
    try:
        return "result", handler(task)
    except (ValueError, OSError) as error:
        return "wrong input", error
    except Exception:
        return "failed", traceback.format_exc()


def result_of(answer: tuple[str, Any], at: str) -> Any:
    """Return the result in an answer of `answer_of`.

    Raise the worker's own ValueError or OSError, and WorkerFailed for other errors.
    """
    kind, value = answer
    if kind == "wrong input":
        raise value
    if kind == "failed":
        raise WorkerFailed(f"a worker failed {at}:\n{value}")
    return value


def _end_with_parent() -> None:
    """Wait until the parent dies, then exit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)
