"""What a stage of a pipeline holds at each moment of a step: microbatches in flight and weight
gradients that wait.

It follows from the list of what the stage computes, which is the one that a run executes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megacp.engine.config.run import RunConfig
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind


class Held(NamedTuple):
    """Most that a stage holds at once in a step."""

    in_flight: int
    """Activations of a chunk, from its forward to its backward."""
    rows: int
    """Microbatches between forward and backward of the stage's first chunk."""
    deferred: int | None
    """Backwards whose weight gradients wait while another one runs; None where none ever do."""


@functools.cache
def most_held(config: RunConfig, stage: int, world_size: int) -> Held:
    """By the list of what the stage computes."""
    in_flight, rows, deferred = zip(
        *(held for _, held in held_over(config, stage, world_size)), strict=True
    )
    return Held(max(in_flight), max(rows), None if deferred[0] is None else max(deferred))


def held_over(config: RunConfig, stage: int, world_size: int) -> list[tuple[Action, Held]]:
    """What the stage computes in a step, and what it holds while it does."""
    p = config.parallel
    sizes = (
        p.pipeline_model_parallel_size,
        config.num_microbatches(world_size),
        p.num_virtual_stages_per_pipeline_rank,
    )
    computes = SCHEDULES[p.pipeline_schedule](stage, *sizes)
    defers = any(compute.kind is Kind.WEIGHTS for compute in computes)
    in_flight = rows = deferred = 0
    found = []
    for compute in computes:
        begins, ends = compute.kind is Kind.FORWARD, compute.kind is Kind.BACKWARD
        in_flight += begins
        rows += begins and compute.chunk == 0
        deferred -= compute.kind is Kind.WEIGHTS
        found.append((compute, Held(in_flight, rows, deferred if defers else None)))
        in_flight -= ends
        rows -= ends and compute.chunk == 0
        deferred += ends
    return found
