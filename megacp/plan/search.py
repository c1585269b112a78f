"""All layouts of a model on so many ranks that a run would take: what a rank holds under each, and
how long a step is.

A layout is a configuration: what the user gave stays, and every other choice of the tables is
tried. Legal is what a run's own checks say.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.dry_run.memory import RankMemory, stage_kind, stage_memory
from megacp.dry_run.packs import PackSample
from megacp.engine.checks import check
from megacp.engine.config.parallel import PIPELINE_SCHEDULES, SHARDINGS
from megacp.engine.config.run import RunConfig, Value, flatten, with_values
from megacp.engine.config.training import RECOMPUTE_MODES
from megacp.engine.layers.moe import expert_rows
from megacp.engine.layers.table import tokens_per_rank
from megacp.engine.models.costs import stage_layers
from megacp.plan.hardware import GPUS_OF_A_MACHINE, Hardware
from megacp.plan.times import StepTime, step_time

TIGHT = 0.9
"""Share of a GPU's memory that a plan may fill and still be `OK`: the rest is for communicators and
fragments.
"""
EQUALLY_FAST = 1.01
"""Steps that differ by less are equally fast."""
BEST = 5
"""Layouts that are shown."""
Choice = Mapping[str, Value]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
_GROUPS = (2, 4, 8)
"""Ranks that swap heads under `a2a+p2p`."""
_OFFLOADS = (0.99, 0.0, 0.5)
_TILES = (0, 4096, 16384, 8192)
"""Shares of activations on the host, and tokens of an MLP's tile; first those that rule out most of
the others.
"""
_NOTHING: tuple[Choice, ...] = ({},)


def _divisors(name: str, count: int, most: int) -> list[Choice]:
    """The numbers up to `most` that divide a count."""
    return [{name: size} for size in range(1, most + 1) if count % size == 0]


def _sizes(config: RunConfig, world_size: int) -> list[Sequence[Choice]]:
    """What is tried of the sizes of a grid."""
    return [
        _divisors(TP, world_size, GPUS_OF_A_MACHINE),
        _divisors(PP, world_size, config.model.num_layers),
        _divisors(CP, world_size, world_size),
        _divisors(EP, config.model.num_experts or 1, config.model.num_experts or 1),
    ]


def _transports(cp: int) -> list[Choice]:
    """Return the transports, each with its layouts, and with its sizes where ranks form groups."""
    found: list[Choice] = []
    for row in TRANSPORTS.values():
        for layout in row.layouts:
            choice: Choice = {"cp_comm_type": row.name, "cp_layout": layout}
            if not row.needs_sizes:
                found.append(choice)
                continue
            for group in _GROUPS:
                if cp % group == 0 and group < cp:
                    found.append(
                        {**choice, "hierarchical_context_parallel_sizes": (group, cp // group)}
                    )
    return found


def _schedules() -> list[Choice]:
    """Return the pipeline schedules, each with its numbers of model chunks."""
    return [
        {"num_virtual_stages_per_pipeline_rank": chunks, "pipeline_schedule": name}
        for name, row in PIPELINE_SCHEDULES.items()
        for chunks in row.searched_chunks
    ]


def _strategies() -> list[Choice]:
    """Return the sharding strategies."""
    return [
        {"data_parallel_sharding_strategy": name} for name, row in SHARDINGS.items() if row.searched
    ]


def _modes() -> list[str]:
    """Return the recomputation modes by how much they repeat, those that repeat equally much as in
    the table.
    """
    return sorted(RECOMPUTE_MODES, key=lambda name: RECOMPUTE_MODES[name].strength)


def _savings() -> list[Choice]:
    """Return what saves memory and makes no step shorter.

    The mode that recomputes most is first, because where it does not fit no other mode is tried.
    """
    *weaker, strongest = _modes()
    return [
        {"recompute_granularity": mode, "activation_offload": offload, "mlp_chunk_tokens": tile}
        for mode in (strongest, *weaker)
        for offload in _OFFLOADS
        for tile in _TILES
    ]


def _others(base: RunConfig, world_size: int, dtype: str) -> list[Sequence[Choice]]:
    """What is tried of all else on a grid, but for `_savings`; nothing of what does not act
    there.
    """
    p = base.parallel
    cp, machines = p.context_parallel_size, max(1, world_size // GPUS_OF_A_MACHINE)
    return [
        _schedules() if p.pipeline_model_parallel_size > 1 else _NOTHING,
        _transports(cp) if cp > 1 else _NOTHING,
        _strategies()
        if world_size > p.tensor_model_parallel_size * p.pipeline_model_parallel_size
        else _NOTHING,
        [{"num_distributed_optimizer_instances": count} for count in sorted({1, machines})],
        [{"micro_batch_size": size} for size in (1, 2, 4)]
        if cp == 1
        else _NOTHING,  # ranks of cp share a row already
        [{"dtype": dtype}],
    ]


def fields_chosen(config: RunConfig) -> set[str]:
    """Fields of which a search tries values."""
    grids = (with_values(config, {PP: 2, CP: cp}) for cp in (1, 4))
    tables = [
        *_sizes(config, 1),
        *(table for grid in grids for table in _others(grid, 16, "")),
        _savings(),
    ]
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

    @functools.cached_property
    def gib(self) -> float:
        return self.memory.total / 2**30

    def verdict(self, hardware: Hardware) -> str:
        """`OK`, `TIGHT` or `OOM`."""
        return (
            "OK"
            if self.gib <= TIGHT * hardware.memory
            else "TIGHT"
            if self.gib <= hardware.memory
            else "OOM"
        )

    def order(self, hardware: Hardware) -> tuple[int, float, float, float]:
        """The best is the fastest of those that fit, of equally fast ones that with the least on
        the host, then with the least memory; of those that do not fit it is the smallest.
        """
        verdict = ("OK", "TIGHT", "OOM").index(self.verdict(hardware))
        if verdict == 2:
            return verdict, 0.0, 0.0, self.gib
        speed = round(math.log(self.time.total, EQUALLY_FAST))
        return verdict, speed, self.config.training.activation_offload, self.gib


def _untold(choices: Sequence[Choice], told: Choice) -> list[Choice]:
    """What of the choices agrees with what was given, without it, and each once."""
    agreeing = [
        choice
        for choice in choices
        if all(told.get(name, value) == value for name, value in choice.items())
    ]
    rest = [
        {name: value for name, value in choice.items() if name not in told}
        for choice in agreeing or choices
    ]
    return [choice for place, choice in enumerate(rest) if choice not in rest[:place]]


def layouts(
    config: RunConfig, world_size: int, given: Collection[str], dtype: str = "bfloat16"
) -> Iterator[tuple[RunConfig, Choice]]:
    """Layouts that a run might take, with what was chosen, before anything saves memory.

    Sizes are tried first. A table of choices begins with one that is legal wherever any of it is:
    where all first ones are not, no other is tried; and a choice that is not beside all other first
    ones is left out.
    """
    told = _told(config, given)
    for grid in map(
        merged,
        itertools.product(*(_untold(choices, told) for choices in _sizes(config, world_size))),
    ):
        base = with_values(config, grid)
        if math.gcd(world_size, base.model_ranks) != base.model_ranks:  # 0 ranks too
            continue
        tables = [_untold(choices, told) for choices in _others(base, world_size, dtype)]
        plainest = merged(table[0] for table in tables)
        if check(with_values(base, plainest), world_size):
            continue

        def fails(choice: Choice, base: RunConfig = base, plainest: Choice = plainest) -> bool:
            return bool(check(with_values(base, {**plainest, **choice}), world_size))

        legal = [[table[0], *itertools.filterfalse(fails, table[1:])] for table in tables]
        for rest in map(merged, itertools.product(*legal)):
            yield with_values(base, rest), {**grid, **rest}


def _told(config: RunConfig, given: Collection[str]) -> Choice:
    return {name: value for name, value in flatten(config).items() if name in given}


def merged(choices: Iterable[Choice]) -> dict[str, Value]:
    """All of them as one."""
    return {name: value for choice in choices for name, value in choice.items()}


def fullest_stage(config: RunConfig, world_size: int) -> tuple[int, RankMemory]:
    """The stage whose ranks hold most, and what one does."""
    found, seen = dict[int, RankMemory](), set[Hashable]()
    for stage, chunks in enumerate(stage_layers(config, world_size)):
        kind = stage_kind(config, stage, chunks)
        # of stages alike the first has the most microbatches in flight, the last the most weight
        # gradients that wait
        if kind not in seen or config.parallel.defers_weight_gradients:
            found[stage] = stage_memory(config, stage, chunks, world_size)
        seen.add(kind)
    return max(found.items(), key=lambda one: one[1].total)


def fullest(config: RunConfig, world_size: int) -> RankMemory:
    """What the rank holds that holds most."""
    return fullest_stage(config, world_size)[1]


def fits(config: RunConfig, world_size: int, hardware: Hardware) -> bool:
    """Whether the fullest rank has a place for it."""
    return fullest(config, world_size).total <= hardware.memory * 2**30


def no_problems(config: RunConfig) -> list[str]:
    """Return the problems of a machine that is not at hand: none is known."""
    return []


Saving = tuple[int, float, int]


def _saved(base: RunConfig, choice: Choice) -> Saving:
    """How far a choice goes in each way of saving memory: what is computed again, what moves, into
    how many tiles.
    """
    values: dict[str, Any] = {**vars(base.training), **choice}
    # the place, not the strength: two modes that repeat equally much are two ways of saving memory
    again = _modes().index(values["recompute_granularity"])
    tile = values["mlp_chunk_tokens"]
    # experts are given several rows a token, so a tile of a whole row is one of several for them
    rows = expert_rows(base) if base.model.num_experts else tokens_per_rank(base)
    tiles = -(-rows // tile) if tile else 0
    return again, values["activation_offload"], tiles


def _is_less(one: Saving, other: Saving) -> bool:
    """Whether it goes no further in any."""
    return all(less <= more for less, more in zip(one, other, strict=True))


def search(
    config: RunConfig,
    world_size: int,
    given: Collection[str],
    hardware: Hardware,
    sample: PackSample,
    problems: Callable[[RunConfig], list[str]] = no_problems,
) -> list[Candidate]:
    """Legal layouts: those that fit well, those that fill the memory, those that do not fit, the
    best first.

    `problems` are those of a machine, where it is at hand.

    Left out is what would be slower than the best that fit well even if no stage idled, what saves
    more memory than one that fits well, or less than one that does not fit, and what leaves the
    host more than it has.
    """
    untold = _untold(_savings(), _told(config, given))
    host = hardware.host_memory * 2**30
    timed = functools.partial(step_time, world_size=world_size, hardware=hardware, sample=sample)
    found, best = dict[Hashable, Candidate](), [math.inf] * BEST

    def is_slow(one: RunConfig) -> bool:
        return timed(one, idles=False).total > EQUALLY_FAST * best[-1]

    def runs(one: RunConfig) -> bool:
        return not check(one, world_size) and not problems(one)

    for base, chosen in layouts(config, world_size, given, hardware.dtype):
        if is_slow(base) or not runs(base):
            continue
        tried, well, over = list[Candidate](), list[Saving](), list[Saving]()
        savings = {_saved(base, choice): choice for choice in untold}
        for saved in dict.fromkeys((min(savings), *savings)):
            # where less is computed again more goes to the host, and tiles may need more than they
            # spare
            slower = any(
                _is_less(less, saved) and (less[1] == 0 or less[0] == saved[0]) for less in well
            )
            if slower or any(_is_less(saved, more) and saved[2] == more[2] for more in over):
                continue
            one = with_values(base, savings[saved])
            if is_slow(one):
                well.append(saved)
            if saved in well or not runs(one):
                continue
            layout = Candidate(one, {**chosen, **savings[saved]}, fullest(one, world_size), timed)
            if layout.memory.host > host:
                continue
            tried.append(layout)
            {"OK": well, "OOM": over}.get(layout.verdict(hardware), []).append(saved)
        if not tried:
            continue
        # of layouts that differ in how tokens are dealt, and in what saves memory, one is shown
        alike = frozenset(choice for choice in chosen.items() if choice[0] != "cp_layout")
        tried += [found[alike]] if alike in found else []
        found[alike] = min(reversed(tried), key=lambda one: one.order(hardware))
        fitting = [one.time.total for one in found.values() if one.verdict(hardware) == "OK"]
        best = sorted([*fitting, *[math.inf] * BEST])[:BEST]
    return sorted(found.values(), key=lambda one: one.order(hardware))
