"""Search for the best parallel layouts of a model on a number of ranks, by memory and step time.

A layout is a configuration. The search keeps the fields that the user set, and tries every choice
in its tables for the other fields. A layout is valid if it passes the checks of a training run.
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

# Fraction of a GPU's memory that an `OK` layout may fill. Communicators need the remainder.
TIGHT = 0.9
# Layouts count as equally fast if their step times differ by less than this factor.
EQUALLY_FAST = 1.01
# Number of layouts to show.
BEST = 5
# Values of some configuration fields, by field name.
Choice = Mapping[str, Value]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
# Numbers of ranks that exchange tokens for heads with `a2a+p2p`.
_GROUPS = (2, 4, 8)
# Fractions of blocks with offloaded activations, ordered to rule out the others early.
_OFFLOADS = (0.99, 0.0, 0.5)
# Tokens per MLP tile, in a similar order.
_TILES = (0, 4096, 16384, 8192)
# A table with one empty choice, for fields that have no effect on a grid.
_NOTHING: tuple[Choice, ...] = ({},)


def _divisors(name: str, count: int, most: int) -> list[Choice]:
    """Return the divisors of `count` up to `most`, as values of the field `name`."""
    return [{name: size} for size in range(1, most + 1) if count % size == 0]


def _sizes(config: RunConfig, world_size: int) -> list[Sequence[Choice]]:
    """Return the sizes to try for each grid axis: tp, pp, cp, ep."""
    return [
        _divisors(TP, world_size, GPUS_OF_A_MACHINE),
        _divisors(PP, world_size, config.model.num_layers),
        _divisors(CP, world_size, world_size),
        _divisors(EP, config.model.num_experts or 1, config.model.num_experts or 1),
    ]


def _transports(cp: int) -> list[Choice]:
    """Return the transports, each with its token layouts and, if needed, with group sizes."""
    found: list[Choice] = []
    for row in TRANSPORTS.values():
        for layout in row.layouts:
            choice: Choice = {"cp_comm_type": row.name, "cp_layout": layout}
            if not row.needs_sizes:
                found.append(choice)
                continue
            for group in _GROUPS:
                if cp % group == 0 and group < cp:
                    sizes = (group, cp // group)
                    found.append({**choice, "hierarchical_context_parallel_sizes": sizes})
    return found


def _schedules() -> list[Choice]:
    """Return the pipeline schedules, each with the numbers of model chunks to try."""
    found: list[Choice] = []
    for name, row in PIPELINE_SCHEDULES.items():
        for chunks in row.searched_chunks:
            choice: Choice = {
                "num_virtual_stages_per_pipeline_rank": chunks,
                "pipeline_schedule": name,
            }
            found.append(choice)
    return found


def _strategies() -> list[Choice]:
    """Return the sharding strategies to try."""
    searched = [name for name, row in SHARDINGS.items() if row.searched]
    return [{"data_parallel_sharding_strategy": name} for name in searched]


def _modes() -> list[str]:
    """Return the recomputation modes by increasing strength; ties keep the table's order."""
    return sorted(RECOMPUTE_MODES, key=lambda name: RECOMPUTE_MODES[name].strength)


def _savings() -> list[Choice]:
    """Return the choices that save memory but never make a step faster.

    The mode that recomputes the most comes first: if it does not fit, no other mode is tried.
    """
    *weaker, strongest = _modes()
    found: list[Choice] = []
    for mode, offload, tile in itertools.product((strongest, *weaker), _OFFLOADS, _TILES):
        choice: Choice = {
            "recompute_granularity": mode,
            "activation_offload": offload,
            "mlp_chunk_tokens": tile,
        }
        found.append(choice)
    return found


