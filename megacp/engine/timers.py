"""Timers for steps and their phases, a step's breakdown by rank, and the estimated remaining time.

The caller provides the clock. On a GPU, a mark is an event in the stream, and seconds are computed
only when they are read, so measuring never waits for the device. An untimed phase costs one `if`.
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
"""Function from a phase's name to the context in which the phase runs."""
# shared by all untimed phases, which therefore allocate nothing
_NOTHING = contextlib.nullcontext()


def unmeasured(name: str) -> AbstractContextManager[Any]:
    """Return a context that does nothing, for callers without timers."""
    return _NOTHING


class WallClock:
    """The host's monotonic clock."""

    def mark(self) -> float:
        """Return the current time."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - begin


class EventClock:
    """A GPU's clock. Marks are events in the current stream, so recording a mark does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Record and return an event."""
        # only the current stream: work in other streams is not part of the phase
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events. Wait until the GPU has passed the second one."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0  # elapsed_time is in milliseconds


class Timers:
    """Sums of measured seconds, by name."""

    def __init__(self, clock: WallClock | EventClock | None = None) -> None:
        self._clock = clock or WallClock()
        self.detailed = False
        """Whether to measure phases."""
        self.annotate: Phase | None = None
        """Annotates phases in a profiler trace; None if no trace is being recorded."""
        # (begin, end) marks, which a GPU may not have reached yet
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the `with` body to `name`, even if the body raises."""
        # enter the annotation first, so that the trace includes the marks
        with (self.annotate or unmeasured)(name):
            begin = self._clock.mark()
            try:
                yield
            finally:
                self._spans.setdefault(name, []).append((begin, self._clock.mark()))

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a phase. It measures only in detailed steps and during a trace."""
        if self.detailed or self.annotate is not None:
            return self.measure(name)
        return _NOTHING

    def seconds(self, name: str) -> float:
        """Return the seconds added to `name` since the last `take`; 0 if there are none."""
        return sum(self._clock.seconds(begin, end) for begin, end in self._spans.get(name, []))

    def take(self) -> dict[str, float]:
        """Return the seconds by name, and reset them to zero."""
        taken = {name: self.seconds(name) for name in self._spans}
        self._spans = {}
        return taken


# these names appear in logs and in traces
COMPUTING = ("data", "plan", "shard", "forward", "backward", "optimizer")
WAITING = ("agreement", "pipeline exchange", "gradient exchange", "norm", "parameter exchange")
"""Phases in which a rank mostly waits for other ranks; in `COMPUTING`, it computes."""


@dataclass(frozen=True)
class Breakdown:
    """The seconds of one step by phase and rank."""

    seconds: dict[str, list[float]]
    """Seconds on ranks 0, 1, ... by phase. Phases that took no time on any rank are omitted."""

    @property
    def slowest(self) -> int:
        """The rank with the longest computing time."""
        computing = [self.seconds[name] for name in COMPUTING if name in self.seconds]
        # any phase has one entry per rank
        first_phase = next(iter(self.seconds.values()), [0.0])
        ranks = range(len(first_phase))
        return max(ranks, key=lambda rank: sum(seconds[rank] for seconds in computing))

    def line(self, step: int) -> str:
        """Return a log line with the mean and the longest time of each phase, in milliseconds."""
        parts = []
        for name, seconds in self.seconds.items():
            mean = sum(seconds) / len(seconds)
            longest = max(seconds)
            where = f" (rank {seconds.index(longest)})" if len(seconds) > 1 else ""
            parts.append(f"{name} {1e3 * mean:.3g} / {1e3 * longest:.3g}{where}")
        # computing time per rank; waiting is left out because the slowest rank waits least
        computing = [seconds for name, seconds in self.seconds.items() if name in COMPUTING]
        busy = [sum(seconds) for seconds in zip(*computing, strict=True)] or [0.0]
        mean = sum(busy) / len(busy)
        over = f", {max(busy) / mean:.2f} times the mean" if mean else ""
        return (
            f"step {step}: mean / longest ms: {'; '.join(parts)}; slowest in computing: rank "
            f"{self.slowest}{over}"
        )

    def figures(self) -> dict[str, float]:
        """Return the slowest rank, and each phase's mean and maximum seconds, for a log file."""
        found: dict[str, float] = {"slowest_rank": self.slowest}
        for name, seconds in self.seconds.items():
            # keys of a JSONL record have no spaces
            key = name.replace(" ", "_")
            found[f"{key}_mean"] = sum(seconds) / len(seconds)
            found[f"{key}_max"] = max(seconds)
        return found


class Pace:
    """Estimates the remaining time: the median of the last 64 step times x the remaining steps.

    Only steps of this process count, so the estimate is also correct in a resumed run. Checkpoints
    between steps hardly affect the median.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._spans: deque[float] = deque(maxlen=64)

    def left(self, steps: int) -> float:
        """Record the end of a step, and return the estimated seconds for `steps` more steps."""
        now = time.monotonic()
        self._spans.append(now - self._last)
        self._last = now
        return statistics.median(self._spans) * steps
