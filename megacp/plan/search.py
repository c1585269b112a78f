"""All layouts of a model on so many ranks that a run would take: what a rank holds under each, and how long a step is.

A layout is a configuration: what the user gave stays, and every other choice of `CHOICES` is tried. Legal is what a
run's own checks say.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
BEST = 5
"""Layouts that are shown."""
Choice = Mapping[str, Value]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
_TRANSPORTS: tuple[Choice, ...] = (
    {"cp_comm_type": "kv_exchange", "cp_layout": "balanced"},
    {"cp_comm_type": "p2p", "cp_layout": "zigzag_document"},
    {"cp_comm_type": "all_gather", "cp_layout": "zigzag_document"},
    {"cp_comm_type": "a2a", "cp_layout": "contiguous"},
)
_GROUPS = (2, 4, 8)
"""Ranks that swap heads under `a2a+p2p`."""
_SCHEDULES: tuple[Choice, ...] = tuple(
    {"num_virtual_stages_per_pipeline_rank": chunks, "pipeline_schedule": name}
    for name, counts in (("1f1b", (1, 2, 3, 4, 6, 8)), ("zero_bubble", (1, 2)))
    for chunks in counts
)
_STRATEGIES: tuple[Choice, ...] = tuple(
    {"data_parallel_sharding_strategy": name} for name in ("optim", "optim_grads_params")
)
_SAVINGS: tuple[Choice, ...] = tuple(
    {"recompute_granularity": granularity, "activation_offload": offload, "mlp_chunk_tokens": tile}
    for granularity in ("none", "selective", "full")
    for offload in (0.0, 0.5, 0.99)
    for tile in (0, 16384, 8192, 4096)
)
"""What saves memory and makes no step shorter: nothing of it first, all of it last."""
_NOTHING: tuple[Choice, ...] = ({},)


def _divisors(name: str, count: int) -> list[Choice]:
    """The numbers that divide a count."""
    return [{name: size} for size in range(1, count + 1) if count % size == 0]


def _sizes(config: RunConfig, world_size: int) -> list[Sequence[Choice]]:
    """What is tried of the sizes of a grid."""
    return [
        _divisors(TP, min(world_size, GPUS_OF_A_MACHINE)),
        _divisors(PP, min(world_size, config.model.num_layers)),
        _divisors(CP, world_size),
        _divisors(EP, config.model.num_experts or 1),
    ]


def _others(base: RunConfig, world_size: int) -> list[Sequence[Choice]]:
    """What is tried of all else on a grid, but for `_SAVINGS`; nothing of what does not act there."""
    p = base.parallel
    cp, machines = p.context_parallel_size, max(1, world_size // GPUS_OF_A_MACHINE)
    pairs = [(swapping, cp // swapping) for swapping in _GROUPS if cp % swapping == 0 and swapping < cp]
    hierarchies: list[Choice] = [
        {"cp_comm_type": "a2a+p2p", "cp_layout": "zigzag_document", "hierarchical_context_parallel_sizes": pair}
        for pair in pairs
    ]
    return [
        _SCHEDULES if p.pipeline_model_parallel_size > 1 else _NOTHING,
        [*_TRANSPORTS, *hierarchies] if cp > 1 else _NOTHING,
        _STRATEGIES,
        [{"num_distributed_optimizer_instances": count} for count in sorted({1, machines})],
        [{"micro_batch_size": size} for size in (1, 2, 4)] if cp == 1 else _NOTHING,  # ranks of cp share a row already
        [{"dtype": "bfloat16"}],
    ]


def fields_chosen(config: RunConfig) -> set[str]:
    """Fields of which a search tries values."""
    tables = [*_sizes(config, 1), *_others(with_values(config, {PP: 2, CP: 4}), 8), _SAVINGS]
    return {name for choices in tables for choice in choices for name in choice}


@dataclass(frozen=True)
class Candidate:
    """A legal layout, what it needs, and what it takes."""

    config: RunConfig
    chosen: Choice
    """What was not given."""
    memory: RankMemory
    """What its fullest rank holds."""
    timed: Callable[[RunConfig], StepTime]

    @functools.cached_property
    def time(self) -> StepTime:
        """Found when it is asked for: the order of those that do not fit needs none."""
        return self.timed(self.config)

    @property
    def gib(self) -> float:
        return self.memory.total / 2**30

    def verdict(self, hardware: Hardware) -> str:
        """`OK`, `TIGHT` or `OOM`."""
        return "OK" if self.gib <= TIGHT * hardware.memory else "TIGHT" if self.gib <= hardware.memory else "OOM"

    def order(self, hardware: Hardware) -> tuple[int, float, float, float]:
        """The best is the fastest of those that fit, of equally fast ones that with the least on the host, then with the
        least memory; of those that do not fit it is the smallest.
        """
        verdict = ("OK", "TIGHT", "OOM").index(self.verdict(hardware))
        if verdict == 2:
            return verdict, 0.0, 0.0, self.gib
        speed = round(math.log(self.time.total, EQUALLY_FAST))
        return verdict, speed, self.config.training.activation_offload, self.gib


def _untold(choices: Sequence[Choice], told: Choice) -> list[Choice]:
    """What of the choices agrees with what was given, without it, and each once."""
    agreeing = [choice for choice in choices if all(told.get(name, value) == value for name, value in choice.items())]
    rest = [{name: value for name, value in choice.items() if name not in told} for choice in agreeing or choices]
    return [choice for place, choice in enumerate(rest) if choice not in rest[:place]]


def legal(config: RunConfig, world_size: int, given: Collection[str]) -> Iterator[tuple[RunConfig, Choice]]:
    """Every layout that a run would take, with what was chosen, before anything saves memory.

    Sizes are tried first, and a product of them that has no place on the ranks is left at once.
    """
    told = _told(config, given)
    for grid in map(merged, itertools.product(*(_untold(choices, told) for choices in _sizes(config, world_size)))):
        base = with_values(config, grid)
        if world_size % base.model_ranks:
            continue
        for rest in map(merged, itertools.product(*(_untold(choices, told) for choices in _others(base, world_size)))):
            found = with_values(base, rest)
            if not check(found, world_size):
                yield found, {**grid, **rest}


def _told(config: RunConfig, given: Collection[str]) -> Choice:
    return {name: value for name, value in flatten(config).items() if name in given}


def merged(choices: Iterable[Choice]) -> dict[str, Value]:
    """All of them as one."""
    return {name: value for choice in choices for name, value in choice.items()}


def rank_memories(config: RunConfig, world_size: int) -> list[RankMemory]:
    """What a rank of each stage holds."""
    stages = enumerate(stage_layers(config, world_size))
    return [stage_memory(config, *stage, world_size) for stage in stages]


def fullest(config: RunConfig, world_size: int) -> RankMemory:
    """What the rank holds that holds most."""
    return max(rank_memories(config, world_size), key=lambda memory: memory.total)


def search(
    config: RunConfig, world_size: int, given: Collection[str], hardware: Hardware, sample: PackSample
) -> list[Candidate]:
    """The legal layouts: those that fit well, those that fill the memory, those that do not fit, the best first.

    Where a layout fits well, nothing that saves memory is tried; where it does not fit with all that does, no time is
    found; nor is more tried of one that would be slower with all the memory there is than the best that fit.
    """
    savings = _untold(_SAVINGS, _told(config, given))
    timed = functools.partial(step_time, world_size=world_size, hardware=hardware, sample=sample)
    found, best = list[Candidate](), list[float]()

    def with_saving(base: RunConfig, chosen: Choice, choice: Choice) -> Candidate:
        one = with_values(base, choice)
        return Candidate(one, {**chosen, **choice}, fullest(one, world_size), timed)

    for base, chosen in legal(config, world_size, given):
        tried = [with_saving(base, chosen, savings[0])]
        if tried[0].verdict(hardware) != "OK":
            takes = (choice for choice in reversed(savings) if not check(with_values(base, choice), world_size))
            smallest = with_saving(base, chosen, next(takes))
            if smallest.gib > hardware.memory or (len(best) == BEST and tried[0].time.total > best[-1]):
                tried = [smallest]
            else:
                tried = [smallest, *(with_saving(base, chosen, choice) for choice in takes)]
        found += tried
        best = sorted(best + [one.time.total for one in tried if one.verdict(hardware) == "OK"])[:BEST]
    return sorted(found, key=lambda one: one.order(hardware))
