"""The profile of every grid as one table: milliseconds of a step by phase and by class, and how far from the limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.profile.operators import ATTENTION, CLASSES, PRODUCTS
from bench.profile.steps import BETWEEN, RankProfile, ThreadTime, profile_rank
from bench.report import Part
from bench.steps import CP, PP, TP
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.data.synthetic.mock import MockRules
from megacp.core.distributed.spawn import RankPool
from megacp.core.monitor.timers import COMPUTING, WAITING
from megacp.core.planner.report import table

GRIDS: dict[str, tuple[int, dict[str, Value]]] = {
    "1": (1, {}),
    "dp 2": (2, {}),
    "tp 2": (2, {TP: 2}),
    "pp 2": (2, {PP: 2}),
    "cp 2": (2, {CP: 2}),
    "cp 4": (4, {CP: 4}),
    "tp 2 x cp 2": (4, {TP: 2, CP: 2}),
}
"""Ranks, and flags beside the sizes."""
PYTHON, THREADS = "Python, autograd's engine, clock", "gloo's threads"
STEP_ROWS = {
    "wall": "wall",
    "on a core": "cpu",
    "ready, no core free": "ready",
    "asleep: waiting for ranks": "asleep",
}
"""Titles of rows and fields of `ThreadTime`: the last three are the first."""
_SPANS = ("wall", "cpu", "ready", "asleep", "process")


def _spans(spans: Sequence[ThreadTime]) -> dict[str, float]:
    return {name: statistics.median(getattr(span, name) for span in spans) for name in _SPANS}


def rank_figures(rank: RankProfile) -> dict[str, Any]:
    """Of one rank, seconds: medians over its clocked steps, so sums may differ from the step by their spread."""
    steps = rank.clocked
    phases = {name for step in steps for name in step.phases}
    seconds = [{**step.seconds, PYTHON: step.python, THREADS: step.threads} for step in steps]
    classes = {
        name: statistics.median(of_step.get(name, 0.0) for of_step in seconds) for name in (*CLASSES, PYTHON, THREADS)
    }
    step = _spans([step.step for step in steps])
    return {
        "step": step,
        "plain": _spans(rank.plain),
        "phases": {name: _spans([step.phases.get(name, ThreadTime()) for step in steps]) for name in sorted(phases)},
        "classes": {name: seconds for name, seconds in classes.items() if seconds},
        "calls": steps[-1].calls,
        "unknown": steps[-1].unknown,
        "alone": rank.alone,
        "residue": sum(classes.values()) / step["process"] - 1.0,
    }


def profile_part(sizes: Mapping[str, Value], rounds: int) -> Part:
    """Clocked steps of every grid, one grid after the other; `sizes` are the flags that all have."""
    found: dict[str, list[dict[str, Any]]] = {}
    tokens = 0
    for name, (ranks, values) in GRIDS.items():
        config = with_values(RunConfig(), {**sizes, **values})
        rules = MockRules(config.model.vocab_size, config.data.seq_length, "causal", seed=1)
        with RankPool(ranks) as pool:
            profiles: list[RankProfile] = pool.run(profile_rank, config, rules, rounds)
        found[name] = [rank_figures(profile) for profile in profiles]
        tokens = profiles[0].tokens
    lines = [f"{tokens:,} tokens a step, milliseconds: of rank 0 / mean over ranks", profile_table(found, tokens)]
    unknown = sorted({name for ranks in found.values() for rank in ranks for name in rank["unknown"]})
    lines += [f"operators without a class: {', '.join(unknown)}"] if unknown else []
    return Part({"profile": found}, table="\n".join(lines))


def profile_table(found: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int) -> str:
    """A column a grid; `found` is grid to the figures of its ranks. Goes through wall time, processor time, limit."""

    def row(title: str, *keys: str) -> list[str]:
        return [f"  {title}", *(_both([1e3 * _at(rank, keys) for rank in ranks]) for ranks in found.values())]

    def head(title: str) -> list[str]:
        return [title, *("" for _ in found)]

    def named(key: str, order: Sequence[str]) -> list[str]:
        there = {name for ranks in found.values() for rank in ranks for name in rank[key]}
        return [name for name in order if name in there] + sorted(there - set(order))

    cells = [["step", *found]]
    cells += [row(title, "step", kind) for title, kind in STEP_ROWS.items()]
    for title, kind in (("processor, by phase", "cpu"), ("asleep, by phase", "asleep")):
        cells.append(head(title))
        cells += [row(name, "phases", name, kind) for name in named("phases", (*COMPUTING, *WAITING, BETWEEN))]
    cells.append(head("processor, by class"))
    cells += [row(name, "classes", name) for name in named("classes", (*CLASSES, PYTHON, THREADS))]
    cells.append(row("sum: processor of all threads", "step", "process"))
    cells.append(row("the same without the clock", "plain", "process"))
    cells.append(head("limit: the same calls alone"))
    cells += [row(name, "alone", name) for name in (PRODUCTS, ATTENTION)]
    cells.append(["processor over the limit", *(f"{over_limit(ranks):.2f}" for ranks in found.values())])
    walls = [max(rank["plain"]["wall"] for rank in ranks) for ranks in found.values()]
    cells.append(["tokens/s without the clock", *(f"{tokens / wall:,.0f}" for wall in walls)])
    residue = [max(abs(rank["residue"]) for rank in ranks) for ranks in found.values()]
    cells.append(["classes' medians over their sum", *(f"{value:.1%}" for value in residue)])
    return table(cells)


def _at(figures: Mapping[str, Any], keys: Sequence[str]) -> float:
    """A figure by its way through the dictionaries; 0 where a rank has none."""
    value: Any = figures
    for key in keys:
        value = value.get(key, {})
    return value or 0.0


def over_limit(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Processor seconds of plain steps, all ranks, over those of their products and attention alone."""
    return sum(rank["plain"]["process"] for rank in ranks) / sum(sum(rank["alone"].values()) for rank in ranks)


def _both(milliseconds: Sequence[float]) -> str:
    """Rank 0's and the mean; one figure for one rank."""
    first, mean = round(milliseconds[0]), round(sum(milliseconds) / len(milliseconds))
    return f"{first:,}" if len(milliseconds) == 1 else f"{first:,} / {mean:,}"
