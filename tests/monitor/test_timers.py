"""Wall timers, on a clock that the test turns."""

from __future__ import annotations

import pytest

from megacp.core.monitor.timers import Timers


class Clock:
    """A clock that stands still unless it is moved."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_times_add_up_until_they_are_taken() -> None:
    """Would catch a second measurement that replaces the first, and figures carried into the next step."""
    clock = Clock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.measure("data"):
            clock.now += seconds
        clock.now += 10
    assert timers.seconds("data") == 3.5 and timers.seconds("other") == 0.0
    assert timers.take() == {"data": 3.5}
    assert timers.take() == {} and timers.seconds("data") == 0.0


def test_nested_timers_count_both() -> None:
    """Would catch an inner timer that stops the outer one."""
    clock = Clock()
    timers = Timers(clock)
    with timers.measure("step"):
        clock.now += 1
        with timers.measure("forward"):
            clock.now += 2
    assert timers.take() == {"step": 3.0, "forward": 2.0}


def test_a_body_that_raises_is_timed_too() -> None:
    """Would catch a timer that swallows the exception or its time."""
    clock = Clock()
    timers = Timers(clock)
    with pytest.raises(KeyError), timers.measure("step"):
        clock.now += 4
        raise KeyError
    assert timers.seconds("step") == 4.0
