"""Ranks that hang, machines that are lost, terminals that hang up: all other processes end, save or
restart.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp.distributed.grid import single_axis
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import committed
from megacp.training.loop.stopping import REASONS, StopSignal
from tests.faults.machines import Machines
from tests.faults.processes import ROOT, Ended, ends, environment, free_port, launch, run_all
from tests.training.runs import TINY, grid_flags, losses

MODULE = "tests.training.faulty_rank"
SIX = [*TINY, "--train-iters", "6", "--save-interval", "2", "--distributed-timeout-minutes", "0.25"]


def survivors(
    tmp_path: Path, fault: str, where: int, size: int, flags: list[str]
) -> dict[int, Ended]:
    """Return how the other ranks end after the rank `where` has a fault in step 3; it is killed after
    them.
    """
    port = free_port()
    arguments = [fault, str(where), "3", *SIX, *flags, "--save", str(tmp_path / "out")]
    processes = [
        launch(arguments, environment(rank, size, port), module=MODULE) for rank in range(size)
    ]
    others = [rank for rank in range(size) if rank != where]
    try:
        return dict(zip(others, ends([processes[rank] for rank in others]), strict=True))
    finally:
        assert processes[where].poll() is None
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "where", "size", "flags", "told"),
    [
        ("stop in step", 0, 3, grid_flags(tp=1), "the run's store does not answer"),
        (
            "stop in step",
            1,
            2,
            grid_flags(tp=1),
            "no message from rank 1 in step 3: stopped, dead, or still computing",
        ),
        (
            "hang in step",
            1,
            4,
            grid_flags(tp=2),
            "no message from rank 1 in step 3: stopped, dead, or still computing",
        ),
        (
            "hang in step",
            1,
            4,
            grid_flags(pp=2),
            "no message from rank 1 in step 3: stopped, dead, or still computing",
        ),
    ],
    ids=["a frozen machine with the store", "a frozen rank", "tp", "pp"],
)
def test_a_rank_that_hangs_ends_the_others_and_is_named(
    tmp_path: Path, fault: str, where: int, size: int, flags: list[str], told: str
) -> None:
    """A report that waits for a store without an answer also ends."""
    for rank, ended in survivors(
        tmp_path, fault, where, size, [*flags, "--global-batch-size", "12"]
    ).items():
        assert ended.status == 1
        assert f"rank {rank} failed in step 3: RuntimeError" in ended.err and told in ended.err


def slow_save(tmp_path: Path, where: int, *flags: str) -> list[Ended]:
    """One of two ranks takes 25 s to write; a collective may take 15 s."""
    port = free_port()
    saving = ["--save-interval", "0", *flags, "--save", str(tmp_path / "out")]
    arguments = ["slow in writing", str(where), "0", *SIX, *saving]
    return ends([launch(arguments, environment(rank, 2, port), module=MODULE) for rank in range(2)])


@pytest.mark.faults
@pytest.mark.parametrize(("where", "saving"), [(0, []), (1, []), (1, ["--async-save"])])
def test_a_save_that_takes_longer_than_a_collective_may_ends_no_run(
    tmp_path: Path, where: int, saving: list[str]
) -> None:
    first, second = slow_save(tmp_path, where, *saving)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert load_checkpoint(tmp_path / "out", single_axis("world")).step == 6


@pytest.mark.faults
def test_the_ranks_of_a_killed_agent_go_on_and_save(tmp_path: Path) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    flags = [
        *TINY,
        "--train-iters",
        "100000",
        "--lr-decay-iters",
        "300",
        "--save-interval",
        "50",
        "--keep-last",
        "2",
    ]
    command = [*launcher, "-m", "megacp.train", *flags, "--save", str(tmp_path)]
    with open(tmp_path / "said", "wb") as said:
        agent = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
        )
    ranks: list[int] = []
    try:
        wait_for(lambda: bool(committed(tmp_path)))
        ranks = [
            int(pid)
            for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        ]
        agent.kill()
        agent.wait()
        before = committed(tmp_path)
        wait_for(lambda: max(committed(tmp_path)) > max(before))
        os.kill(ranks[0], signal.SIGTERM)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        assert b"stopped on request" in (tmp_path / "said").read_bytes()
        assert max(committed(tmp_path)).name == f"step_{max(losses(tmp_path)):07d}"
    finally:
        for pid in [agent.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)


STEPS = ["--train-iters", "200", "--save-interval", "10", "--distributed-timeout-minutes", "1"]
FLAGS = [*TINY, *STEPS, "--global-batch-size", "12"]


def wait_until(happened: Callable[[], object], machines: Machines, seconds: float) -> None:
    begun = time.monotonic()
    while not happened():
        if time.monotonic() - begun > seconds:
            raise AssertionError(
                "\n".join(machines.output(machine)[-3000:] for machine in range(machines.count))
            )
        time.sleep(0.1)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "least"), [(2, 2), (4, 3)], ids=["replaced", "dp 4 to 3"])
def test_a_run_that_lost_a_machine_ends_as_an_undisturbed_one(
    tmp_path: Path, moments: random.Random, count: int, least: int
) -> None:
    out, clean = tmp_path / "out", tmp_path / "clean"
    machines = Machines([*FLAGS, "--save", str(out), "--auto-resume"], tmp_path, count, least)
    try:
        for machine in range(count):
            machines.start(machine)
        wait_until(lambda: any(out.glob("step_*/manifest.json")), machines, 300)
        time.sleep(moments.uniform(0.0, 1.0))
        machines.lose(count - 1)
        lost = time.monotonic()
        if least == count:
            machines.start(count - 1)
        said = lambda: "".join(map(machines.output, range(count)))  # noqa: E731
        wait_until(lambda: re.search(r"resumed from .* after step \d+", said()), machines, 240)
        print(f"resumed after {time.monotonic() - lost:.1f} s")
        assert set(machines.wait(240).values()) == {0}, said()[-3000:]
    finally:
        machines.end()
    first = max(int(step) for step in re.findall(r"resumed from .* after step (\d+)", said()))
    loading = (
        ["--load", str(out / f"step_{first:07d}")] if least < count else []
    )  # the grid differs from here on
    runs = run_all([[*FLAGS, *loading, "--save", str(clean)]] * least)
    assert [ended.status for ended in runs] == [0] * least
    same = losses(clean)
    assert {step: loss for step, loss in losses(out).items() if step in same} == same and max(
        same
    ) == 200


ENDLESS = [*TINY, "--train-iters", "100000", "--lr-decay-iters", "100000"]


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
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
    """Return a run that has made three steps."""
    disposition: Callable[[], object] = lambda: signal.signal(  # noqa: E731
        signal.SIGHUP, signal.SIG_IGN if ignoring else signal.SIG_DFL
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=disposition,
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
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = started([*launcher, "-m", "megacp.train", *ENDLESS, "--save", str(tmp_path)], tmp_path)
    try:
        ranks = [
            pid
            for pid in children(run.pid)
            if b"megacp.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
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
