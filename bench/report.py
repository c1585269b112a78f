"""The frame of every benchmark: figures, goals, timing, and the JSON that holds them all.

A benchmark is a few named parts. Each returns its figures with its goals and a table to print;
`run_parts` runs those that are asked for, prints each as it ends and writes the JSON.
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
    """One figure beside its limit."""

    name: str
    value: float
    limit: float
    relation: str = "<="
    """Of value to limit: <= or >=."""

    @property
    def met(self) -> bool:
        """Whether the figure keeps its limit."""
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit

    def line(self) -> str:
        """As text."""
        word = "met" if self.met else "MISSED"
        return (
            f"  {self.name:<84}{self.value:>8.3f}  goal {self.relation:>2} {self.limit:<5g} {word}"
        )


@dataclass(frozen=True)
class Part:
    """The outcome of one part of a benchmark."""

    figures: dict[str, Any]
    """Goes into the JSON."""
    goals: Sequence[Goal] = ()
    table: str = ""


@dataclass(frozen=True)
class Seconds:
    """How long something took."""

    wall: float
    cpu: float
    """Processor time; its sum over ranks is the total work, which other programs on the machine
    move little.
    """


def timed(
    action: Callable[[], _T], cpu_clock: Callable[[], float] = time.process_time
) -> tuple[_T, Seconds]:
    """The result of a call and its seconds; processor time is that of this process, all threads, by
    default.
    """
    wall, cpu = time.perf_counter(), cpu_clock()
    result = action()
    return result, Seconds(time.perf_counter() - wall, cpu_clock() - cpu)


def take_turns(ways: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Results of `rounds` calls of every way. They alternate, so a slow minute of the machine slows
    all of them.
    """
    found: dict[str, list[_T]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            result, seconds = timed(way)
            found[name].append(result)
            print(f"  {name}: {number} of {rounds}, {seconds.wall:.2f} s", file=sys.stderr)
    return found


def benchmark_parser(
    description: str, parts: Sequence[str], left_out: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The flags of every benchmark; `left_out` are parts that run only when --only names them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: does it work"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    usual = [name for name in parts if name not in left_out]
    which = f"all but {' '.join(left_out)}" if left_out else "all"
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=usual, help=f"parts to run (default: {which})"
    )
    return parser


def run_parts(
    parts: Mapping[str, Callable[[], Part]], arguments: argparse.Namespace, **facts: Any
) -> int:
    """Run the parts that the flags ask for and print each; `facts` go into the JSON. The exit
    status.
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
