"""Wall timers, on a clock that the test turns."""

from __future__ import annotations

import pytest
import torch

from megacp.core.monitor.timers import EventClock, Timers, WallClock


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


class Event:
    """In the place of `torch.cuda.Event`: a GPU whose work takes the time that the test says."""

    now, waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = -1.0

    def record(self, stream: object) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.at - self.at)


def test_events_of_a_gpu_are_read_when_seconds_are_wanted_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a step that waits for the GPU at every timer, and milliseconds taken for seconds."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timers = Timers(EventClock(torch.device("cuda")))
    for _ in range(2):
        with timers.measure("step"):
            Event.now += 1.5
        Event.now += 10
    assert Event.waits == 0
    assert timers.take() == {"step": 3.0} and Event.waits == 2
