"""Named timers of a step.

Key property: a timer adds up until it is taken; what a moment is on an accelerator (an event in its queue) is a clock
given from outside, and its seconds are worked out when they are asked for, not while the step runs. Rejected: calling
the device's synchronise here, which would cost every CPU run an import and every GPU run a stall.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol


class Clock(Protocol):
    """Moments and the time between them."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one moment to another; may wait until the second is over."""


class WallClock:
    """The host's steady clock."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """See `Clock.seconds`."""
        return end - begin


class Timers:
    """Seconds by name."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the body to `name`, also when the body raises."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((begin, self._clock.mark()))

    def seconds(self, name: str) -> float:
        """Time added to `name` since the last `take`; 0 when it did not run."""
        return sum(self._clock.seconds(begin, end) for begin, end in self._spans.get(name, []))

    def take(self) -> dict[str, float]:
        """All timers, and start again from zero."""
        taken = {name: self.seconds(name) for name in self._spans}
        self._spans = {}
        return taken
