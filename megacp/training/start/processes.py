"""Launcher for `--nproc N`: it starts N ranks on this machine, forwards signals and waits."""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from megacp.training.monitor.console import warn
from megacp.training.start import launch
from megacp.training.start.interrupts import handles
from megacp.training.start.status import FAILED, STOPPED

# How long the other ranks may continue after a failure: an NCCL collective would wait forever.
_SECONDS_AFTER_A_FAILURE = 60.0


def ranks_asked(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return N from `--nproc N` (0 without the flag) and the remaining arguments.

    Raise ValueError if N is not a number, or if torchrun has started this process.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nproc", type=int, default=0)
    try:
        found, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if found.nproc > 0 and launch.world_from_environment().size > 1:
        raise ValueError(
            f"--nproc {found.nproc} starts the ranks itself: use either torchrun or --nproc"
        )
    return found.nproc, others


def start_and_wait(arguments: Sequence[str], count: int) -> int:
    """Start the ranks, forward signals, wait for the ranks, and return the run's exit status.

    On Ctrl-C, this process sends SIGTERM to the ranks. If all ranks handle SIGTERM, they save and
    stop. Otherwise, no step has begun, and all ranks are killed, because ranks that wait for an
    ended rank would report a failure.
    """
    # the store must exist as long as the ranks
    _store, environments = launch.ranks_of_one_machine(count)
    ranks: list[subprocess.Popen[bytes]] = []
    ended_by: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked = signal.SIGTERM if number == signal.SIGINT else signal.Signals(number)
        running = [one for one in ranks if one.poll() is None]
        # Before training, ranks have no handler, and some may not even have started.
        if len(ranks) < count or not all(handles(one.pid, asked) for one in running):
            ended_by.append(number)
            asked = signal.SIGKILL
        for one in running:
            one.send_signal(asked)

    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup makes this process ignore SIGHUP
        passed_on.add(signal.SIGHUP)
    for number in passed_on:
        signal.signal(number, pass_on)
    command = [sys.executable, "-m", "megacp.train", *arguments]
    for environment in environments:
        # Ranks ignore Ctrl-C until they train; otherwise, each would print a traceback.
        ranks.append(subprocess.Popen(command, env=environment, preexec_fn=_ignore_ctrl_c))
    if ended_by:  # a signal arrived while ranks were being started
        pass_on(ended_by[0], None)
    status = _wait_for(ranks, ended_by)
    if ended_by:
        warn("interrupted before the first step")
        return 128 + ended_by[0]
    return status


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]], ended_by: Sequence[int]) -> int:
    """Wait until all ranks have ended; return the status of the first failure, or the highest.

    `ended_by` lists the signals for which all ranks were killed on purpose.
    """
    first: tuple[int, int] | None = None  # status and rank of the first failure
    deadline = math.inf
    ended: list[tuple[int, int]] = []
    while len(ended) < len(ranks):
        time.sleep(0.05)  # poll all ranks, because any of them may end first
        ended = [
            (status, rank) for rank, one in enumerate(ranks) if (status := one.poll()) is not None
        ]
        failed = [(status, rank) for status, rank in ended if status not in (0, STOPPED)]
        if failed and first is None:  # a killed rank has a negative status
            first = min(failed)
            deadline = time.monotonic() + _SECONDS_AFTER_A_FAILURE
        if time.monotonic() > deadline:
            for one in ranks:
                one.kill()
    status, rank = first or max(ended)
    if status < 0 and not ended_by:
        warn(f"error: rank {rank} was ended by {signal.Signals(-status).name}")
    return status if status >= 0 else FAILED
