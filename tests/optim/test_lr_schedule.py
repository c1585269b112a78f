"""Values of the learning rate at the boundaries of its phases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from megacp.core.config.training import TrainingConfig
from megacp.core.optim.lr_schedule import learning_rate


def rate(update: int, style: Any, **changes: Any) -> float:
    fields: dict[str, Any] = {"lr_warmup_iters": 10, "lr_decay_iters": 110, "lr_wsd_decay_iters": 20, **changes}
    return learning_rate(update, TrainingConfig(lr=1e-3, min_lr=1e-4, lr_decay_style=style, **fields))


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_warm_up_is_linear_and_the_decay_ends_exactly_at_min_lr_and_stays(style: str) -> None:
    assert [rate(update, style) for update in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert rate(10, style) == 1e-3 >= rate(11, style)
    last = 1e-3 if style == "constant" else 1e-4
    assert rate(109, style) >= last
    assert [rate(update, style) for update in (110, 111, 10_000)] == [last] * 3
    assert [rate(u, style, lr_decay_iters=None, train_iters=110) for u in (60, 109, 110)] == [
        rate(u, style) for u in (60, 109, 110)
    ]


def test_each_style_falls_as_its_formula_says() -> None:
    """Update 60 is half of the 100 that follow the warm-up; a quarter is what the formula says."""
    assert [rate(60, style) for style in ("linear", "cosine", "constant")] == pytest.approx([5.5e-4, 5.5e-4, 1e-3])
    assert rate(35, "cosine") == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(1, "linear", lr_warmup_iters=0, lr_decay_iters=10) == pytest.approx(1e-4 + 9e-4 * 0.9)
    assert {rate(update, "WSD") for update in range(10, 91)} == {1e-3}
    assert all(a > b for a, b in itertools.pairwise(rate(update, "WSD") for update in range(90, 111)))
    assert rate(100, "WSD") == pytest.approx(1e-4 + 9e-4 * (2 * 0.5**0.5 - 1))
