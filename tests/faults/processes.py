"""Real ranks of `megacp.train`: each is a process with its own flags, environment and folder.

Processes on one machine can therefore differ like machines. A pool of ranks would share one start.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """The end of a process, and its output."""

    status: int
    out: str
    err: str


def free_port() -> int:
    """Return a free port, below the ports that the system gives to connections of other tests."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("a hundred ports are taken")


def environment(rank: int, size: int, port: int, **changed: str | None) -> dict[str, str]:
    """Return a launcher's environment; None in `changed` removes a variable."""
    values: dict[str, str | None] = {
        key: text for key, text in os.environ.items() if "TORCHELASTIC" not in key
    }
    values |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    values |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    values |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    values |= changed
    return {key: text for key, text in values.items() if text is not None}


def launch(
    flags: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    module: str = "megacp.train",
) -> subprocess.Popen[str]:
    """Start one process in `folder`."""
    command = [sys.executable, "-m", module, *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder or ROOT, env=dict(environment), stdout=pipe, stderr=pipe, text=True
    )


def ends(processes: Sequence[subprocess.Popen[str]], timeout: float = 200.0) -> list[Ended]:
    """Return how all processes end, in order; none outlives this call. A process that hangs fails the
    test with its stacks.
    """
    try:
        return [_end(process, timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _end(process: subprocess.Popen[str], timeout: float) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate(timeout=30)
        raise AssertionError(f"a rank hangs:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def run_all(
    flags: Sequence[Sequence[str]], folders: Sequence[Path] | None = None, timeout: float = 200.0
) -> list[Ended]:
    """Start one rank by hand for each list of flags, and return how they end."""
    port, size = free_port(), len(flags)
    places = folders or [ROOT] * size
    return ends(
        [launch(flags[r], environment(r, size, port), places[r]) for r in range(size)], timeout
    )
