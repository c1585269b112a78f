"""The learning rate as a pure function of the update number: linear warm-up, then decay.

There is no state, so a resumed run only needs its step. Formulas and flag names are those of
Megatron's `OptimizerParamScheduler`, with one difference: updates are counted from 1, so the first
rate is not 0. As in Megatron and transformers, the first update after the decay uses `min_lr`.
"""

from __future__ import annotations

import math

from megacp.engine.config.training import TrainingConfig


def learning_rate(update: int, settings: TrainingConfig) -> float:
    """Return the learning rate for an optimizer update; `update` counts from 1."""
    assert update >= 1, f"updates are counted from 1, but got {update}"
    lr = settings.lr
    min_lr = settings.min_lr
    style = settings.lr_decay_style
    top = max(1, settings.warmup_updates)  # the update with the full rate
    end = (settings.lr_decay_iters or settings.train_iters) + 1  # the first update with `min_lr`
    if update <= top:
        return lr * update / top
    if style == "constant":
        return lr
    if update >= end:
        return min_lr
    part = (update - top) / (end - top)  # completed fraction of the decay
    # `left` is the remaining fraction of `lr - min_lr`
    if style == "WSD":  # Megatron's "exponential" decay over the last updates
        length = (settings.lr_wsd_decay_iters or 1) + 1
        done = max(0, update - (end - length))
        left = 2.0 * 0.5 ** (done / length) - 1.0
    elif style == "linear":
        left = 1.0 - part
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * part))
    return min_lr + left * (lr - min_lr)
