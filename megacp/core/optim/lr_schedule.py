"""The learning rate as a pure function of the update's number: linear warm-up, then a decay to `min_lr`.

There is no state, so a resumed run needs its step alone. Formulas and flag names are Megatron's
(`OptimizerParamScheduler`) with one difference: the first update is number 1, so it does not train with rate 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),
}
"""Share of `lr - min_lr` that is left once `part` in [0, 1] of the decay is done, by `--lr-decay-style`."""


@dataclass(frozen=True)
class LrSchedule:
    """Shape of the learning rate over a run, as `config.checks` lets it through; iterations count optimizer updates."""

    lr: float
    min_lr: float = 0.0
    lr_decay_style: str = "cosine"
    """`constant`, `linear`, `cosine` or `WSD`."""
    lr_warmup_iters: int = 0
    """Updates over which the rate rises linearly; update number `lr_warmup_iters` is the first with the full `lr`."""
    lr_decay_iters: int = 1
    """Number of the update that reaches `min_lr`, warm-up included; later updates keep it."""
    lr_wsd_decay_iters: int = 0
    """WSD only: how many of the updates up to `lr_decay_iters` decay; those before keep `lr`."""


def learning_rate(update: int, schedule: LrSchedule) -> float:
    """The rate of one optimizer update; `update` counts from 1."""
    assert update >= 1, f"updates count from 1, got {update}"
    if update <= schedule.lr_warmup_iters:
        return schedule.lr * update / schedule.lr_warmup_iters
    if schedule.lr_decay_style == "constant":
        return schedule.lr
    if update >= schedule.lr_decay_iters:
        return schedule.min_lr
    if schedule.lr_decay_style == "WSD":
        start = schedule.lr_decay_iters - schedule.lr_wsd_decay_iters
        left = 2.0 * 0.5 ** (max(0, update - start) / schedule.lr_wsd_decay_iters) - 1.0  # Megatron's "exponential"
    else:
        length = schedule.lr_decay_iters - schedule.lr_warmup_iters
        left = DECAYS[schedule.lr_decay_style]((update - schedule.lr_warmup_iters) / length)
    return schedule.min_lr + left * (schedule.lr - schedule.min_lr)
