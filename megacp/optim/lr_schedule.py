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

WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": DECAYS["linear"],
    "cosine": DECAYS["cosine"],
    "exponential": lambda part: 2.0 * 0.5**part - 1.0,
    "minus_sqrt": lambda part: 1.0 - math.sqrt(part),
}
"""The same for the last `lr_wsd_decay_iters` updates of warmup-stable-decay; Megatron's default is exponential."""


@dataclass(frozen=True)
class LrSchedule:
    """Shape of the learning rate over a run; iterations count optimizer updates."""

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
    lr_wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        wrong = []
        if self.lr_decay_style not in (*DECAYS, "WSD"):
            wrong.append(f"--lr-decay-style {self.lr_decay_style}: one of {', '.join([*DECAYS, 'WSD'])}")
        if self.lr_wsd_decay_style not in WSD_DECAYS:
            wrong.append(f"--lr-wsd-decay-style {self.lr_wsd_decay_style}: one of {', '.join(WSD_DECAYS)}")
        if self.lr < 0 or not 0 <= self.min_lr <= self.lr:
            wrong.append(f"--lr {self.lr} --min-lr {self.min_lr}: 0 <= min_lr <= lr is needed")
        if not 0 <= self.lr_warmup_iters <= self.lr_decay_iters:
            wrong.append(f"--lr-warmup-iters {self.lr_warmup_iters}: at most --lr-decay-iters {self.lr_decay_iters}")
        stable = self.lr_decay_iters - self.lr_warmup_iters
        if self.lr_decay_style == "WSD" and not 0 < self.lr_wsd_decay_iters <= stable:
            wrong.append(f"--lr-wsd-decay-iters {self.lr_wsd_decay_iters}: 1 to {stable} (decay minus warm-up iters)")
        if wrong:
            raise ValueError("; ".join(wrong))


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
        left = WSD_DECAYS[schedule.lr_wsd_decay_style](max(0, update - start) / schedule.lr_wsd_decay_iters)
    else:
        length = schedule.lr_decay_iters - schedule.lr_warmup_iters
        left = DECAYS[schedule.lr_decay_style]((update - schedule.lr_warmup_iters) / length)
    return schedule.min_lr + left * (schedule.lr - schedule.min_lr)
