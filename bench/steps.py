"""Measures training steps on mock packs: the seconds, memory and sent bytes of each rank
(`make bench`).

A rank keeps its model between calls. The parallel layouts can therefore take turns, one step each,
and each needs only one warm-up.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.report import Goal, Part, Seconds, take_turns, timed
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import ProcessGrid, build_grid
from megacp.dry_run.report import table
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.step import ParallelModel
from megacp.engine.timers import Phase, unmeasured
from megacp.storage.wording import human_bytes
from megacp.training.data.mock import MockDecoder, MockRules
from megacp.training.data.reader import Pack
from megacp.training.data.tables import BRANCH_DTYPE
from megacp.training.loop.denominator import agree_on_step
from megacp.training.loop.images import image_loading
from megacp.training.monitor.flops import peak_bytes
from megacp.verify.parity import microbatches
from megacp.verify.spawn import RankPool


@dataclass(frozen=True)
class StepMeasure(Seconds):
    """One training step on one rank, measured between two barriers."""

    tokens: int
    """Number of tokens in the whole step, on all dp ranks."""
    loss: float
    memory: int
    """Peak memory of the process minus its memory before the model was built, in bytes."""
    sent: dict[str, int]
    """Bytes sent, by axis."""


class Subject:
    """A model to be measured; the constructor builds it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: RunConfig,
        rules: MockRules,
        phase: Phase = unmeasured,
    ) -> None:
        # With `auto`, two measurements could use different transports.
        if "auto" in (config.parallel.cp_comm_type, config.parallel.cp_layout):
            raise ValueError(
                "set --cp-comm-type and --cp-layout: a measurement needs one transport and layout"
            )
        torch.ones(8).sum()  # starts threads and allocators before the memory measurement
        self.before = peak_bytes()
        self.world_size = world_size
        self.config, self.rules = config, rules
        self.grid = build_grid(config.grid_shape(world_size), rank)
        self.model = ParallelModel(config, self.grid, phase)
        decoder = MockDecoder(rules.images) if rules.images is not None else None
        self.loading = image_loading(config, self.grid, self.model.rows, decoder)
        self.step = 0

    def measure(self, around: AbstractContextManager[None] | None = None) -> StepMeasure:
        """Train and measure one more step, inside `around` if it is given."""
        self.step += 1
        # Load the packs before the clock starts.
        batches = microbatches(self.config, self.rules, self.step, self.model.rows, self.loading)
        for axis in self.grid.all_axes():
            axis.traffic.clear()
        barrier(self.grid.world)
        with around or nullcontext():
            (tokens, loss), seconds = timed(lambda: self._train(batches))
        memory, sent = peak_bytes() - self.before, sent_bytes(self.grid)
        return StepMeasure(seconds.wall, seconds.cpu, tokens, loss, memory, sent)

    def _train(self, batches: Sequence[PackedBatch]) -> tuple[int, float]:
        """Train one step; return its tokens and loss after all ranks have finished."""
        agreed = agree_on_step(batches, self.grid, replica=self.model.rows.data_rank.index)
        loss = self.model.train(batches, self.step, agreed.denominator, agreed.tokens).loss
        barrier(self.grid.world)
        return agreed.tokens, loss


def sent_bytes(grid: ProcessGrid) -> dict[str, int]:
    """Return the bytes that this rank has sent since the counters were cleared, by axis."""
    names = {"cp_dp": "dp_cp", "pp_forward": "pp", "pp_backward": "pp"}
    total: dict[str, int] = defaultdict(int)
    for axis in grid.all_axes():
        total[names.get(axis.name, axis.name)] += axis.traffic.total()
    return {name: count for name, count in total.items() if count}


_subject = functools.cache(Subject)


def measure_rank(rank: int, world_size: int, config: RunConfig, rules: MockRules) -> StepMeasure:
    """Train one step on this rank, with the model that an earlier call with the same arguments
    built.
    """
    return _subject(rank, world_size, config, rules).measure()


TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
SIZES: dict[str, Value] = {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 4096,
    "seq_length": 1024,
    "global_batch_size": 4,
    "dtype": "float32",
}
QUICK_SIZES: dict[str, Value] = {**SIZES, "num_layers": 4, "vocab_size": 1024, "seq_length": 256}
LONG: dict[str, Value] = {"seq_length": 4096, "global_batch_size": 1}
BASE, BASE_TWO_THREADS = "one process, 1 thread", "one process, 2 threads"


@dataclass(frozen=True)
class Case:
    """One parallel layout of a group, whose members are compared with each other."""

    ranks: int
    values: dict[str, Value]
    threads: int = 1
    rules: type[MockRules] = MockRules


class Rollouts(MockRules):
    """Packs of one tree each: a prompt and `ROLLOUTS` answers, each a third as long."""

    def pack(self, i: int) -> Pack:
        # The prompt has three parts of n tokens and each answer one part.
        pack, n = super().pack(i), self.seq_length // (ROLLOUTS + 3)
        segments, starts = pack.segments.copy(), n * np.arange(3, ROLLOUTS + 3)
        segments["prefix_length"], segments["num_branches"] = starts[0], ROLLOUTS
        branches = np.array([(start, n, start + n) for start in starts.tolist()], BRANCH_DTYPE)
        return replace(pack, segments=segments, branches=branches)


