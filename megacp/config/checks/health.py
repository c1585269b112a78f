"""What the flags of health and of profiling ask of each other and of the run.

Key property: a limit that could never act, or would always act, is refused before the run. Rejected: taking such a
number as "off", which a typing error reaches too.
"""

from __future__ import annotations

from megacp.config.checks.rules import Rule, registrar
from megacp.config.run import RunConfig, flag, flatten

HEALTH_RULES: list[Rule] = []
_rule = registrar(HEALTH_RULES)


@_rule("loss_spike_factor", "grad_norm_spike_factor")
def _factors_are_above_one(config: RunConfig, world: int) -> str | None:
    values = flatten(config)
    wrong = [name for name in ("loss_spike_factor", "grad_norm_spike_factor") if 0 < float(str(values[name])) <= 1]
    if not wrong:
        return None
    told = ", ".join(f"{flag(name)} {values[name]}" for name in wrong)
    return f"{told}: every ordinary step would be a spike; use a factor above 1, or 0 to look at none"


@_rule("spike_action", "loss_spike_factor", "grad_norm_spike_factor")
def _acting_on_spikes_needs_a_factor(config: RunConfig, world: int) -> str | None:
    health = config.health
    if health.spike_action == "warn" or health.loss_spike_factor or health.grad_norm_spike_factor:
        return None
    return f"--spike-action {health.spike_action} needs --loss-spike-factor or --grad-norm-spike-factor above 1"


def profiled_steps(text: str) -> range:
    """The steps of `--profile START:STOP`, both ends included. ValueError for another text."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)):
        raise ValueError(f"--profile {text}: expected START:STOP, two steps from 1 on, such as 10:12")
    return range(int(start), int(stop) + 1)


def profiled_ranks(text: str, world: int) -> tuple[int, ...]:
    """The ranks of `--profile-ranks` in a world of so many. ValueError for another text or rank."""
    if text == "all":
        return tuple(range(world))
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--profile-ranks {text}: expected numbers of ranks, such as 0,3, or all")
    ranks = tuple(sorted({int(word) for word in words}))
    if ranks[-1] >= world:
        raise ValueError(f"--profile-ranks {text}: rank {ranks[-1]} is not among {world} ranks, 0 to {world - 1}")
    return ranks


@_rule("profile", "profile_ranks", "train_iters", "dry_run")
def _profile_names_steps_and_ranks(config: RunConfig, world: int) -> str | None:
    if config.log.profile is None:
        return None
    try:
        steps = profiled_steps(config.log.profile)
        if not config.dry_run:
            profiled_ranks(config.log.profile_ranks, world)
    except ValueError as error:
        return str(error)
    last = config.training.train_iters
    if steps[0] > last:
        return f"--profile {config.log.profile} begins after --train-iters {last}"
    return None
