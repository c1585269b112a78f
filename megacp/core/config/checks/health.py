"""What the flags of health and of profiling ask of each other and of the run.

A limit that could never act, or would always act, is refused: a typing error reaches such a number too.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.run import RunConfig


def health_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """Factors that call every step a spike, and an action on spikes that nothing looks for."""
    health = config.health
    factors = {
        "--loss-spike-factor": health.loss_spike_factor,
        "--grad-norm-spike-factor": health.grad_norm_spike_factor,
    }
    if small := [f"{name} {factor}" for name, factor in factors.items() if 0 < factor <= 1]:
        yield (f"{', '.join(small)}: every ordinary step would be a spike; use a factor above 1, or 0 to look at none")
    if health.spike_action != "warn" and all(factor == 0 for factor in factors.values()):
        yield f"--spike-action {health.spike_action} needs {' or '.join(factors)} above 1"


def profile_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """Steps and ranks to profile that the run does not have."""
    if not config.log.profile:
        return
    try:
        steps = profiled_steps(config.log.profile)
        if not config.dry_run and config.log.profile_ranks:
            profiled_ranks(config.log.profile_ranks, world)
    except ValueError as error:
        yield str(error)
        return
    if steps[0] > config.training.train_iters:
        yield f"--profile {config.log.profile} begins after --train-iters {config.training.train_iters}"


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
