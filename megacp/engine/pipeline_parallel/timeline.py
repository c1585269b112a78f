"""Simulation of a schedule: the start and end time of every compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacp.engine.config.run import RunConfig
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind, virtual_stage


@dataclass(frozen=True, slots=True)
class Span:
    """Time span of one compute, in the same unit as the given times."""

    action: Action
    start: float
    stop: float


def timeline(
    stages: Sequence[Sequence[Action]], num_chunks: int, times: Sequence[Mapping[Kind, float]]
) -> list[list[Span]]:
    """Return the time spans of the computes on each stage; `stages[i]` are those of stage i.

    Each compute starts as early as the order allows. `times[i]` are the times of stage i for one
    microbatch, which are divided equally among its chunks. Messages take no time. If a stage does
    not defer weight gradients, its backward passes include their time.
    """
    own = [dict(of_stage) for of_stage in times]
    for order, of_stage in zip(stages, own, strict=True):
        if not any(action.kind is Kind.WEIGHTS for action in order):
            of_stage[Kind.BACKWARD] = of_stage[Kind.BACKWARD] + of_stage[Kind.WEIGHTS]
    spans: list[list[Span]] = [[] for _ in stages]
    # times at which outputs are ready, by kind, microbatch and virtual stage
    there: dict[tuple[Kind, int, int], float] = {}

    def runs_next(stage: int) -> bool:
        """Run a stage's next compute; return False if the stage is done or must wait for input."""
        done = spans[stage]
        if len(done) == len(stages[stage]):
            return False
        action = stages[stage][len(done)]
        place = virtual_stage(stage, len(stages), action.chunk)
        # the virtual stage whose output this compute needs
        source = {Kind.FORWARD: place - 1, Kind.BACKWARD: place + 1}.get(action.kind, -1)
        # weight gradients, and computes at the ends of the model, receive nothing
        is_sent = 0 <= source < len(stages) * num_chunks
        arrival = there.get((action.kind, action.microbatch, source)) if is_sent else 0.0
        if arrival is None:
            return False
        start = max(arrival, done[-1].stop if done else 0.0)
        stop = start + own[stage][action.kind] / num_chunks
        done.append(Span(action, start, stop))
        there[action.kind, action.microbatch, place] = stop
        return True

    # a list instead of a generator, so that every stage gets a turn
    while any([runs_next(stage) for stage in range(len(stages))]):
        pass
    return spans


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the busiest stage's idle time relative to its work; 0 for a perfect pipeline."""
    work = max(sum(span.stop - span.start for span in stage) for stage in spans)
    end = max(stage[-1].stop for stage in spans)
    return end / work - 1


def orders(config: RunConfig, world_size: int) -> list[list[Action]]:
    """Return each stage's computes in a step, in the order of the configured schedule."""
    parallel = config.parallel
    microbatches = config.num_microbatches(world_size)
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    computes = SCHEDULES[parallel.pipeline_schedule]
    return [computes(stage, stages, microbatches, chunks) for stage in range(stages)]
