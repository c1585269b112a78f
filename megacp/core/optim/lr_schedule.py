"""The learning rate as a pure function of the update's number: linear warm-up, then a decay to `min_lr`.

There is no state, so a resumed run needs its step alone. Formulas and flag names are Megatron's
(`OptimizerParamScheduler`) with one difference: the first update is number 1, so it does not train with rate 0.
"""

from __future__ import annotations

import math

from megacp.core.config.training import TrainingConfig


def learning_rate(update: int, settings: TrainingConfig) -> float:
    """The rate of one optimizer update; `update` counts from 1, warm-up included."""
    assert update >= 1, f"updates count from 1, got {update}"
    lr, min_lr, style, warmup = settings.lr, settings.min_lr, settings.lr_decay_style, settings.lr_warmup_iters
    end = settings.lr_decay_iters or settings.train_iters  # the update that reaches `min_lr`; later ones keep it
    if update <= warmup:
        return lr * update / warmup
    if style == "constant":
        return lr
    if update >= end:
        return min_lr
    part = (update - warmup) / (end - warmup)  # of the decay, what is done
    if style == "WSD":  # Megatron's "exponential" over the last updates
        length = settings.lr_wsd_decay_iters or 1
        left = 2.0 * 0.5 ** (max(0, update - (end - length)) / length) - 1.0
    elif style == "linear":
        left = 1.0 - part
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * part))
    return min_lr + left * (lr - min_lr)
