"""Limits of a healthy run: skipped updates in a row, jumps of loss and gradient, bad images.

Every limit is compared with numbers that all ranks hold, so all ranks skip or end alike. Each limit has a switch of its
own, since the gradients of some runs jump by nature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacp.core.config.ranges import NotNegative, Range


@dataclass(frozen=True)
class HealthConfig:
    """Limits on a step's numbers, and what happens beyond them. A run that a limit ends saves nothing."""

    max_skipped_steps: NotNegative[int] = 10
    """Steps in a row without an update (not finite, refused as a spike, nothing to learn) that end the run; 0 sets no
    limit.
    """

    spike_action: Literal["warn", "skip", "stop"] = "warn"
    """On a step whose loss or gradient norm jumps: warn says so, skip leaves its update out on all ranks, stop ends the
    run before the update.
    """

    loss_spike_factor: NotNegative[float] = 3.0
    """A loss above this many times the running median is a spike; 0 looks at no loss."""

    grad_norm_spike_factor: NotNegative[float] = 10.0
    """A gradient norm above this many times the running median is a spike; 0 looks at no norm."""

    spike_window: Annotated[int, Range(4, 10_000)] = 64
    """Updates of the running median; from the eighth on it is compared with."""

    max_bad_image_share: Annotated[float, Range(0, 1)] = 0.5
    """With --on-bad-image skip: the largest share of documents with images that may be left out, asked again after
    every 16 of them; beyond it the run ends.
    """
