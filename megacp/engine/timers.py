"""Named timers of a step and of its phases, the breakdown of a step over ranks, and the time that a
run still takes.

The clock is given from outside. On an accelerator a moment is an event in its queue, whose seconds
are worked out when they are asked for: nothing here waits for the device. A phase that is not timed
costs one test.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Phase = Callable[[str], AbstractContextManager[Any]]
"""Gives the context in which a named part of a step runs."""
_NOTHING = contextlib.nullcontext()


def unmeasured(name: str) -> AbstractContextManager[Any]:
    """The phase of a caller who looks at none."""
    return _NOTHING


class WallClock:
    """The host's steady clock."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Seconds from one moment to another; of a GPU's clock, after waiting until the second is
        over.
        """
        return end - begin


class EventClock:
    """Clock of a GPU: marks are events in its queue, so reading them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0  # it counts milliseconds


class Timers:
    """Seconds by name."""

    def __init__(self, clock: WallClock | EventClock | None = None) -> None:
        self._clock = clock or WallClock()
        self.detailed = False
        """Whether phases are timed."""
        self.annotate: Phase | None = None
        """Names phases in a trace while one is taken."""
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the body to `name`, also when the body raises."""
        with (self.annotate or unmeasured)(name):
            begin = self._clock.mark()
            try:
                yield
            finally:
                self._spans.setdefault(name, []).append((begin, self._clock.mark()))

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """The context of a part of a step: measured in detailed steps and in a trace, else
        nothing.
        """
        return self.measure(name) if self.detailed or self.annotate is not None else _NOTHING

    def seconds(self, name: str) -> float:
        """Time added to `name` since the last `take`; 0 when it did not run."""
        return sum(self._clock.seconds(begin, end) for begin, end in self._spans.get(name, []))

    def take(self) -> dict[str, float]:
        """All timers, and start again from zero."""
        taken = {name: self.seconds(name) for name in self._spans}
        self._spans = {}
        return taken


COMPUTING = ("data", "plan", "shard", "forward", "backward", "optimizer")
WAITING = ("agreement", "pipeline exchange", "gradient exchange", "norm", "parameter exchange")
"""Phases of a step, in which a rank works and in which it mostly waits for others."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by phase and rank."""

    seconds: dict[str, list[float]]
    """Phase to the seconds of rank 0, 1, ...; phases that took no time anywhere are left out."""

    @property
    def slowest(self) -> int:
        """The rank that computed longest."""
        ranks = range(len(next(iter(self.seconds.values()), [0.0])))
        return max(
            ranks,
            key=lambda rank: sum(
                self.seconds[name][rank] for name in COMPUTING if name in self.seconds
            ),
        )

    def line(self, step: int) -> str:
        """One line: mean and longest milliseconds of each phase."""
        parts = []
        for name, of_ranks in self.seconds.items():
            mean, most = sum(of_ranks) / len(of_ranks), max(of_ranks)
            where = f" (rank {of_ranks.index(most)})" if len(of_ranks) > 1 else ""
            parts.append(f"{name} {1e3 * mean:.3g} / {1e3 * most:.3g}{where}")
        computing = [seconds for name, seconds in self.seconds.items() if name in COMPUTING]
        busy = [sum(of_rank) for of_rank in zip(*computing, strict=True)] or [0.0]
        mean = sum(busy) / len(busy)
        over = f", {max(busy) / mean:.2f} times the mean" if mean else ""
        return (
            f"step {step}: mean / longest ms: {'; '.join(parts)}; slowest in computing: rank "
            f"{self.slowest}{over}"
        )

    def figures(self) -> dict[str, float]:
        """The same for a log file."""
        found: dict[str, float] = {"slowest_rank": self.slowest}
        for name, of_ranks in self.seconds.items():
            key = name.replace(" ", "_")
            found |= {f"{key}_mean": sum(of_ranks) / len(of_ranks), f"{key}_max": max(of_ranks)}
        return found


class Pace:
    """How long a run still takes: the median of the last 64 times from step to step, times the
    steps that are left.

    Only steps of this process count, so it is right after a resume, and a save between two steps
    moves it little.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._spans: deque[float] = deque(maxlen=64)

    def left(self, steps: int) -> float:
        """Note that a step has ended; seconds that `steps` more take."""
        now = time.monotonic()
        self._spans.append(now - self._last)
        self._last = now
        return statistics.median(self._spans) * steps
