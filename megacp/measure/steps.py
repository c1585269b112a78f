"""Measuring training steps on mock packs: seconds, memory and bytes sent of one rank, for `make bench`.

Key property: a rank keeps its model between calls, so steps of different layouts can take turns on a noisy machine
and each layout still warms up once. Rejected: one run after the other, which measures the machine's mood.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megacp.batch import PackedBatch
from megacp.config.run import RunConfig
from megacp.context_parallel.auto.choose import refuse_auto
from megacp.context_parallel.auto.counts import exchanged_rows
from megacp.context_parallel.vision import LocalVision
from megacp.data.synthetic.images import MockDecoder
from megacp.data.synthetic.mock import MockRules
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import ProcessGrid, build_grid
from megacp.measure.parity import microbatches
from megacp.measure.traffic import ContextPlace, RowImages, StageTraffic, stage_traffic
from megacp.models.build import grid_shape, stage_layers
from megacp.monitor.memory import peak_bytes
from megacp.training.images import image_loading
from megacp.training.loss import agree
from megacp.training.step import ParallelModel


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
    """A model that is measured; it is built at once."""

    def __init__(self, rank: int, world_size: int, config: RunConfig, rules: MockRules) -> None:
        refuse_auto(config, "a measurement")
        torch.ones(8).sum()  # the first operation starts threads and allocators
        self.before = peak_bytes()
        self.world_size = world_size
        self.config, self.rules = config, rules
        self.grid = build_grid(grid_shape(config, world_size), rank)
        self.model = ParallelModel(config, self.grid)
        decoder = MockDecoder(rules.images) if rules.images is not None else None
        self.loading = image_loading(config, self.grid, self.model.rows, decoder)
        self.step = 0

    def measure(self) -> StepMeasure:
        """Train one more step."""
        self.step += 1
        batches = microbatches(self.config, self.rules, self.step, self.model.rows, self.loading)
        for axis in self.grid.all_axes():
            axis.traffic.clear()
        barrier(self.grid.world)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        agreed = agree(batches, self.grid, replica=self.model.rows.data_rank.index)
        result = self.model.train(batches, self.step, agreed.denominator)
        barrier(self.grid.world)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        formula = self._formula(batches)
        memory = peak_bytes() - self.before
        return StepMeasure(seconds, cpu_seconds, agreed.tokens, result.loss, memory, sent_bytes(self.grid), formula)

    def _formula(self, batches: Sequence[PackedBatch]) -> StageTraffic:
        """What this rank should have sent in the step; the plans are made again, out of the measured time."""
        local = [self.model.shard(batch, self.step) for batch in batches]
        plans = [batch.plan for batch in local]
        exchanges = self.config.parallel.cp_comm_type == "kv_exchange"
        place = ContextPlace(
            self.grid.cp.rank,
            tuple(exchanged_rows(plan) for plan in plans) if exchanges else None,
            tuple(row_images(batch.vision) for batch in local if batch.vision is not None),
        )
        rows, stage = [plan.indices.size for plan in plans], self.grid.pp.rank
        return stage_traffic(self.config, self.world_size, stage, stage_layers(self.config)[stage], rows, place)


def row_images(vision: LocalVision) -> RowImages:
    """What the images of one row make this rank do."""
    rank, counts = vision.routes.cp_rank, vision.routes.counts
    pooled, window = vision.pooling.shape
    kept, arriving, leaving = (int(x) for x in (counts[rank, rank], counts[:, rank].sum(), counts[rank].sum()))
    return RowImages(
        len(vision.patches), pooled, window, arriving, leaving - kept, arriving - kept, vision.routes.largest
    )


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
    """One step on this rank, of the model that an earlier call with the same arguments left behind."""
    return _subject(rank, world_size, config, rules).measure()
