"""Wall timers, on a clock that the test turns."""

from __future__ import annotations

import pytest

from megacp.core.monitor.timers import Timers, WallClock


class Clock(WallClock):
    """A clock that stands still unless it is moved."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def test_times_add_up_until_they_are_taken_also_nested_and_of_a_body_that_raises() -> None:
    clock = Clock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.measure("data"):
            clock.now += seconds
        clock.now += 10
    with pytest.raises(KeyError), timers.measure("step"), timers.measure("forward"):
        clock.now += 4
        raise KeyError
    assert timers.seconds("data") == 3.5 and timers.seconds("other") == 0.0
    assert timers.take() == {"data": 3.5, "step": 4.0, "forward": 4.0}
    assert timers.take() == {} and timers.seconds("data") == 0.0
