"""All layouts of a model on so many ranks that a run would take: what a rank holds under each, and how long a step is.

A layout is a configuration: what the user gave stays, and every other choice of `CHOICES` is tried. Legal is what a
run's own checks say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megacp.core.checks import check
from megacp.core.config.run import RunConfig, Value, flatten, with_values
from megacp.core.models.costs import stage_layers
from megacp.plan.hardware import GPUS_OF_A_MACHINE, Hardware
from megacp.plan.memory import RankMemory, stage_memory
from megacp.plan.packs import PackSample
from megacp.plan.times import StepTime, step_time

TIGHT = 0.9
"""Share of a GPU's memory that a plan may fill and still be `OK`: the rest is for communicators and fragments."""
EQUALLY_FAST = 1.01
"""Steps that differ by less are equally fast."""
Choice = Mapping[str, Value]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
_TRANSPORTS: tuple[Choice, ...] = (
    {"cp_comm_type": "kv_exchange", "cp_layout": "balanced"},
    {"cp_comm_type": "p2p", "cp_layout": "zigzag_document"},
    {"cp_comm_type": "a2a", "cp_layout": "contiguous"},
)
_SCHEDULES: tuple[Choice, ...] = (
    {"num_virtual_stages_per_pipeline_rank": 1, "pipeline_schedule": "1f1b"},
    {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "1f1b"},
    {"num_virtual_stages_per_pipeline_rank": 4, "pipeline_schedule": "1f1b"},
    {"num_virtual_stages_per_pipeline_rank": 1, "pipeline_schedule": "zero_bubble"},
)
_RECOMPUTED: tuple[Choice, ...] = (
    {"recompute_granularity": "none", "activation_offload": 0.0, "mlp_chunk_tokens": 0},
    {"recompute_granularity": "selective", "activation_offload": 0.0, "mlp_chunk_tokens": 0},
    {"recompute_granularity": "full", "activation_offload": 0.0, "mlp_chunk_tokens": 0},
    {"recompute_granularity": "full", "activation_offload": 0.99, "mlp_chunk_tokens": 8192},
)
_STRATEGIES: tuple[Choice, ...] = tuple(
    {"data_parallel_sharding_strategy": name} for name in ("optim", "optim_grads_params")
)


def _sizes(name: str, count: int) -> list[Choice]:
    """The numbers that divide a count."""
    return [{name: size} for size in range(1, count + 1) if count % size == 0]


def _choices(config: RunConfig, world_size: int) -> tuple[list[Sequence[Choice]], list[Sequence[Choice]]]:
    """What is tried of the sizes of a grid, and of all else."""
    experts = config.model.num_experts
    sizes: list[Sequence[Choice]] = [
        _sizes(TP, min(world_size, GPUS_OF_A_MACHINE)),
        _sizes(PP, min(world_size, config.model.num_layers)),
        _sizes(CP, world_size),
        _sizes(EP, experts or 1),
    ]
    machines = {1, max(1, world_size // GPUS_OF_A_MACHINE)}
    others: list[Sequence[Choice]] = [
        _SCHEDULES,
        _TRANSPORTS,
        _STRATEGIES,
        [{"num_distributed_optimizer_instances": count} for count in sorted(machines)],
        _RECOMPUTED,
        [{"micro_batch_size": size} for size in (1, 2, 4)],
        [{"dtype": "bfloat16"}],
    ]
    return sizes, others


def fields_chosen(config: RunConfig) -> set[str]:
    """Fields of which a search tries values."""
    kinds = itertools.chain(*_choices(config, 1))
    return {name for choices in kinds for choice in choices for name in choice}


@dataclass(frozen=True)
class Candidate:
    """A legal layout, what it needs, and what it takes."""

    config: RunConfig
    chosen: Choice
    """What was not given."""
    memory: RankMemory
    """What its fullest rank holds."""
    time: StepTime

    @property
    def gib(self) -> float:
        return self.memory.total / 2**30

    def verdict(self, hardware: Hardware) -> str:
        """`OK`, `TIGHT` or `OOM`."""
        return "OK" if self.gib <= TIGHT * hardware.memory else "TIGHT" if self.gib <= hardware.memory else "OOM"

    def order(self, hardware: Hardware) -> tuple[int, float, float]:
        """The best is the fastest of those that fit, of equally fast ones that with the least memory; of those that do
        not fit it is the smallest.
        """
        verdict = ("OK", "TIGHT", "OOM").index(self.verdict(hardware))
        return verdict, round(math.log(self.time.total, EQUALLY_FAST)) if verdict < 2 else 0, self.gib


def _untold(choices: Sequence[Choice], told: Choice) -> list[Choice]:
    """What of the choices agrees with what was given, without it, and each once."""
    agreeing = [choice for choice in choices if all(told.get(name, value) == value for name, value in choice.items())]
    rest = [{name: value for name, value in choice.items() if name not in told} for choice in agreeing or choices]
    return [choice for place, choice in enumerate(rest) if choice not in rest[:place]]


def legal(config: RunConfig, world_size: int, given: Collection[str]) -> Iterator[tuple[RunConfig, Choice]]:
    """Every layout that a run would take and that differs from those before it, with what was chosen.

    Sizes are tried first, and a product of them that has no place on the ranks is left at once.
    """
    told = {name: value for name, value in flatten(config).items() if name in given}
    sizes, *others = _choices(config, world_size)
    grids = itertools.product(*(_untold(choices, told) for choices in sizes))
    rest = [merged(product) for product in itertools.product(*(_untold(choices, told) for choices in others[0]))]
    for grid in map(merged, grids):
        base = with_values(config, grid)
        if math.gcd(world_size, base.model_ranks) != base.model_ranks:  # 0 ranks too
            continue
        idle, seen = _idle(base), list[Choice]()
        for whole in rest:
            choice = {name: value for name, value in whole.items() if name not in idle}
            if choice not in seen:
                seen.append(choice)
                found = with_values(base, choice)
                if not check(found, world_size):
                    yield found, {**grid, **choice}


def merged(choices: Iterable[Choice]) -> dict[str, Value]:
    """All of them as one."""
    return {name: value for choice in choices for name, value in choice.items()}


def _idle(base: RunConfig) -> set[str]:
    """Fields that act on nothing on this grid; ranks of cp share a row, and then two rows."""
    p, alone = base.parallel, merged([])
    if p.pipeline_model_parallel_size == 1:
        alone |= _SCHEDULES[0]
    alone |= _TRANSPORTS[0] if p.context_parallel_size == 1 else {"micro_batch_size": 1}
    return {*alone}


def fullest(config: RunConfig, world_size: int) -> RankMemory:
    """What the rank holds that holds most."""
    stages = enumerate(stage_layers(config, world_size))
    return max((stage_memory(config, *stage, world_size) for stage in stages), key=lambda memory: memory.total)


def search(
    config: RunConfig, world_size: int, given: Collection[str], hardware: Hardware, sample: PackSample
) -> list[Candidate]:
    """All legal layouts: those that fit well, those that fill the memory, those that do not fit, the best first."""
    found = [
        Candidate(one, chosen, fullest(one, world_size), step_time(one, world_size, hardware, sample))
        for one, chosen in legal(config, world_size, given)
    ]
    return sorted(found, key=lambda one: one.order(hardware))
