"""Runs tasks on all CPUs of a Ray cluster, where `workers.run_tasks` runs them on those of this machine.

Key property: the bytes are those of the local pool. A task returns a summary, and this process alone keeps the journal.
A task is tried again when its worker or its node was lost, and for no other reason. Before the first one, every node
states its settings, packages and files. Rejected: Ray's own retries, which try without end a task that fills the
memory, and Ray Data, whose unit of work is a block and not a shard.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megacp.core.storage.files import source_digest
from megacp.prepare.build.upload import JOURNAL_NAME
from megacp.prepare.build.workers import Handler, WorkerFailed

_TRIES = 4
"""How often a task is begun whose workers are lost."""
_IN_FLIGHT = 2
"""Tasks for each CPU that wait or run."""
_STORE_BYTES = 100 << 20
"""Of a Ray that is started here: results are a few KiB each."""
_SECONDS_OF_A_STATEMENT = 300.0
_SECONDS_BETWEEN_LOOKS = 5.0
_PACKAGES = "numpy tokenizers sentencepiece regex gigatoken jinja2 pillow av pyarrow zstandard zlib-ng".split()
"""Those that have a say in the bytes of a dataset."""
_AT_THE_END = -1, -1
"""The place of a task whose worker tells none: it was somewhere before the end."""
_FILES = 100
"""Input files whose sizes are compared."""


def run_on_ray(
    start: Callable[[Any], Handler],
    settings: Any,
    tasks: Sequence[Any],
    workers: int,
    describe: Callable[[Any, Sequence[int]], str],
    address: str | None = None,
    grown: Callable[[int, int], None] = lambda nodes, cpus: None,
) -> Iterator[Any]:
    """As `workers.run_tasks`, on the cluster at `address`, or on a Ray of `workers` CPUs that lives as long as this.

    `grown` is told nodes and CPUs whenever they change. ValueError: Ray is not installed, cannot start, its workers are
    not like this process, or what a handler raised. WorkerFailed: a task lost its worker too often, or raised.
    """
    if not tasks:
        return
    ray = _ray()
    with _connected(ray, address, workers):
        packed = pickle.dumps((start, settings))
        stated = statement(packed, os.getcwd())
        _compare_nodes(ray, packed, stated)
        yield from _Cluster(ray, packed, stated, grown).run(tasks, describe)


def _ray() -> Any:
    """The package; ValueError when it is not here."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--executor ray needs the package ray ({error}): pip install 'megacp[ray]'") from error
    return ray


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """A connection to Ray, ended with the block; ValueError when there is none to be had."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        if address is None:
            sizes = {"num_cpus": workers, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
            ray.init(address="local", **sizes, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises bare ones too
        what = (
            "Ray cannot start on this machine" if address is None else f"no Ray is reached at --ray-address {address}"
        )
        raise ValueError(f"--executor ray: {what}: {' '.join(str(error).split())}") from error
    try:
        if before is not None:
            signal.signal(signal.SIGTERM, before)  # `init` has put its own there
        yield
    finally:
        ray.shutdown()


@functools.lru_cache(maxsize=1)
def statement(packed: bytes, folder: str) -> dict[str, str]:
    """What must be equal in this process and in all workers, by the name that a message gives it.

    Relative paths count from `folder`, so the process goes there.
    """
    _, settings = pickle.loads(packed)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    found = {"the settings (sha256)": hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}
    found["the source of megacp (sha256)"] = source_digest()
    found["the version of Python"] = platform.python_version()
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"the version of {package}"] = importlib.metadata.version(package)
    for path in getattr(settings, "input", ())[:_FILES]:
        found[f"the size of --input {path}"] = str(os.path.getsize(path)) if os.path.exists(path) else "absent"
    journal = Path(getattr(settings, "output", ""), JOURNAL_NAME)
    if journal.is_file():
        with open(journal, "rb") as stream:
            found["the journal in --output"] = hashlib.sha256(stream.readline()).hexdigest()[:16]
    return found


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """What a worker states otherwise than this process, in words."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return [f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here" for name in names]


@functools.lru_cache(maxsize=1)
def _handler(packed: bytes) -> Handler:
    """Made once in a worker process."""
    start, settings = pickle.loads(packed)
    handler: Handler = start(settings)
    return handler


