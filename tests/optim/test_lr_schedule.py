"""Values of the learning rate at the boundaries of its phases."""

from __future__ import annotations

import itertools
import math

import pytest

from megacp.core.optim.lr_schedule import DECAYS, LrSchedule, learning_rate


def schedule(style: str, **changes: object) -> LrSchedule:
    fields = {"lr_warmup_iters": 10, "lr_decay_iters": 110, "lr_wsd_decay_iters": 20, **changes}
    return LrSchedule(1e-3, 1e-4, style, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", [*DECAYS, "WSD"])
def test_warm_up_is_linear_and_neither_starts_at_zero_nor_ends_late(style: str) -> None:
    assert learning_rate(1, schedule(style)) == pytest.approx(1e-4)
    assert learning_rate(5, schedule(style)) == pytest.approx(5e-4)
    assert learning_rate(10, schedule(style)) == 1e-3
    assert learning_rate(11, schedule(style)) <= 1e-3


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_the_decay_ends_exactly_at_min_lr_and_stays(style: str) -> None:
    assert learning_rate(109, schedule(style)) > 1e-4
    assert [learning_rate(update, schedule(style)) for update in (110, 111, 10_000)] == [1e-4] * 3


def test_the_middle_of_linear_and_cosine_is_half_way() -> None:
    """Update 60 is half of the 100 that follow the warm-up; a quarter is what the formula says."""
    for style in ("linear", "cosine"):
        assert learning_rate(60, schedule(style)) == pytest.approx(5.5e-4)
    assert learning_rate(35, schedule("cosine")) == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_constant_keeps_the_rate_for_ever() -> None:
    assert {learning_rate(update, schedule("constant")) for update in (10, 60, 110, 5_000)} == {1e-3}


def test_wsd_is_stable_until_its_last_iterations_decay() -> None:
    shape = schedule("WSD")
    assert {learning_rate(update, shape) for update in range(10, 91)} == {1e-3}
    rates = [learning_rate(update, shape) for update in range(90, 111)]
    assert all(a > b for a, b in itertools.pairwise(rates))
    assert learning_rate(100, shape) == pytest.approx(1e-4 + 9e-4 * (2 * 0.5**0.5 - 1))


def test_no_warm_up_begins_with_the_decay() -> None:
    assert learning_rate(1, schedule("linear", lr_warmup_iters=0, lr_decay_iters=10)) == pytest.approx(
        1e-4 + 9e-4 * 0.9
    )
