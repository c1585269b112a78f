"""Runs tasks on all CPUs of a Ray cluster, where `workers.run_tasks` runs them on those of this
machine.

A task returns a summary, and only this process keeps the journal, so the bytes are those of the
local pool. A task is tried again when its worker or its node was lost, and for no other reason.
Ray's own retries would try a task that fills the memory without end. A worker with other packages
or another source ends the build.
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

_TRIES = 4
"""How often a task is begun whose workers are lost."""
_STORE_BYTES = 100 << 20
"""Store of a Ray that is started here: results are a few KiB each."""
_SECONDS_BETWEEN_LOOKS = 5.0
_PACKAGES = "numpy tokenizers sentencepiece gigatoken jinja2 pillow av pyarrow zlib-ng".split()
"""Packages that have a say in the bytes of a dataset."""


def run_on_ray(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Any],
    workers: int,
    address: str | None = None,
) -> Iterator[Any]:
    """`workers.run_tasks` on the cluster at `address`, or on a Ray of `workers` CPUs that lives as
    long as this.

    ValueError: Ray is not installed, cannot start, a worker is not like this process, or what a
    handler raised. WorkerFailed: a task lost its worker too often, or raised.
    """
    if not tasks:
        return
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"--executor ray needs the package ray ({error}): pip install 'megacp[ray]'"
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
        signal.signal(signal.SIGTERM, before)  # `init` has put its own there
    except Exception as error:  # Ray raises bare ones too
        where = (
            "Ray cannot start here"
            if address is None
            else f"no Ray is reached at --ray-address {address}"
        )
        raise ValueError(f"--executor ray: {where}: {' '.join(str(error).split())}") from error
    known = pickle.dumps((start, settings)), os.getcwd(), versions_here()
    work = ray.remote(_work).options(num_cpus=1, max_retries=0)
    errors = ray.exceptions
    lost = (
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
    )
    waiting = deque((task, 1) for task in tasks)
    flying: dict[Any, tuple[Any, int]] = {}
    try:
        while waiting or flying:
            while waiting and len(flying) < 2 * max(1, int(ray.cluster_resources().get("CPU", 1))):
                task, number = waiting.popleft()
                flying[work.remote(*known, task)] = task, number
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
            with contextlib.suppress(Exception):  # the connection may be what failed
                ray.cancel(answer, force=True)
        ray.shutdown()


@functools.cache
def versions_here() -> dict[str, str]:
    """What must be equal in this process and in all workers."""
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
    """Made once in a worker process; relative paths count from `folder`, so it goes there."""
    with contextlib.suppress(OSError):  # a node without it: what is not found is named
        os.chdir(folder)
    start, settings = pickle.loads(packed)
    handler: Handler = start(settings)
    return handler


def _work(packed: bytes, folder: str, here: dict[str, str], task: Any) -> tuple[str, Any]:
    """One task in a worker process: what became of it, and its result or why there is none."""
    there = versions_here()
    if other := [name for name in {**here, **there} if here.get(name) != there.get(name)]:
        reasons = [
            f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
            for name in other
        ]
        where = f"--executor ray: {platform.node()} is not like this process: "
        return "wrong input", ValueError(where + "; ".join(reasons))
    return answer_of(_handler(packed, folder), task)
