"""The learning rate as a pure function of the update's number: linear warm-up, then a decay to
`min_lr`.

There is no state, so a resumed run needs only its step. Formulas and flag names are Megatron's
(`OptimizerParamScheduler`) with one difference: the first update is number 1, so it does not train
with rate 0. As there and in transformers `min_lr` comes one update after the last of the decay.
"""

from __future__ import annotations

import math

from megacp.engine.config.training import TrainingConfig


def learning_rate(update: int, settings: TrainingConfig) -> float:
    """The rate of one optimizer update; `update` counts from 1, warm-up included."""
    assert update >= 1, f"updates count from 1, got {update}"
    lr, min_lr, style = settings.lr, settings.min_lr, settings.lr_decay_style
    top = max(1, settings.warmup_updates)  # the update that has the whole rate
    end = (settings.lr_decay_iters or settings.train_iters) + 1  # the first one with `min_lr`
    if update <= top:
        return lr * update / top
    if style == "constant":
        return lr
    if update >= end:
        return min_lr
    part = (update - top) / (end - top)  # of the decay, what is done
    if style == "WSD":  # Megatron's "exponential" over the last updates
        length = (settings.lr_wsd_decay_iters or 1) + 1
        left = 2.0 * 0.5 ** (max(0, update - (end - length)) / length) - 1.0
    elif style == "linear":
        left = 1.0 - part
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * part))
    return min_lr + left * (lr - min_lr)
