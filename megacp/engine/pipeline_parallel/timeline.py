"""A schedule in time, on paper: when each stage computes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacp.engine.config.run import RunConfig
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind, virtual_stage


@dataclass(frozen=True, slots=True)
class Span:
    """One compute of a stage in time."""

    action: Action
    start: float
    stop: float


def timeline(
    stages: Sequence[Sequence[Action]], num_chunks: int, times: Sequence[Mapping[Kind, float]]
) -> list[list[Span]]:
    """Return the spans of the computes `stages[i]` of each stage i. Each starts as early as the
    order allows.

    `times` are the times of each whole stage for one microbatch; its chunks share them equally.
    Messages take no time. A backward includes the time of the weight gradients if its stage defers
    none.
    """
    own = [dict(of_stage) for of_stage in times]
    for order, of_stage in zip(stages, own, strict=True):
        if not any(action.kind is Kind.WEIGHTS for action in order):
            of_stage[Kind.BACKWARD] = of_stage[Kind.BACKWARD] + of_stage[Kind.WEIGHTS]
    spans: list[list[Span]] = [[] for _ in stages]
    there: dict[
        tuple[Kind, int, int], float
    ] = {}  # since when an output is, by kind, microbatch and virtual stage

    def goes_on(stage: int) -> bool:
        """Run the next compute of a stage, unless its input is not there."""
        done = spans[stage]
        if len(done) == len(stages[stage]):
            return False
        action = stages[stage][len(done)]
        place = virtual_stage(stage, len(stages), action.chunk)
        source = {Kind.FORWARD: place - 1, Kind.BACKWARD: place + 1}.get(action.kind, -1)
        is_sent = (
            0 <= source < len(stages) * num_chunks
        )  # the ends of the model wait for nobody, nor do weights
        arrival = there.get((action.kind, action.microbatch, source)) if is_sent else 0.0
        if arrival is None:
            return False
        start = max(arrival, done[-1].stop if done else 0.0)
        done.append(Span(action, start, start + own[stage][action.kind] / num_chunks))
        there[action.kind, action.microbatch, place] = done[-1].stop
        return True

    while any([goes_on(stage) for stage in range(len(stages))]):  # all of them, in turn
        pass
    return spans


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Idle time over work, of the busiest stage: 0 is a perfect pipeline."""
    work = max(sum(span.stop - span.start for span in stage) for stage in spans)
    return max(stage[-1].stop for stage in spans) / work - 1


def orders(config: RunConfig, world_size: int) -> list[list[Action]]:
    """Return the computes of each stage in a step, in the order of the schedule."""
    p, microbatches = config.parallel, config.num_microbatches(world_size)
    stages, chunks = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    return [
        SCHEDULES[p.pipeline_schedule](stage, stages, microbatches, chunks)
        for stage in range(stages)
    ]