def _others(base: RunConfig, world_size: int, dtype: str) -> list[Sequence[Choice]]:
    """Return tables of choices for the other fields on a grid, without `_savings`.

    A table has a single empty choice if its fields have no effect on this grid.
    """
    p = base.parallel
    cp = p.context_parallel_size
    machines = max(1, world_size // GPUS_OF_A_MACHINE)
    schedules: Sequence[Choice] = _NOTHING
    if p.pipeline_model_parallel_size > 1:
        schedules = _schedules()
    strategies: Sequence[Choice] = _NOTHING
    if world_size > p.tensor_model_parallel_size * p.pipeline_model_parallel_size:
        strategies = _strategies()
    transports: Sequence[Choice] = _NOTHING
    micro_batches: Sequence[Choice] = _NOTHING
    if cp > 1:
        transports = _transports(cp)
    else:  # with cp > 1, ranks share each row, so longer rows gain nothing
        micro_batches = [{"micro_batch_size": size} for size in (1, 2, 4)]
    # One copy of the optimizer, or one per machine.
    instances = [{"num_distributed_optimizer_instances": n} for n in sorted({1, machines})]
    return [schedules, transports, strategies, instances, micro_batches, [{"dtype": dtype}]]


def fields_chosen(config: RunConfig) -> set[str]:
    """Return the names of the fields whose values a search chooses."""
    tables = [*_sizes(config, 1), _savings()]
    # Grids with and without context parallelism have different tables.
    for cp in (1, 4):
        tables += _others(with_values(config, {PP: 2, CP: cp}), 16, "")
    return set(merged(itertools.chain(*tables)))


@dataclass(frozen=True)
class Candidate:
    """A valid layout, its memory and its step time."""

    config: RunConfig
    chosen: Choice
    """Fields that the search chose, with their values."""
    memory: RankMemory
    """Memory of the fullest rank."""
    timed: Callable[[RunConfig], StepTime]
    """Function that estimates the time of a step."""

    @functools.cached_property
    def time(self) -> StepTime:
        """Step time, computed on demand because layouts that do not fit never need it."""
        return self.timed(self.config)

    @functools.cached_property
    def gib(self) -> float:
        """Memory of the fullest rank in GiB."""
        return self.memory.total / 2**30

    def verdict(self, hardware: Hardware) -> str:
        """Return `OK`, `TIGHT` (fits, but uses more than this fraction of the memory) or `OOM`."""
        if self.gib <= TIGHT * hardware.memory:
            return "OK"
        if self.gib <= hardware.memory:
            return "TIGHT"
        return "OOM"

    def order(self, hardware: Hardware) -> tuple[int, float, float, float]:
        """Return the sorting key that puts the best layout first.

        Layouts that fit are sorted by speed, then by offloaded activations, then by memory. Layouts
        that do not fit are sorted by memory.
        """
        # Smaller keys come first. Rounding the logarithm groups times that count as equal.
        verdict = ("OK", "TIGHT", "OOM").index(self.verdict(hardware))
        if verdict == 2:
            return verdict, 0.0, 0.0, self.gib
        speed = round(math.log(self.time.total, EQUALLY_FAST))
        return verdict, speed, self.config.training.activation_offload, self.gib


def _untold(choices: Sequence[Choice], told: Choice) -> list[Choice]:
    """Return the distinct choices that agree with the given fields, without these fields.

    If no choice agrees, return all choices without the given fields.
    """
    agreeing = []
    for choice in choices:
        if all(told.get(name, value) == value for name, value in choice.items()):
            agreeing.append(choice)
    found: list[Choice] = []
    for choice in agreeing or choices:
        rest = {name: value for name, value in choice.items() if name not in told}
        if rest not in found:
            found.append(rest)
    return found


def layouts(
    config: RunConfig, world_size: int, given: Collection[str], dtype: str = "bfloat16"
) -> Iterator[tuple[RunConfig, Choice]]:
    """Yield layouts that a run might accept, each with its chosen fields, without `_savings`.

    Grid sizes are tried first. In every other table, the first choice is valid whenever any choice
    is. Therefore, a grid is skipped if its first choices are invalid together, and a choice is
    dropped if it is invalid together with the first choices of the other tables.
    """
    told = _told(config, given)
    sizes = [_untold(choices, told) for choices in _sizes(config, world_size)]
    for grid in map(merged, itertools.product(*sizes)):
        base = with_values(config, grid)
        # gcd instead of % also handles 0 ranks
        if math.gcd(world_size, base.model_ranks) != base.model_ranks:
            continue
        tables = [_untold(choices, told) for choices in _others(base, world_size, dtype)]
        # If the first choices are invalid together, no combination on this grid is valid.
        plainest = merged(table[0] for table in tables)
        if check(with_values(base, plainest), world_size):
            continue
        # Check each choice once, with the other tables' first choices, not in all combinations.
        valid = []
        for first, *rest in tables:
            kept = [first]
            for choice in rest:
                if not check(with_values(base, {**plainest, **choice}), world_size):
                    kept.append(choice)
            valid.append(kept)
        for chosen in map(merged, itertools.product(*valid)):
            yield with_values(base, chosen), {**grid, **chosen}


def _told(config: RunConfig, given: Collection[str]) -> Choice:
    """Return the values of the fields that the user set."""
    return {name: value for name, value in flatten(config).items() if name in given}


def merged(choices: Iterable[Choice]) -> dict[str, Value]:
    """Merge choices into one; later choices win."""
    found: dict[str, Value] = {}
    for choice in choices:
        found.update(choice)
    return found


def fullest_stage(config: RunConfig, world_size: int) -> tuple[int, RankMemory]:
    """Return the stage whose ranks need the most memory, and the memory of one such rank."""
    found: dict[int, RankMemory] = {}
    seen: set[Hashable] = set()
    for stage, chunks in enumerate(stage_layers(config, world_size)):
        kind = stage_kind(config, stage, chunks)
        # Among equal stages, the first has the most microbatches in flight, so measure only that
        # one. With deferred weight gradients, the last has the most, so measure all stages.
        if kind not in seen or config.parallel.defers_weight_gradients:
            found[stage] = stage_memory(config, stage, chunks, world_size)
        seen.add(kind)
    return max(found.items(), key=lambda one: one[1].total)


def fullest(config: RunConfig, world_size: int) -> RankMemory:
    """Return the memory of the fullest rank."""
    _, memory = fullest_stage(config, world_size)
    return memory


def fits(config: RunConfig, world_size: int, hardware: Hardware) -> bool:
    """Return whether the fullest rank has enough memory."""
    return fullest(config, world_size).total <= hardware.memory * 2**30


def no_problems(config: RunConfig) -> list[str]:
    """Return an empty list, for a machine that cannot be checked."""
    return []


# How much a choice saves in each way: recomputation mode, offloaded fraction, number of tiles.
Saving = tuple[int, float, int]


def _saved(base: RunConfig, choice: Choice) -> Saving:
    """Return how much a choice saves in each way."""
    values: dict[str, Any] = {**vars(base.training), **choice}
    # Compare positions: two modes of equal strength save memory in different ways.
    again = _modes().index(values["recompute_granularity"])
    tile = values["mlp_chunk_tokens"]
    # Experts receive several rows per token, so they have more tiles than a dense MLP.
    rows = expert_rows(base) if base.model.num_experts else tokens_per_rank(base)
    tiles = 0
    if tile:
        tiles = -(-rows // tile)
    return again, values["activation_offload"], tiles


def _is_less(one: Saving, other: Saving) -> bool:
    """Return whether `one` saves at most as much as `other` in each way."""
    return all(less <= more for less, more in zip(one, other, strict=True))


def search(
    config: RunConfig,
    world_size: int,
    given: Collection[str],
    hardware: Hardware,
    sample: PackSample,
    problems: Callable[[RunConfig], list[str]] = no_problems,
) -> list[Candidate]:
    """Return valid layouts, best first: `OK` layouts, `TIGHT` layouts, then those that do not fit.

    `problems` returns the reasons why this machine cannot run a layout.

    The search skips layouts that cannot be among the best. Such a layout would be too slow even
    without idle time, saves more memory than one that fits well, saves less memory than one that
    does not fit, or offloads more than the host memory can hold.
    """
    savings_tried = _untold(_savings(), _told(config, given))
    host = hardware.host_memory * 2**30
    timed = functools.partial(step_time, world_size=world_size, hardware=hardware, sample=sample)
    found: dict[Hashable, Candidate] = {}
    best = [math.inf] * BEST  # step times of the best `OK` layouts

    def is_slow(one: RunConfig) -> bool:
        return timed(one, idles=False).total > EQUALLY_FAST * best[-1]

    def runs(one: RunConfig) -> bool:
        return not check(one, world_size) and not problems(one)

    for base, chosen in layouts(config, world_size, given, hardware.dtype):
        if is_slow(base) or not runs(base):
            continue
        tried: list[Candidate] = []
        well: list[Saving] = []  # savings with which the layout fits well or is too slow
        over: list[Saving] = []  # savings with which it does not fit
        # Choices with equal savings on this grid count once. Try the smallest saving first: if it
        # fits well, larger savings are skipped.
        savings = {_saved(base, choice): choice for choice in savings_tried}
        for saved in dict.fromkeys((min(savings), *savings)):
            if _goes_too_far(saved, well) or _is_not_enough(saved, over):
                continue
            one = with_values(base, savings[saved])
            if is_slow(one):
                well.append(saved)
                continue
            if not runs(one):
                continue
            layout = Candidate(one, {**chosen, **savings[saved]}, fullest(one, world_size), timed)
            if layout.memory.host > host:
                continue
            tried.append(layout)
            verdict = layout.verdict(hardware)
            if verdict == "OK":
                well.append(saved)
            elif verdict == "OOM":
                over.append(saved)
        if not tried:
            continue
        # Keep only the best of the layouts that differ only in --cp-layout and memory savings.
        alike = frozenset(choice for choice in chosen.items() if choice[0] != "cp_layout")
        if alike in found:
            tried.append(found[alike])
        # The order is reversed so that the layout of an earlier iteration wins a tie.
        found[alike] = min(reversed(tried), key=lambda one: one.order(hardware))
        # The slowest of the best layouts is the limit for `is_slow`.
        fitting = [one.time.total for one in found.values() if one.verdict(hardware) == "OK"]
        best = sorted([*fitting, *[math.inf] * BEST])[:BEST]
    return sorted(found.values(), key=lambda one: one.order(hardware))


def _goes_too_far(saved: Saving, well: Sequence[Saving]) -> bool:
    """Return whether a layout that saves less already fits well.

    A layout that recomputes less may need more offload. Savings are therefore comparable only if
    the other layout offloads nothing or uses the same recomputation mode.
    """
    for less in well:
        comparable = less[1] == 0 or less[0] == saved[0]
        if comparable and _is_less(less, saved):
            return True
    return False


def _is_not_enough(saved: Saving, over: Sequence[Saving]) -> bool:
    """Return whether a layout that saves more, with the same number of tiles, does not fit.

    Savings with different numbers of tiles are not compared, because additional tiles may need more
    memory than they save.
    """
    return any(_is_less(saved, more) and saved[2] == more[2] for more in over)
