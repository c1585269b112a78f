"""Code that all benchmarks share: figures, goals, timing, and the JSON output.

A benchmark consists of named parts. Each part returns its figures, its goals, and a table to print.
`run_parts` runs the requested parts, prints each result, and writes the JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Goal:
    """A figure and its limit."""

    name: str
    value: float
    limit: float
    relation: str = "<="
    """Required relation of the value to the limit: <= or >=."""

    @property
    def met(self) -> bool:
        """Whether the figure meets its limit."""
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit

    def line(self) -> str:
        """Return the goal as one line of text."""
        word = "met" if self.met else "MISSED"
        return (
            f"  {self.name:<84}{self.value:>8.3f}  goal {self.relation:>2} {self.limit:<5g} {word}"
        )


@dataclass(frozen=True)
class Part:
    """The result of one part of a benchmark."""

    figures: dict[str, Any]
    """Values for the JSON file."""
    goals: Sequence[Goal] = ()
    table: str = ""


@dataclass(frozen=True)
class Seconds:
    """The duration of an action."""

    wall: float
    cpu: float
    """CPU time. Its sum over ranks is the total work, which other programs on the machine hardly
    affect.
    """


def timed(
    action: Callable[[], _T], cpu_clock: Callable[[], float] = time.process_time
) -> tuple[_T, Seconds]:
    """Return the result of a call and its duration.

    By default, CPU time covers all threads of this process.
    """
    wall, cpu = time.perf_counter(), cpu_clock()
    result = action()
    return result, Seconds(time.perf_counter() - wall, cpu_clock() - cpu)


def take_turns(ways: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Call each of `ways` once per round, and return its results.

    The ways alternate, so that a slow phase of the machine affects all of them.
    """
    found: dict[str, list[_T]] = {name: [] for name in ways}
    # The outer loop is over rounds, so that every way runs at all times of the measurement.
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            result, seconds = timed(way)
            found[name].append(result)
            print(f"  {name}: {number} of {rounds}, {seconds.wall:.2f} s", file=sys.stderr)
    return found


def benchmark_parser(
    description: str, parts: Sequence[str], left_out: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks share.

    Parts in `left_out` run only if they are selected with --only.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes and few rounds, to test the benchmark"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    usual = [name for name in parts if name not in left_out]
    which = f"all except {' '.join(left_out)}" if left_out else "all"
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=usual, help=f"parts to run (default: {which})"
    )
    return parser


def run_parts(
    parts: Mapping[str, Callable[[], Part]], arguments: argparse.Namespace, **facts: Any
) -> int:
    """Run and print the parts that the flags request; return the exit status.

    `facts` are added to the JSON file.
    """
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start", flush=True)
    result: dict[str, Any] = {
        "quick": arguments.quick,
        "cores": os.cpu_count(),
        "load_before": load,
        **facts,
    }
    goals: list[Goal] = []
    for name in (name for name in parts if name in arguments.only):
        part = parts[name]()
        result |= part.figures
        goals += part.goals
        lines = [f"\n{name}", part.table, *(goal.line() for goal in part.goals)]
        print("\n".join(line for line in lines if line), flush=True)
    if goals:
        print(f"\n{sum(goal.met for goal in goals)} of {len(goals)} goals met")
    result["goals"] = [{**dataclasses.asdict(goal), "met": goal.met} for goal in goals]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
