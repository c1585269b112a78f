"""Run tasks on all CPUs of a Ray cluster. `workers.run_tasks` is the variant for one machine.

A task returns a summary, and only this process writes the journal, so both variants produce the
same bytes. A task is retried only if its worker or node was lost, and a limited number of times:
Ray's own retries would repeat a task that runs out of memory forever. The build ends with an error
if a worker has different packages or a different source of megacp.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import pickle
import platform
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megacp.prepare.packs.workers import Handler, WorkerFailed, answer_of, result_of
from megacp.storage.files import source_digest

# Maximum attempts for a task whose workers are lost.
_TRIES = 4
# Object store of a local Ray. Results take only a few KiB each.
_STORE_BYTES = 100 << 20
_SECONDS_BETWEEN_LOOKS = 5.0
# Packages that can change the bytes of a dataset.
_PACKAGES = "numpy tokenizers sentencepiece gigatoken jinja2 pillow av pyarrow zlib-ng".split()


def run_on_ray(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Any],
    workers: int,
    address: str | None = None,
) -> Iterator[Any]:
    """Yield results like `workers.run_tasks`, from the Ray cluster at `address`.

    Without an address, start a local Ray with `workers` CPUs and stop it at the end. Raise
    ValueError if Ray is not installed or cannot start, if a worker differs from this process, or if
    a handler raises it. Raise WorkerFailed if a task lost its worker too often or raised another
    error.
    """
    if not tasks:
        return
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"--executor ray needs the package ray ({error}): pip install -e '.[ray]'"
        ) from error
    local: dict[str, Any] = {
        "num_cpus": workers,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
    }
    before = signal.getsignal(signal.SIGTERM)
    try:
        how = local if address is None else {}
        ray.init(
            address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **how
        )
        # `init` replaces the handler of SIGTERM, so restore ours.
        signal.signal(signal.SIGTERM, before)
    except Exception as error:  # Ray raises plain exceptions, too
        where = "Ray cannot start here"
        if address is not None:
            where = f"cannot connect to Ray at --ray-address {address}"
        reason = " ".join(str(error).split())  # on one line
        raise ValueError(f"--executor ray: {where}: {reason}") from error
    # The first arguments of every task: handler and settings, working directory, and versions.
    known = pickle.dumps((start, settings)), os.getcwd(), versions_here()
    work = ray.remote(_work).options(num_cpus=1, max_retries=0)
    # Errors that say nothing about the task, so another worker may succeed.
    errors = ray.exceptions
    lost = (
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
    )
    waiting = deque((task, 1) for task in tasks)  # task and number of the attempt
    flying: dict[Any, tuple[Any, int]] = {}
    try:
        while waiting or flying:
            # Submit two tasks per CPU: one runs, and one is ready to follow. Nodes may join or
            # leave, so ask for the number of CPUs every time.
            while waiting and len(flying) < 2 * max(1, int(ray.cluster_resources().get("CPU", 1))):
                task, number = waiting.popleft()
                flying[work.remote(*known, task)] = task, number
            # The timeout lets this loop notice new CPUs while all tasks are still running.
            for answer in ray.wait(list(flying), timeout=_SECONDS_BETWEEN_LOOKS)[0]:
                task, number = flying.pop(answer)
                try:
                    outcome = ray.get(answer)
                except lost as error:
                    if number == _TRIES:
                        reason = str(error).strip().splitlines()[0]
                        raise WorkerFailed(
                            f"{_TRIES} workers were lost while working on {task}: {reason}"
                        ) from error
                    waiting.appendleft((task, number + 1))
                    continue
                yield result_of(outcome, f"while working on {task}")
    finally:
        for answer in flying:
            with contextlib.suppress(Exception):  # the connection itself may have failed
                ray.cancel(answer, force=True)
        ray.shutdown()


@functools.cache
def versions_here() -> dict[str, str]:
    """Return the versions that must be equal in this process and in all workers, by name."""
    found = {
        "the source of megacp (sha256)": source_digest(),
        "the version of Python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"the version of {package}"] = importlib.metadata.version(package)
    return found


@functools.lru_cache(maxsize=1)
def _handler(packed: bytes, folder: str) -> Handler:
    """Return the handler of a worker process, which is created once.

    The worker changes to `folder`, the working directory of the build, because the settings may
    contain relative paths.
    """
    # If a node lacks the folder, a later error names the file that was not found.
    with contextlib.suppress(OSError):
        os.chdir(folder)
    start, settings = pickle.loads(packed)
    handler: Handler = start(settings)
    return handler


def _work(packed: bytes, folder: str, here: dict[str, str], task: Any) -> tuple[str, Any]:
    """Run a task in a worker process. Return an answer like `workers.answer_of`.

    `here` has the versions of the process that runs the build.
    """
    there = versions_here()
    # Check before the first task: a different version could write different bytes.
    reasons = [
        f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if reasons:
        problem = f"--executor ray: {platform.node()} differs from this process: "
        return "wrong input", ValueError(problem + "; ".join(reasons))
    return answer_of(_handler(packed, folder), task)
