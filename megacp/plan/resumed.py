"""The layout of a resumed run: that of its checkpoint, if the run can keep it."""

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
    """Return the layout of the checkpoint that a run resumes, and a note to print.

    `fixed` fields keep their values in `config`. The layout is None if the run starts anew, has a
    different number of ranks, or cannot use the layout on `hardware`; the note gives the reason.
    """
    before = goes_on_from(config)
    if before is None:
        return None, ""
    folder, manifest, text = before
    if manifest.world_size != world_size:
        saved_by = counted(manifest.world_size, "rank")
        note = f"A new layout: {folder} was saved by {saved_by}, this run has {world_size}"
        return None, note
    # Take the layout from the checkpoint, and everything else from the flags of this run.
    stored = flatten(from_yaml(text))
    chosen = {name: stored[name] for name in sorted(fields_chosen(config) - fixed)}
    kept = with_values(config, chosen)
    reasons = [*check(kept, world_size), *problems(kept)]
    if reasons:
        return None, f"A new layout: the one of {folder} contradicts the flags: {reasons[0]}"
    if not fits(kept, world_size, hardware):
        return None, f"A new layout: the one of {folder} does not fit {hardware.memory:.4g} GiB"
    timed = functools.partial(step_time, world_size=world_size, hardware=hardware, sample=sample)
    layout = Candidate(kept, chosen, fullest(kept, world_size), timed)
    return layout, f"The layout of {folder}, which {counted(world_size, 'rank')} saved"
