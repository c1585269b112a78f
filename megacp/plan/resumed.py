"""The parallel layout of a resumed run, which keeps its checkpoint's layout if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set

from megacp.dry_run.packs import PackSample
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, flatten, with_values
from megacp.engine.config.yaml_file import from_yaml
from megacp.plan.hardware import Hardware
from megacp.plan.search import Candidate, fields_chosen, fits, fullest
from megacp.plan.times import step_time
from megacp.storage.wording import counted
from megacp.training.loop.stored import goes_on_from


def kept_layout(
    config: RunConfig,
    world_size: int,
    fixed: Set[str],
    hardware: Hardware,
    sample: PackSample,
    problems: Callable[[RunConfig], list[str]],
) -> tuple[Candidate | None, str]:
    """Return the parallel layout of the checkpoint to resume, and a note to print.

    Fields in `fixed` keep their values from `config`. The layout is None if there is no checkpoint
    to resume, the number of ranks differs, or the layout is invalid or does not fit on `hardware`.
    The note gives the reason.
    """
    before = goes_on_from(config)
    if before is None:
        return None, ""
    folder, manifest, text = before
    if manifest.world_size != world_size:
        saved_by = counted(manifest.world_size, "rank")
        note = (
            f"New parallel layout: {folder} was saved by {saved_by}, but this run has {world_size}"
        )
        return None, note
    # Use the checkpoint's layout; all other values come from this run's flags.
    stored = flatten(from_yaml(text))
    chosen = {name: stored[name] for name in sorted(fields_chosen(config) - fixed)}
    kept = with_values(config, chosen)
    reasons = [*check(kept, world_size), *problems(kept)]
    if reasons:
        return None, f"New parallel layout: that of {folder} contradicts the flags: {reasons[0]}"
    if not fits(kept, world_size, hardware):
        return (
            None,
            f"New parallel layout: that of {folder} does not fit into {hardware.memory:.4g} GiB",
        )
    timed = functools.partial(step_time, world_size=world_size, hardware=hardware, sample=sample)
    layout = Candidate(kept, chosen, fullest(kept, world_size), timed)
    return (
        layout,
        f"The parallel layout of {folder}, which was saved by {counted(world_size, 'rank')}",
    )
