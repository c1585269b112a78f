"""Flags without effect: each is told with its reason, and none that acts."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.core.config.checks.idle import idle_notes
from megacp.core.config.run import RunConfig, with_values


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"valid_data_path": "packs"}, "--valid-data-path, because --eval-interval is 0"),
        ({"lr_decay_style": "constant", "min_lr": 1e-5, "lr_decay_iters": 9}, "--min-lr, --lr-decay-iters, because"),
        ({"lr_wsd_decay_style": "linear"}, "--lr-wsd-decay-style, because --lr-decay-style is not WSD"),
        ({"profile_ranks": "all"}, "--profile-ranks, because there is no --profile"),
        ({"rope_low_freq_factor": 2.0}, "--rope-low-freq-factor, because --rope-scaling is not llama3"),
        ({"rope_scaling": "linear"}, "--rope-scaling, because --rope-scaling-factor is 1"),
        ({"vision_hidden_size": 64, "on_bad_image": "skip"}, "--on-bad-image, --vision-hidden-size, because --vision"),
        ({"max_bad_image_share": 0.1}, "--max-bad-image-share, because --on-bad-image is not skip"),
        ({"train_iters": 1}, "--lr 0.001, because --lr-decay-style cosine ends at 0 in its only step"),
    ],
)
def test_a_flag_that_does_nothing_is_told_with_its_reason(values: dict[str, Any], line: str) -> None:
    """Would catch a validation that never runs, and rates that never fall, in a run that says nothing of it."""
    (note,) = idle_notes(with_values(RunConfig(), values))
    assert note.startswith(f"no effect: {line}")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"valid_data_path": "packs", "eval_interval": 5, "eval_iters": 3},
        {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_positions": 64},
        {"train_iters": 1, "lr_decay_style": "constant"},
        {"train_iters": 1, "lr_decay_iters": 10},
        {"vision_num_layers": 2, "vision_hidden_size": 64, "on_bad_image": "skip", "max_bad_image_share": 0.1},
    ],
)
def test_nothing_is_told_of_flags_that_act(values: dict[str, Any]) -> None:
    assert not list(idle_notes(with_values(RunConfig(), values)))