ROLLOUTS, ROLLOUTS_GOAL, TREE = 8, 2.5, "one tree"

GROUPS: dict[str, dict[str, Case]] = {
    "short": {
        BASE: Case(1, {}),
        BASE_TWO_THREADS: Case(1, {}, threads=2),
        "dp 2": Case(2, {}),
        "tp 2": Case(2, {TP: 2}),
        "pp 2": Case(2, {PP: 2}),
        "cp 2": Case(2, {CP: 2}),
    },
    "long": {
        BASE: Case(1, LONG),
        BASE_TWO_THREADS: Case(1, LONG, threads=2),
        "cp 2, p2p": Case(2, {**LONG, CP: 2}),
        "cp 2, all_gather": Case(2, {**LONG, CP: 2, "cp_comm_type": "all_gather"}),
    },
    "four": {
        BASE: Case(1, {}),
        "cp 4": Case(4, {CP: 4}),
        "tp 2 x cp 2": Case(4, {TP: 2, CP: 2}),
    },
    "sharding": {
        BASE: Case(1, {}),
        **{
            f"dp 2, {strategy}": Case(2, {"data_parallel_sharding_strategy": strategy})
            for strategy in ("optim", "optim_grads", "optim_grads_params")
        },
    },
    "rollouts": {
        BASE: Case(1, {"seq_length": 1024, "global_batch_size": ROLLOUTS}),
        TREE: Case(1, {"seq_length": 256 * (ROLLOUTS + 3), "global_batch_size": 1}, rules=Rollouts),
    },
}
"""Two ranks with 1,024 tokens, cp 2 with 4,096 tokens, four ranks, sharding across dp, and several
answers to one prompt.
"""


def step_part(name: str, sizes: Mapping[str, Value], rounds: int) -> Part:
    """Measure steps of each parallel layout in a group of `GROUPS`, in turns.

    The first step of each layout is a warm-up and is not counted.
    """
    group = GROUPS[name]
    with ExitStack() as stack:

        def way(case: Case) -> Callable[[], list[StepMeasure]]:
            pool = stack.enter_context(RankPool(case.ranks, case.threads))
            config = with_values(RunConfig(), {**sizes, **case.values})
            rules = case.rules(config.model.vocab_size, config.data.seq_length, "causal", seed=1)
            return lambda: pool.run(measure_rank, config, rules)

        steps = take_turns({layout: way(case) for layout, case in group.items()}, rounds + 1)
    measured = {layout: found[1:] for layout, found in steps.items()}
    speed = {
        layout: statistics.median(
            step[0].tokens / max(rank.wall for rank in step) for step in found
        )
        for layout, found in measured.items()
    }
    work = {
        layout: statistics.median(max(rank.cpu for rank in step) for step in found)
        for layout, found in measured.items()
    }
    rows = [
        {
            "layout": layout,
            "ranks": group[layout].ranks,
            "threads": group[layout].threads,
            "tokens_per_second": speed[layout],
            "over_one_thread": speed[layout] / speed[BASE],
            "over_two_threads": speed[layout] / speed[BASE_TWO_THREADS]
            if BASE_TWO_THREADS in speed
            else None,
            "seconds": [max(rank.wall for rank in step) for step in found],
            "cpu_seconds": work[layout],
            "peak_memory": [rank.memory for rank in found[-1]],
            "loss": found[-1][0].loss,
            "bytes_sent": [rank.sent for rank in found[-1]],
        }
        for layout, found in measured.items()
    ]
    what = f"{ROLLOUTS} rollouts that share 3/4 of their tokens, a row each / one tree: work"
    goals = [Goal(what, work[BASE] / work[TREE], ROLLOUTS_GOAL, ">=")] if TREE in group else []
    return Part(
        {name: rows}, goals, step_table(f"{steps[BASE][0][0].tokens:,} tokens a step", rows)
    )


def step_table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with speed, ratios and the memory of the fullest rank, followed by the bytes
    sent along every axis.
    """
    # The first row has the column titles.
    cells = [[title, "tokens/s", "/1 thread", "/2 threads", "CPU s/rank", "peak/rank"]]
    bytes_sent = []
    for row in rows:
        second = "" if row["over_two_threads"] is None else f"{row['over_two_threads']:.2f}"
        speed, first = f"{row['tokens_per_second']:,.0f}", f"{row['over_one_thread']:.2f}"
        peak = human_bytes(max(row["peak_memory"]))
        cells.append([row["layout"], speed, first, second, f"{row['cpu_seconds']:.2f}", peak])
        for rank, sent in enumerate(row["bytes_sent"]):
            if sent:
                parts = ", ".join(f"{axis} {count:,}" for axis, count in sent.items())
                bytes_sent.append(f"  sent by rank {rank} of {row['layout']}: {parts}")
    return "\n".join([table(cells), *bytes_sent])
