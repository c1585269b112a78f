"""Count a pipeline stage's microbatches in flight and deferred weight gradients during a step.

The counts follow from the schedule's list of computations, which is also the list that a run
executes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megacp.engine.config.run import RunConfig
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind


class Held(NamedTuple):
    """Numbers of activations, microbatches and weight gradients that a stage holds at once."""

    in_flight: int
    """Sets of chunk activations; a set exists from a chunk's forward pass to its backward pass."""
    rows: int
    """Microbatches between the forward and the backward pass of the stage's first chunk."""
    deferred: int | None
    """Finished backward passes with deferred weight gradients; None if none are ever deferred."""


@functools.cache
def most_held(config: RunConfig, stage: int, world_size: int) -> Held:
    """Return the maximum of each number during a step."""
    moments = [held for _, held in held_over(config, stage, world_size)]
    deferred = None
    if moments[0].deferred is not None:
        deferred = max(held.deferred or 0 for held in moments)
    in_flight = max(held.in_flight for held in moments)
    return Held(in_flight, max(held.rows for held in moments), deferred)


def held_over(config: RunConfig, stage: int, world_size: int) -> list[tuple[Action, Held]]:
    """Return the computations of a stage in a step, with the numbers held during each."""
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
        # a forward pass adds activations before it runs
        if compute.kind is Kind.FORWARD:
            in_flight += 1
            if compute.chunk == 0:
                rows += 1
        # weight gradients no longer count as deferred while they are computed
        elif compute.kind is Kind.WEIGHTS:
            deferred -= 1
        found.append((compute, Held(in_flight, rows, deferred if defers else None)))
        # a backward pass frees activations only after it has run
        if compute.kind is Kind.BACKWARD:
            in_flight -= 1
            deferred += 1
            if compute.chunk == 0:
                rows -= 1
    return found
