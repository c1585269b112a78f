"""Clocks of devices; events are stand-ins that the test moves, and real ones on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from megacp.core.distributed.clock import EventClock, clock_of
from megacp.core.monitor.timers import Timers, WallClock


class Queue:
    """A GPU whose work takes the time that the test says."""

    now, waits = 0.0, 0

    def event(self, enable_timing: bool) -> Event:
        """In the place of `torch.cuda.Event`."""
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at = queue, -1.0

    def record(self, stream: object) -> None:
        self.at = self.queue.now

    def synchronize(self) -> None:
        self.queue.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.at - self.at)


def test_a_cpu_has_the_hosts_clock() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, WallClock)
    begin = clock.mark()
    time.sleep(0.002)
    assert 0.002 <= clock.seconds(begin, clock.mark()) < 1.0


def test_events_are_read_when_seconds_are_wanted_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a step that waits for the GPU at every timer, and milliseconds taken for seconds."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = clock_of(torch.device("cuda"))
    assert isinstance(clock, EventClock)
    timers = Timers(clock)
    for _ in range(2):
        with timers.measure("step"):
            queue.now += 1.5
        queue.now += 10
    assert queue.waits == 0
    assert timers.take() == {"step": 3.0} and queue.waits == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")
def test_events_of_a_gpu_count_its_work() -> None:
    clock = clock_of(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    wall = time.perf_counter()
    begin = clock.mark()
    for _ in range(50):
        x @ x
    found = clock.seconds(begin, clock.mark())
    assert 0.2 * found < time.perf_counter() - wall < 5 * found + 0.01
