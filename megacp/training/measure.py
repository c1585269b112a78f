"""Measuring training steps on mock packs: seconds, memory and bytes sent of one rank, for `make bench`.

Key property: a rank keeps its trainee between calls, so steps of different layouts can take turns on a noisy machine
and each layout still warms up once. Rejected: one run after the other, which measures the machine's mood.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from megacp.config.run import RunConfig
from megacp.context_parallel.layout import select_layout
from megacp.context_parallel.shard import mask_metadata
from megacp.data.mock import MockRules
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import ProcessGrid, build_grid
from megacp.models.build import grid_shape, stage_layers
from megacp.monitor.memory import peak_bytes
from megacp.planner.traffic import StageTraffic, stage_traffic
from megacp.training.loss import agree
from megacp.training.parity import microbatches
from megacp.training.step import Trainee


@dataclass(frozen=True)
class StepMeasure:
    """One training step on one rank."""

    seconds: float
    """Wall time between two barriers."""
    cpu_seconds: float
    """Processor time of this process, all its threads: hardly moved by what else the machine does."""
    tokens: int
    """Of the whole step, over dp."""
    loss: float
    memory: int
    """Bytes: the process's peak so far, less what it held before the model was built."""
    sent: dict[str, int]
    """Bytes sent by axis, named as in `StageTraffic`."""
    formula: StageTraffic
    """Bytes that planner/traffic says."""


class Subject:
    """A trainee that is measured. The model is built at once."""

    def __init__(self, rank: int, world_size: int, config: RunConfig, rules: MockRules) -> None:
        torch.ones(8).sum()  # the first operation starts threads and allocators
        self.before = peak_bytes()
        self.world_size = world_size
        self.config, self.rules = config, rules
        self.grid = build_grid(grid_shape(config, world_size), rank)
        self.trainee = Trainee(config, self.grid)
        self.step = 0

    def measure(self) -> StepMeasure:
        """Train one more step."""
        self.step += 1
        axis = self.trainee.rows.axis
        batches = microbatches(self.config, self.rules, self.step, self.trainee.rows)
        for axis in self.grid.all_axes():
            axis.traffic.clear()
        barrier(self.grid.world)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        agreed = agree(batches, self.grid, replica=self.trainee.rows.place.index)
        result = self.trainee.train(batches, self.step, agreed.denominator)
        barrier(self.grid.world)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        layout = select_layout(self.config.parallel.cp_layout)
        tp = self.trainee.sharded_tokens
        rows = [layout.padded_length(mask_metadata(batch), axis.size, tp) for batch in batches]
        stage = self.grid.pp.rank
        formula = stage_traffic(self.config, self.world_size, stage, stage_layers(self.config)[stage], rows)
        memory = peak_bytes() - self.before
        return StepMeasure(seconds, cpu_seconds, agreed.tokens, result.loss, memory, sent_bytes(self.grid), formula)


def sent_bytes(grid: ProcessGrid) -> dict[str, int]:
    """Bytes this rank has sent since the counters were cleared, by axis as `StageTraffic` names them."""
    names = {"cp_dp": "dp_cp", "pp_forward": "pp", "pp_backward": "pp"}
    total: dict[str, int] = defaultdict(int)
    for axis in grid.all_axes():
        total[names.get(axis.name, axis.name)] += axis.traffic.total
    return {name: count for name, count in total.items() if count}


@functools.cache
def _subject(rank: int, world_size: int, config: RunConfig, rules: MockRules) -> Subject:
    return Subject(rank, world_size, config, rules)


def measure_rank(rank: int, world_size: int, config: RunConfig, rules: MockRules) -> StepMeasure:
    """One step on this rank, of the trainee that an earlier call with the same arguments left behind."""
    return _subject(rank, world_size, config, rules).measure()