def _work(packed: bytes, folder: str, stated: dict[str, str], task: Any) -> tuple[str, Any]:
    """One task in a worker process: what became of it, and its result or why there is none."""
    if found := differences(stated, statement(packed, folder)):  # of a node that came later
        return "other worker", f"on {platform.node()} {'; '.join(found)}"
    try:
        return "result", _handler(packed)(task, [0, 0])
    except ValueError as error:
        return "wrong input", error
    except Exception:
        return "failed", traceback.format_exc()


def _state(packed: bytes, folder: str) -> dict[str, str]:
    return statement(packed, folder)


def _usable_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _compare_nodes(ray: Any, packed: bytes, stated: dict[str, str]) -> None:
    """ValueError that names every node which is not like this process, and in what."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _usable_nodes(ray)}
    answers = {}
    for number in nodes:
        there = NodeAffinitySchedulingStrategy(number, soft=False)
        asked = ray.remote(_state).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        answers[number] = asked.remote(packed, os.getcwd())
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=_SECONDS_OF_A_STATEMENT)
    reasons = []
    for number, answer in answers.items():
        try:
            found = differences(stated, ray.get(answer, timeout=0))
        except ray.exceptions.NodeDiedError:
            continue
        except ray.exceptions.RayError as error:
            found = [f"it cannot run megacp: {str(error).strip().splitlines()[-1]}"]
        if found:
            reasons.append(f"node {nodes[number]} ({number[:8]}): {'; '.join(found)}")
    if reasons:
        head = "--executor ray: all nodes must have the packages of this one and see its files"
        raise ValueError("\n".join([head, *reasons]))


class _Cluster:
    """Tasks on their way through a cluster."""

    def __init__(self, ray: Any, packed: bytes, stated: dict[str, str], grown: Callable[[int, int], None]) -> None:
        self._ray, self._grown = ray, grown
        self._known = packed, os.getcwd(), stated
        self._work = ray.remote(_work).options(num_cpus=1, max_retries=0)
        self._size, self._looked = (0, 0), -_SECONDS_BETWEEN_LOOKS
        errors = ray.exceptions
        self._lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        )

    def _cpus(self) -> int:
        """CPUs of all nodes, looked up now and then; those of nodes that come later count too."""
        if time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            nodes = _usable_nodes(self._ray)
            size = len(nodes), int(sum(node["Resources"]["CPU"] for node in nodes))
            if size != self._size:
                self._size = size
                self._grown(*size)
        return max(1, self._size[1])

    def run(self, tasks: Sequence[Any], describe: Callable[[Any, Sequence[int]], str]) -> Iterator[Any]:
        """Yield the results in the order in which they finish."""
        waiting = deque((task, 1) for task in tasks)
        flying: dict[Any, tuple[Any, int]] = {}
        try:
            while waiting or flying:
                while waiting and len(flying) < _IN_FLIGHT * self._cpus():
                    task, number = waiting.popleft()
                    flying[self._work.remote(*self._known, task)] = task, number
                ready, _ = self._ray.wait(list(flying), timeout=_SECONDS_BETWEEN_LOOKS)
                for answer in ready:
                    task, number = flying.pop(answer)
                    try:
                        kind, value = self._ray.get(answer)
                    except self._lost as error:
                        if number == _TRIES:
                            told = f"{_TRIES} workers were lost {describe(task, _AT_THE_END)}"
                            raise WorkerFailed(f"{told}: {str(error).strip().splitlines()[0]}") from error
                        waiting.appendleft((task, number + 1))
                        continue
                    yield self._judged(kind, value, task, describe)
        finally:
            for answer in flying:
                with contextlib.suppress(Exception):  # the connection may be what failed
                    self._ray.cancel(answer, force=True)

    def _judged(self, kind: str, value: Any, task: Any, describe: Callable[[Any, Sequence[int]], str]) -> Any:
        """The result of a task; raises what it has instead."""
        if kind == "wrong input":
            raise value
        if kind == "other worker":
            raise ValueError(f"--executor ray: a worker is not like this process: {value}")
        if kind == "failed":
            raise WorkerFailed(f"a worker failed {describe(task, _AT_THE_END)}:\n{value}")
        return value
