"""Compares the measured steps of parallel layouts on this machine's CPU with a plan that was
calibrated on the same machine (`--only plan`).

The steps of the layouts take turns with the steps of `megacp-plan calibrate`, which have other
sizes, because the speed of the machine changes from minute to minute (megacp/plan/calibrate.py).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from bench.report import Goal, Part, take_turns
from bench.steps import CP, PP, TP, StepMeasure, measure_rank
from megacp.dry_run.packs import PackSample
from megacp.dry_run.report import table
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.plan.calibrate import RUNS, calibrated
from megacp.plan.hardware import NETWORKS, hardware_of
from megacp.plan.times import step_time
from megacp.training.data.mock import MockRules
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
"""Name of a parallel layout -> its number of ranks, and its flags."""
CALIBRATE = "calibrate: "
LIMITS = {1: 0.10, 2: 0.15, 4: 0.15}
"""Number of ranks -> limit on the relative error of the worst parallel layout."""


def plan_part(sizes: Mapping[str, Value], rounds: int) -> Part:
    """Measure each parallel layout, and compare the medians with the plan.

    Also report how much slower the plan's first choice is than the best parallel layout.
    """
    configs = {
        name: with_values(RunConfig(), {**sizes, **values}) for name, (_, values) in LAYOUTS.items()
    }
    with ExitStack() as stack:
        pools = {ranks: stack.enter_context(RankPool(ranks)) for ranks in LIMITS}

        def way(
            ranks: int, config: RunConfig, mask: str = "causal"
        ) -> Callable[[], list[StepMeasure]]:
            rules = MockRules(config.model.vocab_size, config.data.seq_length, mask, seed=1)
            return functools.partial(pools[ranks].run, measure_rank, config, rules)

        ways = {name: way(LAYOUTS[name][0], config) for name, config in configs.items()}
        for name, run in RUNS["cpu"].items():
            ways[f"{CALIBRATE}{name}"] = way(run.ranks, run.config("float32"), run.mask)
        steps = take_turns(ways, rounds + 1)

    seconds = {
        name: statistics.median(max(rank.wall for rank in step) for step in found[1:])
        for name, found in steps.items()
    }
    # Calibrate a hardware sheet of this machine with the measured runs, and plan with it.
    measured = {name: seconds[f"{CALIBRATE}{name}"] for name in RUNS["cpu"]}
    here = hardware_of(calibrated("cpu", measured), NETWORKS[0])
    rows: list[dict[str, Any]] = []
    for name, (ranks, _) in LAYOUTS.items():
        planned, found = step_time(configs[name], ranks, here, PackSample()).total, seconds[name]
        rows.append(
            {
                "layout": name,
                "ranks": ranks,
                "s": found,
                "planned s": planned,
                "ratio": planned / found,
            }
        )
    goals = []
    for ranks, limit in LIMITS.items():
        worst = max(abs(row["ratio"] - 1) for row in rows if row["ranks"] == ranks)
        goals.append(Goal(f"{ranks} ranks: the worst plan is off by", worst, limit))
    # In practice, what matters is how much slower the plan's choice is than the real best one.
    pick = min(rows, key=lambda row: row["planned s"])
    over = pick["s"] / min(row["s"] for row in rows)
    goals.append(Goal(f"{pick['layout']}, the plan's choice, over the best", over, 1.05))
    texts = (
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        for row in rows
    )
    return Part({"plan": rows}, goals, table([list(rows[0]), *texts]))
