"""A terminal that hangs up: the ranks save and stop, and under nohup they go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp.core.checkpoint.directory import committed
from megacp.core.training.stopping import REASONS, STOPPED, StopSignal
from tests.training.runs import TINY, losses

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = [*TINY, "--train-iters", "100000", "--lr-decay-iters", "100000"]


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    """Would catch a run under nohup that stops with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignal()
        signal.raise_signal(signal.SIGHUP)
        assert not stop.received and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        stop.release()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_whose_minutes_are_over_says_so_and_a_signal_counts_less() -> None:
    stop = StopSignal(minutes=5e-4)
    try:
        assert stop.reason == 0
        time.sleep(0.05)
        signal.raise_signal(signal.SIGUSR1)
        assert REASONS[stop.reason] == "stopped after --exit-duration"
    finally:
        stop.release()


def started(command: list[str], folder: Path, ignoring: bool = False) -> subprocess.Popen[str]:
    """A run that has made three steps."""
    disposition: Callable[[], object] = lambda: signal.signal(  # noqa: E731
        signal.SIGHUP, signal.SIG_IGN if ignoring else signal.SIG_DFL
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=disposition
    )
    deadline = time.monotonic() + 120
    while not (folder / "log.jsonl").exists() or len(losses(folder)) < 3:
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    return run


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.faults
@pytest.mark.parametrize("to", ["the launcher", "the ranks", "one rank"])
def test_a_hangup_makes_the_ranks_of_torchrun_save_and_stop(tmp_path: Path, to: str) -> None:
    """Would catch ranks that die where they stand when a terminal is closed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = started([*launcher, "-m", "megacp.train", *ENDLESS, "--save", str(tmp_path)], tmp_path)
    try:
        ranks = [pid for pid in children(run.pid) if b"megacp.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        for pid in {"the launcher": [run.pid], "the ranks": ranks, "one rank": ranks[1:]}[to]:
            os.kill(pid, signal.SIGHUP)
        output, _ = run.communicate(timeout=90)
    finally:
        run.kill()
        run.communicate()
    last = max(losses(tmp_path))
    assert f"stopped on request after step {last}" in output
    assert [path.name for path in committed(tmp_path)] == [f"step_{last:07d}"]


@pytest.mark.faults
def test_a_run_under_nohup_goes_on_and_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megacp.train", *ENDLESS, "--save", str(tmp_path)]
    run = started(command, tmp_path, ignoring=True)
    try:
        run.send_signal(signal.SIGHUP)
        seen = max(losses(tmp_path))
        deadline = time.monotonic() + 60
        while max(losses(tmp_path)) < seen + 5:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == STOPPED and "stopped on request" in output
