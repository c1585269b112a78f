"""A layout on a cluster as it is: packs that differ, slow ranks, late ones, links that others use too.

Steps are drawn and run all at once. A microbatch of a replica takes on each stage the time of its own row of packs; a
slow rank makes its tp x cp group slow, and its pipeline wait, by the schedule's own list. The step ends with the
slowest replica; messages of data parallelism and the optimizer follow. Every trouble has draws of its own, so two runs
differ by what was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megacp.dry_run.packs import PackSample, one_row
from megacp.engine.config.run import RunConfig
from megacp.engine.models.costs import stage_layers
from megacp.engine.pipeline_parallel.schedules import COMPUTE, Kind
from megacp.engine.pipeline_parallel.timeline import orders, timeline
from megacp.plan.hardware import Hardware
from megacp.plan.times import in_lockstep, kind_seconds, stage_parts

AT_ONCE = 2**22
"""Microbatches of stages that are run at once."""
MOST_STEPS = 1_000_000
"""Steps of --simulate; more would take days."""
MOST = 1e6
"""Largest factor of a trouble."""


@dataclass(frozen=True)
class Trouble:
    """What happens on a cluster."""

    steps: int = 200
    slow_ranks: float = 0.0
    slow_factor: float = 1.3
    jitter: float = 0.0
    contention: float = 1.0
    uneven: bool = True
    """Whether packs differ."""

    def __post_init__(self) -> None:
        # a comparison with NaN is false: each says what is allowed
        are_steps = 1 <= self.steps <= MOST_STEPS
        are_shares = 0 <= self.slow_ranks <= 1 and 0 <= self.jitter <= MOST
        are_factors = 1 <= self.slow_factor <= MOST and 1 <= self.contention <= MOST
        if not (are_steps and are_shares and are_factors):
            raise ValueError(
                f"--simulate {self.steps} is a number of 1 to {MOST_STEPS:,} steps, --slow-ranks {self.slow_ranks:g} "
                f"a share of 0 to 1, --jitter {self.jitter:g} 0 to {MOST:g}, --slow-factor {self.slow_factor:g} and "
                f"--contention {self.contention:g} are 1 to {MOST:g}"
            )


FLAGS = {
    "simulate": ("steps", int, "draw so many steps of the best layout on a cluster as it is (default 200)"),
    "slow-ranks": ("slow_ranks", float, "share of ranks that compute slowly in a step"),
    "slow-factor": ("slow_factor", float, "how many times as long those take (default 1.3)"),
    "jitter": ("jitter", float, "mean delay of a rank in a microbatch, of its time; exponential"),
    "contention": ("contention", float, "how many times as long messages between machines take"),
}
"""Fields, types and meanings of the flags; each of them asks for drawn steps."""


def drawn_text(config: RunConfig, world_size: int, hardware: Hardware, sample: PackSample, trouble: Trouble) -> str:
    """Drawn steps of a layout, and what each trouble adds to the mean one."""
    seconds = simulate(config, world_size, hardware, sample, trouble)
    half, most, nearly = np.percentile(seconds, (50, 95, 99))
    better = {
        "uneven packs": replace(trouble, uneven=False),
        "slow ranks": replace(trouble, slow_ranks=0.0),
        "jitter": replace(trouble, jitter=0.0),
        "contention": replace(trouble, contention=1.0),
    }
    asked = {name: less for name, less in better.items() if less != trouble}
    means = {name: simulate(config, world_size, hardware, sample, less).mean() for name, less in asked.items()}
    added = ", ".join(f"{name} {max(0.0, seconds.mean() / mean - 1):.1%}" for name, mean in means.items())
    steps = f"{trouble.steps} drawn steps under 1: {seconds.mean():.3g} s on average, half under {half:.3g} s"
    return f"\n{steps}, 95 of 100 under {most:.3g} s, 99 under {nearly:.3g} s\nAdded by {added}\n"


def simulate(
    config: RunConfig, world_size: int, hardware: Hardware, sample: PackSample, trouble: Trouble
) -> np.ndarray:
    """Seconds `[steps]` of drawn steps of a checked configuration."""
    config, sample = one_row(config, world_size, sample)
    p, microbatches = config.parallel, config.num_microbatches(world_size)
    stages, replicas = p.pipeline_model_parallel_size, config.data_parallel_size(world_size)
    together, ranks = in_lockstep(config, world_size), p.tensor_model_parallel_size * p.context_parallel_size

    rows, layers = sample.each() if trouble.uneven else [sample.mean()], stage_layers(config, world_size)
    links = replace(hardware, outside=hardware.outside / trouble.contention)
    parts = [stage_parts(config, world_size, links, row, layers)[0] for row in rows]
    *_, exposed, optimizer = stage_parts(config, world_size, links, sample.mean(), layers)
    lists = orders(config, world_size)

    packs, slowness, delays = np.random.default_rng(0).spawn(3)
    found = []
    size = max(1, AT_ONCE // (microbatches * stages * replicas))
    for first in range(0, trouble.steps, size):
        shape = microbatches, min(size, trouble.steps - first), replicas
        drawn = packs.integers(len(rows), size=shape)
        is_slow = slowness.random((stages, *shape[1:])) < 1 - (1 - trouble.slow_ranks) ** ranks
        slow = np.where(is_slow, trouble.slow_factor, 1.0)
        times: list[Mapping[Kind, np.ndarray]] = []
        for stage in range(stages):
            # the largest of as many exponential delays as a group has ranks, from one number
            least = -np.expm1(np.log(delays.random(shape)) / ranks) if trouble.jitter else np.ones(1)
            late = slow[stage] - trouble.jitter * np.log(least)
            usual = [kind_seconds(config, *part[stage]) for part in parts]
            own = {kind: np.array([row[kind] for row in usual])[drawn] * late for kind in COMPUTE}
            times.append({kind: x.reshape(*shape[:2], -1, together).max(-1) for kind, x in own.items()})
        spans = timeline(lists, p.num_virtual_stages_per_pipeline_rank, times)
        ends = np.max([stage[-1].stop for stage in spans], (0, 2))  # [steps]
        found.append(ends + exposed + optimizer * slow.max((0, 2)))
    return np.concatenate(found)
