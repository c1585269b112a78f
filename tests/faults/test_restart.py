"""A machine that is lost: torchrun starts the run again, with another one or without, and it goes on bit for bit."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.machines import Machines
from tests.faults.processes import run_all
from tests.training.runs import TINY, losses

STEPS = ["--train-iters", "200", "--save-interval", "10", "--distributed-timeout-minutes", "1"]
FLAGS = [*TINY, *STEPS, "--global-batch-size", "12"]


def wait_until(happened: Callable[[], object], machines: Machines, seconds: float) -> None:
    begun = time.monotonic()
    while not happened():
        if time.monotonic() - begun > seconds:
            raise AssertionError("\n".join(machines.output(machine)[-3000:] for machine in range(machines.count)))
        time.sleep(0.1)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "least"), [(2, 2), (4, 3)], ids=["replaced", "dp 4 to 3"])
def test_a_run_that_lost_a_machine_ends_as_an_undisturbed_one(
    tmp_path: Path, moments: random.Random, count: int, least: int
) -> None:
    """Would catch an agent that looks for the others in the store of the life before, and steps that differ."""
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
    loading = ["--load", str(out / f"step_{first:07d}")] if least < count else []  # from there on the grid is another
    runs = run_all([[*FLAGS, *loading, "--save", str(clean)]] * least)
    assert [ended.status for ended in runs] == [0] * least
    same = losses(clean)
    assert {step: loss for step, loss in losses(out).items() if step in same} == same and max(same) == 200
