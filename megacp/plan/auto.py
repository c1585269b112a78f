"""`--parallel auto`: the plan's layout for the ranks that a run has, as if flags had said it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from megacp.dry_run.packs import sample_packs
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig
from megacp.plan.answer import larger, words
from megacp.plan.hardware import GPUS, Hardware, hardware
from megacp.plan.search import layouts, search
from megacp.storage.wording import human_bytes


def sheet_of(device: str, gib: float | None) -> tuple[Hardware, str]:
    """The row of a device by the name that it gives itself, with the memory it has; and what to call its times.

    One without a row, a CPU too, counts as the default of `megacp-plan`.
    """
    known = next((gpu for gpu in GPUS if gpu in device.lower().replace("-", " ").split()), None)
    here = hardware(known or "h100", "infiniband")
    times = f"nominal times of {known or 'h100'}" + f", as no sheet has {device}" * (known is None)
    return dataclasses.replace(here, memory=gib or here.memory), times


def laid_out(
    config: RunConfig,
    world_size: int,
    given: Collection[str],
    device: tuple[str, float | None],
    problems: Callable[[RunConfig], list[str]],
) -> tuple[RunConfig, str]:
    """The config with the first layout that fits of those without `problems`, and a line that tells it; ValueError with
    what would have to change. The same flags, packs and device give the same layout.
    """
    here, times = sheet_of(*device)
    found = search(config, world_size, given, here, sample_packs(config), problems)
    if not found:
        head = f"--parallel auto: no layout of {world_size} ranks takes these flags"
        for ranks in range(world_size - 1, 0, -1):
            if any(not check(one, ranks) and not problems(one) for one, _ in layouts(config, ranks, given)):
                head += f", one of {ranks} does"
                break
        raise ValueError("\n  - ".join([head, *check(config, world_size), *problems(config)]))
    best = found[0]
    memory = f"{human_bytes(best.memory.total)} of {human_bytes(here.memory * 2**30)}"
    if best.gib > here.memory:
        change = "\n  - ".join(["what would do:", *larger(found, world_size, here)])
        raise ValueError(f"--parallel auto: of {len(found):,} layouts none fits, the smallest needs {memory}; {change}")
    said = f"{words(best.config, world_size)}; {memory} ({best.verdict(here)})"
    if best.config.training.dtype == here.dtype:
        said += f", {best.time.total:.3g} s a step by {times}"
    return best.config, f"--parallel auto on {world_size} ranks: {said}"
