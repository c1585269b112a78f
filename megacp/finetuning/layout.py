"""Choose the parallel layout of a fine-tuning run, and whether the whole model is trained."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import yaml

from megacp.dry_run.packs import sample_packs
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.finetuning.numbers import ADAPTERS
from megacp.plan.answer import Answer, flags
from megacp.plan.hardware import Hardware, hardware_here
from megacp.plan.search import CP, PP, TP, fullest
from megacp.storage.wording import counted
from megacp.training.start import launch

# CPU ranks that are started at most. More of them would hold more copies of the weights.
_MOST_CPU_RANKS = 8
# Share of a machine's memory that a run on CPU ranks may fill: other programs need some, too.
_CPU_MEMORY = 0.8


@dataclass(frozen=True)
class ChosenLayout:
    """The ranks of a run and the flags that divide the work among them."""

    ranks: int
    values: dict[str, Value] = field(default_factory=dict)
    """Chosen fields: the parallel layout, and the sizes of LoRA adapters if they are needed."""
    memory: str = ""
    """Planned and available memory of a rank, in words."""
    name: str = ""
    """The layout in words."""


def this_device_type() -> str:
    """Return the type of this machine's devices: `cuda` or `cpu`."""
    return launch.device_type(launch.World())


def default_ranks() -> int:
    """Return the number of GPUs, or on a machine without GPUs a number of CPU ranks."""
    if this_device_type() == "cuda":
        return torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    # A power of two can share every row.
    return 2 ** int(math.log2(min(cores, _MOST_CPU_RANKS)))


def choose_layout(
    config: RunConfig,
    given: Collection[str],
    ranks: int | None,
    documents: list[int],
) -> ChosenLayout:
    """Return the layout for a run with this configuration.

    `ranks` is the number of ranks that the user wants, or None. `documents` are lengths of
    documents, from which packs are sampled to compare layouts. Raise ValueError if no layout is
    valid or none fits, even with LoRA adapters.
    """
    # The packs do not exist yet, so the fields that belong to them cannot be checked.
    unknown: dict[str, Value] = {"train_epochs": None, "valid_data_path": None, "eval_interval": 0}
    config = with_values(config, unknown)
    # LoRA flags and frozen parts are a decision of the user, which stays.
    ways: list[dict[str, Value]] = [{}]
    if (
        "lora_rank" not in given
        and "freeze" not in given
        and config.checkpoint.load_adapter is None
    ):
        ways.append(ADAPTERS)
    reasons = []
    for way in ways:
        tried = with_values(config, way)
        fixed = frozenset(given) | frozenset(way)
        if this_device_type() == "cuda":
            layout, reason = _on_gpus(tried, fixed, ranks or default_ranks(), documents)
        else:
            layout, reason = _on_cpus(tried, fixed, ranks)
        if layout is not None:
            return ChosenLayout(layout.ranks, {**way, **layout.values}, layout.memory, layout.name)
        reasons.append(reason)
    raise ValueError(reasons[-1])


def _on_gpus(
    config: RunConfig, given: frozenset[str], ranks: int, documents: list[int]
) -> tuple[ChosenLayout | None, str]:
    """Return the fastest layout that fits on GPUs, and the reason if none does."""
    name, gib = launch.device_at_hand(launch.World(size=ranks, local_size=1))
    hardware = hardware_here(name, gib, "infiniband")
    sample = sample_packs(config, documents)

    def problems(one: RunConfig) -> list[str]:
        return backend_problems(one, "cuda")

    # The dtype is part of the numbers of a run, so the planner must not change it.
    answer = Answer(config, ranks, given, hardware, sample, problems, keeps_dtype=True)
    if not answer.found:
        raise ValueError(answer.refusal())
    best = answer.found[0]
    if best.gib > hardware.memory:
        needed = _memory_text(best.gib, hardware)
        return (
            None,
            f"no layout fits on {counted(ranks, 'GPU')} ({needed}): use more or larger GPUs",
        )
    values = yaml.safe_load(flags(best))
    return ChosenLayout(ranks, values, _memory_text(best.gib, hardware), answer.best[0].name), ""


def _on_cpus(
    config: RunConfig, given: frozenset[str], ranks: int | None
) -> tuple[ChosenLayout | None, str]:
    """Return a layout for CPU ranks that fits in the machine's memory, and the reason if none does.

    Ranks take different rows of a batch, and share each row if there are more ranks than rows.
    Raise ValueError if no layout is valid.
    """
    tried = ranks or default_ranks()
    full = refused = ""
    while tried >= 1:
        world = launch.World(size=tried, local_size=tried)
        name, gib = launch.device_at_hand(world)
        hardware = hardware_here(name, gib * _CPU_MEMORY, "infiniband")
        for values in _divisions(config, given, tried):
            divided = with_values(config, values)
            problems = [*check(divided, tried), *backend_problems(divided, "cpu")]
            if problems:
                refused = problems[0]
                continue
            needed = fullest(divided, tried).total / 2**30
            memory = _memory_text(needed, hardware)
            if needed <= hardware.memory:
                return ChosenLayout(tried, values, memory, _in_words(divided, tried)), ""
            full = f"{counted(tried, 'CPU rank')} would not fit in memory ({memory})"
            break  # other divisions need about as much
        # The user's number of ranks stays; otherwise fewer ranks hold fewer copies of the weights.
        if ranks is not None:
            break
        tried //= 2
    # Adapters save memory, but they mend no other fault of the flags.
    if not full:
        raise ValueError(refused)
    return None, full


def _divisions(config: RunConfig, given: frozenset[str], ranks: int) -> list[dict[str, Value]]:
    """Return the ways to divide a batch among CPU ranks, the preferred one first."""
    if {CP, TP, PP} & given:
        return [{}]  # the user has chosen the layout
    at_once = config.training.micro_batch_size
    rows = config.training.global_batch_size // at_once
    shared = ranks // math.gcd(rows, ranks)
    found: list[dict[str, Value]] = [{CP: shared}] if shared > 1 else [{}]
    # Some models cannot share rows. Each rank then takes its own row, and the batch may grow.
    if shared > 1 and "global_batch_size" not in given:
        found.append({"global_batch_size": math.ceil(rows / ranks) * ranks * at_once})
    return found


def _memory_text(needed: float, hardware: Hardware) -> str:
    """Return the planned and the available memory of a rank."""
    return f"planned {needed:.3g} of {hardware.memory:.3g} GiB per rank"


def _in_words(config: RunConfig, ranks: int) -> str:
    """Describe a layout of CPU ranks."""
    if ranks == 1:
        return "one CPU rank"
    shape = config.grid_shape(ranks)
    # Axes of one rank are left out.
    sizes = []
    for name in ("dp", "tp", "pp", "cp", "ep"):
        size = getattr(shape, name)
        if size > 1:
            sizes.append(f"{name} {size}")
    return f"{ranks} CPU ranks: {', '.join(sizes)}"
