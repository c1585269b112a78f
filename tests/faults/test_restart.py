"""A machine that is lost for good: the run goes on with fewer data-parallel ranks, as a clean one would."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.machines import Machines
from tests.faults.processes import run_all
from tests.training.runs import TINY, losses

LONG = [*TINY, "--train-iters", "100000", "--lr-decay-iters", "300", "--distributed-timeout-minutes", "1"]


def steps(folder: Path) -> int:
    """Steps that were trained, repeated ones counted again."""
    log = folder / "out" / "log.jsonl"
    return log.read_text().count('"kind": "train"') if log.exists() else 0


def wait_until(happened: Callable[[], bool], machines: Machines, seconds: float) -> float:
    """Seconds until it happened."""
    begun = time.monotonic()
    while not happened():
        if time.monotonic() - begun > seconds:
            raise AssertionError("\n".join(machines.output(machine)[-3000:] for machine in range(machines.count)))
        time.sleep(0.1)
    return time.monotonic() - begun


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    """Makes machines; they are gone after the test."""
    made: list[Machines] = []

    def make(flags: list[str], count: int, least: int) -> Machines:
        saving = ["--save", str(tmp_path / "out"), "--save-interval", "10", "--auto-resume"]
        made.append(Machines([*LONG, *flags, *saving], tmp_path, count, least))
        return made[-1]

    yield make
    for one in made:
        one.end()


def resumed(machines: Machines, used: str) -> list[int]:
    """The steps after which rank 0 resumed on so many ranks, as its first line says."""
    found: list[int] = []
    for machine in range(machines.count):
        text = machines.output(machine).rpartition(used)
        found += [int(step) for step in re.findall(r"resumed from .* after step (\d+)", text[2])] if text[1] else []
    return found


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_that_lost_one_of_four_machines_goes_on_without_it(
    machines: Callable[..., Machines],
    tmp_path: Path,
    moments: random.Random,
    record_property: Callable[[str, object], None],
) -> None:
    """Would catch a run that needs the number of ranks it began with, and one that goes on differently."""
    flags, before, after = ["--global-batch-size", "12"], "4 ranks = ", "3 ranks = "
    four = machines(flags, 4, 3)
    for machine in range(4):
        four.start(machine)
    wait_until(lambda: before in "".join(map(four.output, range(4))), four, 300)
    wait_until(lambda: any((tmp_path / "out").glob("step_*/manifest.json")), four, 120)
    time.sleep(moments.uniform(0.0, 2.0))
    four.lose(moments.choice([1, 2, 3]))
    trained = steps(tmp_path)
    lost = time.monotonic()
    wait_until(lambda: bool(resumed(four, after)), four, 240)
    first = max(resumed(four, after))
    again = re.compile(rf"step +{first + 1}/")
    wait_until(lambda: any(again.search(four.output(m).rpartition(after)[2]) for m in range(4)), four, 60)
    record_property("seconds to the first resumed step", round(time.monotonic() - lost, 1))
    print(f"first resumed step after {time.monotonic() - lost:.1f} s; {trained} steps were trained before")
    wait_until(lambda: max(losses(tmp_path / "out")) >= first + 5, four, 120)
    four.end()
    went_on = losses(tmp_path / "out")
    last = first + 5
    source = next((tmp_path / "out").glob(f"step_{first:07d}"))
    loading = ["--load", str(source), "--save", str(tmp_path / "clean"), "--train-iters", str(last)]
    alone = [*LONG, *flags, *loading]
    assert [ended.status for ended in run_all([alone] * 3)] == [0] * 3
    assert {step: went_on[step] for step in range(first + 1, last + 1)} == losses(tmp_path / "clean")


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_machine_that_replaces_a_lost_one_meets_the_others(
    machines: Callable[..., Machines], tmp_path: Path, moments: random.Random
) -> None:
    """Would catch a new agent that looks for the others in the store of the life before."""
    two = machines(["--global-batch-size", "12"], 2, 2)
    for machine in range(2):
        two.start(machine)
    wait_until(lambda: any((tmp_path / "out").glob("step_*/manifest.json")), two, 300)
    time.sleep(moments.uniform(0.0, 2.0))
    two.lose(1)
    lost = time.monotonic()
    two.start(1)
    wait_until(lambda: bool(resumed(two, "2 ranks = ")), two, 240)
    first = max(resumed(two, "2 ranks = "))
    wait_until(lambda: max(losses(tmp_path / "out")) >= first + 5, two, 120)
    print(f"five steps after {time.monotonic() - lost:.1f} s")
