"""Steps of layouts on this machine's CPU beside the seconds of a plan that was calibrated on it (`--only plan`).

The sheet is measured first, on other sizes (megacp/verify/calibrate.py). Then the layouts take turns, one step each.
Beside the seconds of a step stand the processor seconds of its busiest rank, which other programs move little.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from bench.report import Goal, Part, take_turns
from bench.steps import CP, PP, TP, StepMeasure, measure_rank
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.data.mock import MockRules
from megacp.plan.hardware import NETWORKS, hardware_of
from megacp.plan.packs import PackSample
from megacp.plan.report import table
from megacp.plan.times import step_time
from megacp.verify.calibrate import calibrated
from megacp.verify.spawn import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Value]]] = {
    "one process": (1, {}),
    "selective": (1, {"recompute_granularity": "selective"}),
    "full": (1, {"recompute_granularity": "full"}),
    "micro batch 2": (1, {"micro_batch_size": 2}),
    "dp 2": (2, {}),
    "dp 2, all sharded": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp 2": (2, {TP: 2}),
    "pp 2": (2, {PP: 2}),
    "pp 2, zero bubble": (2, {PP: 2, "pipeline_schedule": "zero_bubble"}),
    "cp 2, p2p": (2, {CP: 2}),
    "cp 2, kv_exchange": (2, {CP: 2, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}),
    "dp 4": (4, {}),
    "pp 4": (4, {PP: 4}),
    "dp 2 x pp 2": (4, {PP: 2}),
    "tp 2 x cp 2": (4, {TP: 2, CP: 2}),
    "cp 4": (4, {CP: 4}),
}
"""Ranks and flags."""
LIMITS = {1: 0.10, 2: 0.15, 4: 0.15}
"""Most relative error of the worst layout, by ranks."""


def plan_part(sizes: Mapping[str, Value], rounds: int) -> Part:
    """Median seconds of each layout, planned ones, and what the plan's first choice costs."""
    here = hardware_of(calibrated("cpu")[0], NETWORKS[0])
    configs = {name: with_values(RunConfig(), {**sizes, **values}) for name, (_, values) in LAYOUTS.items()}
    with ExitStack() as stack:
        pools = {ranks: stack.enter_context(RankPool(ranks)) for ranks in LIMITS}

        def way(name: str) -> Callable[[], list[StepMeasure]]:
            config = configs[name]
            rules = MockRules(config.model.vocab_size, config.data.seq_length, "causal", seed=1)
            return functools.partial(pools[LAYOUTS[name][0]].run, measure_rank, config, rules)

        steps = take_turns({name: way(name) for name in LAYOUTS}, rounds + 1)
    rows: list[dict[str, Any]] = []
    for name, (ranks, _) in LAYOUTS.items():
        time = step_time(configs[name], ranks, here, PackSample())
        rows.append({"layout": name, "ranks": ranks})
        for clock, planned in (("wall", time.total), ("cpu", time.busy)):
            found = statistics.median(max(getattr(rank, clock) for rank in step) for step in steps[name][1:])
            rows[-1] |= {clock: found, f"planned {clock}": planned, f"{clock} ratio": planned / found}
        # the cores are taken in turns; a pipeline's idle time is not in it
        work = statistics.median(sum(rank.cpu for rank in step) for step in steps[name][1:]) / here.cores
        rows[-1]["cpu on the cores"] = max(work, rows[-1]["cpu"])
    pick = min(rows, key=lambda row: row["planned wall"])
    goals = []
    for clock, cost in (("wall", "wall"), ("cpu", "cpu on the cores")):
        for ranks, limit in LIMITS.items():
            worst = max(abs(row[f"{clock} ratio"] - 1) for row in rows if row["ranks"] == ranks)
            goals.append(Goal(f"{ranks} ranks, {clock} seconds: the worst plan is off by", worst, limit))
        what = f"{pick['layout']}, the plan's choice, over the best in {clock} seconds"
        goals.append(Goal(what, pick[cost] / min(row[cost] for row in rows), 1.05))
    texts = ([f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows)
    return Part({"plan": rows}, goals, table([list(rows[0]), *texts]))
